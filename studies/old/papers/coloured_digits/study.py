"""Study `coloured_digits`: does the theory of λ hold for a small transformer that tells odd from even coloured digits?

**Question.** The paper's own experiment: tasks that differ in how colour goes with parity, so that two of them are
irrelevant, aligned or contradictory. Do the λ that add and unlearn a task fall where the theory says? Is a third
task reached by λ_1, λ_2 inside Equation 7's region? And how far does this depend on how long the experts are tuned?

**Method.** Drawn digits, odd or even; an odd digit is red with r_o, an even one with 1 − r_o, else green. A vision
transformer (torchvision's, small) learns the ten digits in white; with a fresh head it is Ψ^(0) of all experts of a
seed. T1 has r_o = 0.95; T2 has 0.5 (irrelevant), 0.9 (aligned) or 0.05 (contradictory). In Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 with λ
from −1 to 2 by 0.2, λ is chosen on validation: by the sum of both accuracies (addition) and by their difference
(unlearning); test is looked at for these λ and for λ = 0, so that unlearning is not credited with what T1 alone does.
A third task (r_o = 0.9) is reached from r_o = 0.85 and 0.05 on a grid of λ_1, λ_2 from −2 to 3 by 0.2; a point counts
as good if its validation accuracy is within 2 points of the best, and Equation 7's region is drawn with γ̂ = α̂ of each
expert with the third task's, β = 0.01 and c = 0.02 as in the paper, with the theorem's margin 1 and the figure's 0.2.
Of λ that are equally good on validation the middle one is taken; on a plateau many are, and the chosen λ says little. α̂
is of logits less their mean over the two classes. Rules are those of the plan, written before the first run; that one
took the lowest of equally good λ and had 200 digits to choose by in place of 1000. With these pictures the record is
therefore the second look at test, not the first.

**Source.** Li et al. 2025, Section 4.1, Tables 1 and 2, Figures 1 and 2, Equations 7 and 11.
"""

from functools import partial
from typing import Any

from pydantic import Field

from studies.lab.coloured import ColouredWorld, open_digits, pretrained, tuned
from studies.old.papers.coloured_digits.figures import figures
from studies.old.papers.coloured_digits.measuring import CASES, FIRST, ONTO, TARGET, Setting, measured_rows
from studies.old.papers.coloured_digits.results import findings, tables
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import tidy
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    seeds: of the net and the orders. world: digits, net and training. lengths: steps of tuning. samples: without
    labels, of each task. step: of the grid of λ_1 and λ_2.
    """

    seeds: list[int] = Field(min_length=1)
    world: ColouredWorld
    lengths: list[int] = Field(min_length=1)
    samples: int = Field(200, ge=8)
    step: float = Field(0.2, gt=0)


SYSTEMS = ("P1", "P2", "P5", "P6", "P7", "P8")
DECLARED = Declaration(Options, systems=SYSTEMS)


def run(io: StageIO) -> None:
    """Write the result of the study that runs: this one, or one that asks the same of another model."""
    options = DECLARED.chosen(io)
    digits = Once(partial(open_digits, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, options, digits))
    rows = [row for piece in pieces for row in piece["rows"]]
    result = StudyResult(tables(rows), findings(rows), [], tidy(rows))
    result.write(io, figures(rows))


def measure(options: Options, digits: Any, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of one seed.

    Args:
        options: the study's choices.
        digits: gives the splits.
        seed: of the net and the orders.
    """
    splits = digits()
    base = pretrained(options.world, splits, seed)
    colours = sorted({FIRST, TARGET, *CASES.values(), *ONTO})
    rows = []
    for steps in options.lengths:
        experts = tuned(options.world, base, splits["train"], colours, steps, seed)
        setting = Setting(base, experts, splits, options.samples, options.step)
        rows += [{"seed": seed, "steps": steps, **row} for row in measured_rows(setting)]
    return {"rows": rows}
