"""Study `analogy`: does Δ_A + (Δ_B − Δ_C) reach a task that nobody trained?

**Question.** "T' is to A as B is to C": the paper defines the analogy of task vectors and measures none. Does it work
where two attributes make a task: which digits, and how they are shown?

**Method.** Digits, and a small vision transformer with ten outputs that knows all ten, upright and white on black.
Three pairs of attributes: digits 0 to 4 or 5 to 9, upright or turned by 60°; even or odd digits, white on black or
black on yellow; digits with a loop (0, 4, 6, 8, 9) or without, filled or outlined. An expert is tuned on each of the
four tasks; each task is then the target of the other three: A has its digits, B its look, C neither. λ in Ψ^(0) + λ
(Δ_A + Δ_B − Δ_C), and in the same without C, and of each expert alone, is chosen from 0.1 to 1.5 by 0.1 by the target's
validation accuracy, and test is looked at once; the nearest expert is the one of the three that is best on validation.
Beside it the analogy with λ = 1, which needs no example of the target, and the expert that was trained on the target.
Rules were written before the first run.

In 33 of the 60 choices of λ for the analogy validation took 0.1, the lowest of the grid. Against the base, of which no
rule asks, the analogy is +2.5 ± 1.1 points on rotations × splits, −0.7 ± 1.8 on colours × parities and −0.7 ± 0.9 on
styles × classes.

**Source.** Li et al. 2025, Section 2.1; Ilharco et al. 2023, Editing models with task arithmetic, Section 5.
"""

from functools import partial
from typing import Any

from pydantic import Field

from studies.lab.coloured import ColouredWorld, Digits, open_digits
from studies.lab.digit_tasks import ten_digits
from studies.old.papers.analogy.measuring import ATTRIBUTES, world_rows
from studies.old.papers.analogy.results import figures, findings, tables, with_nearest
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row, tidy
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    seeds: of the net and the orders. world: digits, net and training. steps: of tuning.
    """

    seeds: list[int] = Field(min_length=1)
    world: ColouredWorld
    steps: int = Field(120, ge=1)


DECLARED = Declaration(Options, systems=("P22",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/analogy`."""
    options = DECLARED.chosen(io)
    digits = Once(partial(open_digits, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, options, digits))
    rows = [{"seed": seed, **row} for seed, piece in zip(options.seeds, pieces, strict=True) for row in piece["rows"]]
    rows = with_nearest(rows)
    StudyResult(tables(rows), findings(rows), [], tidy(rows)).write(io, figures(rows))


def measure(options: Options, digits: Any, seed: int) -> Row:
    """Return the rows of one seed.

    Args:
        options: the study's choices.
        digits: gives the splits.
        seed: of the net and the orders.
    """
    splits: dict[str, Digits] = digits()
    base = ten_digits(options.world, splits, seed)
    told = partial(world_rows, options.world, base, splits, steps=options.steps, seed=seed)
    return {"rows": [row for name in ATTRIBUTES for row in told(name=name)]}
