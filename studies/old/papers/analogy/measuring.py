"""What the study `analogy` measures of one seed: four tasks of two attributes, each reached from the other three."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from mergeflow.modalities.classification import Classification
from studies.lab.coloured import ColouredWorld, Digits, Pretrained, accuracy
from studies.lab.digit_tasks import Look, shown
from studies.lab.scales import best_scale, combined, task_vector
from studies.lab.tuning import trained
from studies.old.pieces import grid
from studies.old.rows import Row

SCALES = grid(0.1, 1.5, 0.1)


@dataclass(frozen=True)
class Attributes:
    """Two attributes with two values each; a task is a pair of values.

    Attributes:
        splits: Name → digits.
        looks: Name → how they are shown.
    """

    splits: Mapping[str, tuple[int, ...]]
    looks: Mapping[str, Look]

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """All four tasks."""
        return [(split, look) for split in self.splits for look in self.looks]

    def others(self, target: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
        """Return A, B and C: the target's digits in the other look, its look of the other digits, and neither.

        Args:
            target: a task.

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


@dataclass(frozen=True)
class Experts:
    """The experts of one pair of attributes and one seed.

    Attributes:
        base: The net and where they began.
        vectors: Task vectors by task.
        data: Split → task → examples.
    """

    base: Pretrained
    vectors: Mapping[str, Mapping[str, Tensor]]
    data: Mapping[str, Mapping[str, Classification]]

    def accuracy(self, scales: Mapping[str, float], target: str, split: str) -> float:
        """Return the accuracy of the base plus Σ λ Δ on one task, in %.

        Args:
            scales: λ by task.
            target: what is judged.
            split: train, validation or test.
        """
        state = combined(self.base.start, self.vectors, scales)
        return accuracy(self.base.model, state, {target: self.data[split][target]})[target]


def world_rows(
    world: ColouredWorld, base: Pretrained, digits: Mapping[str, Digits], name: str, steps: int, seed: int
) -> Iterator[Row]:
    """Yield the rows of one pair of attributes: for each target and way, λ by validation, and test.

    Args:
        world: whose `tune` says how fast.
        base: where the experts begin.
        digits: the splits.
        name: of the attributes.
        steps: of tuning.
        seed: of the order of the examples.
    """
    attributes, adapting = ATTRIBUTES[name], world.tune.model_copy(update={"steps": steps})
    data = {
        split: {
            " ".join(task): shown(found, attributes.looks[task[1]], " ".join(task), attributes.splits[task[0]])
            for task in attributes.tasks
        }
        for split, found in digits.items()
    }
    vectors = {
        task: task_vector(trained(base.model, base.start, one, adapting, seed), base.start)
        for task, one in data["train"].items()
    }
    for target in attributes.tasks:
        a, b, c = (" ".join(task) for task in attributes.others(target))
        for row in _target_rows(Experts(base, vectors, data), " ".join(target), a, b, c):
            yield {"attributes": name, **row}


def _target_rows(experts: Experts, target: str, a: str, b: str, c: str) -> Iterator[Row]:
    """Yield the rows of one target: signs of the other tasks' vectors with λ by validation, and what has no λ."""
    sums = {
        "A": {a: 1.0},
        "B": {b: 1.0},
        "C": {c: 1.0},
        "A + B": {a: 1.0, b: 1.0},
        "A + B − C": {a: 1.0, b: 1.0, c: -1.0},
    }
    for way, signs in sums.items():

        def score(scale: float, split: str = "validation", signs: Mapping[str, float] = signs) -> float:
            return experts.accuracy({task: scale * sign for task, sign in signs.items()}, target, split)

        best = best_scale(SCALES, score)
        yield {"target": target, "way": way, "scale": best, "validation": score(best), "test": score(best, "test")}
    fixed: dict[str, dict[str, float]] = {
        "base": {},
        "A + B − C, λ = 1": sums["A + B − C"],
        "trained on it": {target: 1.0},
    }
    for way, scales in fixed.items():
        found = {split: experts.accuracy(scales, target, split) for split in ("validation", "test")}
        yield {"target": target, "way": way, **found}
