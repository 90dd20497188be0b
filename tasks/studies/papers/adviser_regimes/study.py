"""Study `adviser_regimes`: does the adviser earn its place however the experts were trained?

**Question.** The study adviser_suites asks it of more and more tasks, tuned in one way. Here the eight tasks of the
first suite are tuned for one epoch, to convergence, and in rounds of merging and tuning: do the same four λ serve, and
is what unlearning costs told by the same prediction?

**Method.** As in adviser_suites, whose ways, grids and rules these are, on the runs of this project. Experts after one
epoch have short task vectors, converged ones long; of a run in rounds the experts are those of the last round, which
are near to each other, and the base is what that round began with.

*What the means hide.* Findings are means over three regimes, and experts of the last of sixteen rounds (mima_16) are
nearly the base of that round, so that hardly any choice matters. There negating unlearns 0.3 ± 0.1 points further than
leaving out (pooled 8.1 ± 1.0), and on pairs and triples the best λ lies in the range by lengths in 28 ± 22 % of the
sets (pooled 64 ± 13 %). On its whole suites lengths less Optuna is −0.30 ± 0.45 points (pooled 14.3 ± 13.9), and
lengths less λ = 0.4 is −0.02 ± 0.13 (pooled 5.0 ± 0.5). The theory has no range for these suites, and λ = 0.4 stands in
for it, so that lengths less theory is the same −0.02 ± 0.13 (pooled 14.1 ± 1.7). That is also why the theory has
"6.7 × fewer" candidates there: 20 over the mean number, which is 3.

A rank correlation where nothing varies counts as 0. In mima_16, 51 to 56 of the 56 losses of a seed are exactly 0, and
in seed 0 all are. Without that seed's zeros each of the four means over the runs is 0.02 larger and its interval wider
(α̂ of the logits 0.16 ± 0.12 in place of 0.14 ± 0.06), and the verdicts are the same.

**Source.** Li et al. 2025, Theorems 1 and 2, Equation 11; Ilharco et al. 2023, Editing models with task arithmetic.
"""

from tasks.project.declaration import Declaration
from tasks.studies.papers.adviser_suites.measuring import Options
from tasks.studies.papers.adviser_suites.study import run

__all__ = ["DECLARED", "run"]

DECLARED = Declaration(Options, lambda options: options.runs, splits=("validation", "test"), systems=("P10",))
