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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from pydantic import Field

from mergeflow.modalities.classification import Classification
from mergeflow.modality import State
from studies.lab import Claim, Row, Section, Study, grid
from studies.lab.analogies import (
    ANALOGY,
    BASE,
    NEAREST,
    SUM,
    TRAINED,
    UNLABELLED,
    less,
    target_rows,
    targets_figure,
    ways_table,
    with_nearest,
)
from studies.lab.digits import ColouredWorld, Digits, Look, Pretrained, accuracy, open_digits, shown, ten_digits
from studies.lab.inputs import Lazy, over_seeds
from studies.lab.rows import select
from studies.lab.tuning import combined, task_vector, trained

SCALES = grid(0.1, 1.5, 0.1)
GAIN, BEHIND = 2, 3


@dataclass(frozen=True)
class Attributes:
    """Two attributes with two values each; a task is a pair of values: which digits, and how they are shown."""

    splits: Mapping[str, tuple[int, ...]]
    looks: Mapping[str, Look]

    @property
    def tasks(self) -> list[tuple[str, str]]:
        return [(split, look) for split in self.splits for look in self.looks]

    def others(self, target: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
        """Return A, B and C: the target's digits in the other look, its look of the other digits, and neither.

        Example:
            >>> two = Attributes({"low": (0,), "high": (1,)}, {"plain": Look(), "dark": Look(dark=True)})
            >>> two.others(("low", "dark"))
            (('low', 'plain'), ('high', 'dark'), ('high', 'plain'))
        """
        split = next(name for name in self.splits if name != target[0])
        look = next(name for name in self.looks if name != target[1])
        return (target[0], look), (split, target[1]), (split, look)


ATTRIBUTES = {
    "rotations × splits": Attributes(
        {"0 to 4": (0, 1, 2, 3, 4), "5 to 9": (5, 6, 7, 8, 9)}, {"upright": Look(), "turned by 60°": Look(angle=60)}
    ),
    "colours × parities": Attributes(
        {"even": (0, 2, 4, 6, 8), "odd": (1, 3, 5, 7, 9)},
        {"white on black": Look(), "black on yellow": Look(dark=True)},
    ),
    "styles × classes": Attributes(
        {"with a loop": (0, 4, 6, 8, 9), "without": (1, 2, 3, 5, 7)},
        {"filled": Look(), "outlined": Look(outlined=True)},
    ),
}


class Options(Section):
    seeds: list[int] = Field(min_length=1)  # of the net and the orders
    world: ColouredWorld  # digits, net and training
    steps: int = Field(120, ge=1)  # of tuning


def measure_seed(options: Options, digits: Lazy[dict[str, Digits]], seed: int) -> Iterator[Row]:
    """Yield validation and test accuracy on each target of each way to reach it."""
    splits = digits()
    base, tune = ten_digits(options.world, splits, seed), options.world.tune.model_copy(update={"steps": options.steps})
    for name, attributes in ATTRIBUTES.items():
        data = {
            split: {
                " ".join(task): shown(examples, attributes.looks[task[1]], " ".join(task), attributes.splits[task[0]])
                for task in attributes.tasks
            }
            for split, examples in splits.items()
        }
        vectors = {
            task: task_vector(trained(base.model, base.start, examples, tune, seed), base.start)
            for task, examples in data["train"].items()
        }
        for target in attributes.tasks:
            others = [" ".join(task) for task in attributes.others(target)]
            figure = partial(
                accuracy_of_sum, base, vectors, {split: tasks[" ".join(target)] for split, tasks in data.items()}
            )
            for row in target_rows(figure, SCALES, " ".join(target), others):
                yield {"seed": seed, "attributes": name, **row}


def accuracy_of_sum(
    base: Pretrained,
    vectors: Mapping[str, State],
    target: Mapping[str, Classification],
    scales: Mapping[str, float],
    split: str,
) -> float:
    """Return the accuracy of the base plus Σ λ Δ on the target, in %."""
    state = combined(base.start, vectors, scales)
    return accuracy(base.model, state, {"target": target[split]})["target"]


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    ours, of = "Δ_A + (Δ_B − Δ_C)", "paired difference, mean over the four targets"
    return [
        claim.of_part(partial(select, attributes=name), name)
        for name in ATTRIBUTES
        for claim in (
            Claim("P22", f"{ours} reaches a task that nobody trained better than the nearest expert.",
                  partial(less, ANALOGY, NEAREST), low=GAIN, of=of, ours=True),
            Claim("P22", f"{ours} with λ = 1, which asks for no labelled data, is better than the base.",
                  partial(less, UNLABELLED, BASE), low=0, of=of, ours=True),
            Claim("P22", f"{ours} is better than Δ_A + Δ_B: taking Δ_C away is worth it.",
                  partial(less, ANALOGY, SUM), low=0, of=of, ours=True),
            Claim("P22", f"{ours} is as good as training on the task.", partial(less, ANALOGY, TRAINED),
                  low=-BEHIND, of=of, ours=True),
        )
    ]
# fmt: on


STUDY = Study(
    options=Options,
    systems=("P22",),
    measure=lambda lab, options: with_nearest(over_seeds(open_digits, measure_seed)(lab, options)),
    claims=claims,
    tables={f"{name}: test accuracy on the target, %": partial(ways_table, name) for name in ATTRIBUTES},
    figures={"targets": partial(targets_figure, "test accuracy, %", height=3.2, wrap=10, sharey=True)},
)
