"""Study `adviser_regimes`: does the adviser earn its place however the experts were trained?

**Question.** The study adviser_suites asks it of more and more tasks, tuned in one way. Here the eight tasks of the
first suite are tuned for one epoch, to convergence, and in rounds of merging and tuning: do the same four λ serve, and
is what unlearning costs told by the same prediction?

**Method.** As in adviser_suites, whose ways, grids and rules these are, on the runs of this project. Experts after one
epoch have short task vectors, converged ones long; of a run in rounds the experts are those of the last round, which
are near to each other, and the base is what that round began with.

Findings are means over the ways of training. A rank correlation where nothing varies counts as 0.

**Source.** Li et al. 2025, Theorems 1 and 2, Equation 11; Ilharco et al. 2023, Editing models with task arithmetic.
"""

from studies.old.papers.adviser_suites.measuring import Options
from studies.old.papers.adviser_suites.study import run
from tasks.project.declaration import Declaration

__all__ = ["DECLARED", "run"]

DECLARED = Declaration(Options, lambda options: options.runs, splits=("validation", "test"), systems=("P10",))
