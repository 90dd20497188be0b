"""Study `adviser_suites`: does the adviser earn its place on suites of 8, 14 and 20 tasks?

**Question.** On coloured digits four λ by the lengths of the task vectors stand nearly for a grid of twenty, and the
cosine of task vectors ranks what unlearning costs as well as α̂ does. Is it so for a small CLIP on many tasks: whole
suites, pairs and triples of their tasks, and one task of a suite unlearned?

**Method.** Experts of the shared training runs; nothing is trained. Of a run in rounds the experts are those of the
last round, and the base is what that round began with. For every set, λ in θ + λ Σ τ_t is chosen on validation, by mean
accuracy, and looked at once on test:

- `grid`: twenty λ, 0.05 to 0.5 by 0.05 and 0.6 to 1.5 by 0.1;
- `theory`: four λ from 1 / min_i Σ_j α̂_ij to twice that, α̂ by Equation 11 on what tuning changed of the logits; where
  the theory sees no λ, 0.4 alone;
- `lengths`: four λ from 0.8 to 1.6 times λ° = mean ‖τ_i‖ / ‖Σ τ_i‖, the block that `mergeflow advise` prints;
- `optuna`: four trials of TPE between the ends of the grid;
- `fixed`: λ = 0.4, as Ilharco et al. 2023 recommend.

Pairs and triples are drawn anew for each run and seed. Unlearning: in the sum of the largest suite with λ°·1.13, the
middle of the range, one task's vector has weight 0 or −λ; what each other task loses between the two, on test, is held
against four predictions: α̂ of the logits as printed, α̂ of what tuning changed, the response A (how far the unlearned
expert moves the answers to the other task), and the cosine of the task vectors. Negation and leaving out are judged
against each other; how far leaving out unlearns by itself is not. Rules, ranges and grids were written before the first
run; nothing was tried on these experts before.

**Source.** Li et al. 2025, Theorems 1 and 2, Equation 11; Ilharco et al. 2023, Editing models with task arithmetic.
"""

from functools import partial

from studies.lab.inputs import Laboratory
from studies.old.papers.adviser_suites.figures import figures
from studies.old.papers.adviser_suites.measuring import Options, open_suite, suite_rows
from studies.old.papers.adviser_suites.results import findings, tables
from studies.old.pieces import kept_by_run
from studies.old.results import StudyResult
from studies.old.rows import Row, tidy
from tasks.project.declaration import Declaration
from tasks.project.stage import StageIO

DECLARED = Declaration(Options, lambda options: options.runs, splits=("validation", "test"), systems=("P10",))


def run(io: StageIO) -> None:
    """Write the result of the study that runs: this one, or one that asks the same of other runs."""
    whole = Laboratory(io)
    options = DECLARED.chosen(io)
    inputs = whole.first(max(options.counts))
    pieces = kept_by_run(inputs, options.runs, partial(_measured, inputs, options))
    rows: list[Row] = [row for piece in pieces for row in piece["rows"]]
    StudyResult(tables(rows), findings(rows), [], tidy(rows)).write(io, figures(rows))


def _measured(inputs: Laboratory, options: Options, name: str, seed: int) -> Row:
    return {
        "rows": [
            {"run": name, "seed": seed, **row} for row in suite_rows(open_suite(inputs, name, seed), options, seed)
        ]
    }
