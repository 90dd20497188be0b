"""Study `mergeability_suites`: does linearity tell what a merge loses on suites of 8, 14 and 20 tasks as well?

**Question.** The study mergeability asks of eight tasks, tuned in six ways, which number known before a merge ranks
pairs best by what their merge loses. Is it the same number with another base and with more tasks, and does it rank as
well?

**Method.** As in mergeability, whose predictions, losses and margins these are: all pairs of the suite's experts are
averaged, and a prediction is judged by its rank correlation with what the two tasks lose. The 28 pairs of the first 8
tasks and the 91 of the first 14 are among the 190 of all 20, so that each pair is merged once. Nothing is chosen here:
the prediction by which `mergeflow linearity` answers is chosen on the record of mergeability alone, by a rule in the
page of linearity, and this study is the other world that it is tried on. Rules were written before the first run.

**Source.** Ours, beyond Zhou et al. 2024; suites: Choi et al. 2025 (CART), Section 5.
"""

from functools import partial

from pydantic import Field

from studies.lab.inputs import Laboratory
from studies.old.papers.mergeability.figures import predictions_figure
from studies.old.papers.mergeability.study import Options as Asked
from studies.old.papers.mergeability.study import measure
from studies.old.papers.mergeability_suites.results import findings, tables
from studies.old.pieces import kept_by_run
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.stage import StageIO


class Options(Asked):
    """The choices of mergeability, of which `rounds` is not asked here. counts: the first so many tasks, as suites."""

    rounds: list[int] = Field([], max_length=0)
    counts: list[int] = Field(min_length=1)


DECLARED = Declaration(
    Options,
    runs=lambda options: options.runs,
    splits=("validation", "test"),
    systems=("L1",),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/mergeability_suites`."""
    whole = Laboratory(io)
    options = DECLARED.chosen(io)
    inputs = whole.first(max(options.counts))
    pieces = kept_by_run(inputs, options.runs, partial(measure, inputs, options))
    rows: list[Row] = [row for piece in pieces for row in piece["rows"]]
    suites = {count: inputs.tasks[:count] for count in sorted(options.counts)}
    result = StudyResult(tables(rows, suites, options.runs), findings(rows, suites, options.runs), [], rows)
    result.write(io, {"predictions": predictions_figure(rows, options.runs)})
