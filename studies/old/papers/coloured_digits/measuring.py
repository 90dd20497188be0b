"""What the study `coloured_digits` measures of the experts of one seed and length."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from mergeflow.analysis.geometry import cosine_matrix
from mergeflow.analysis.provable.answers import ask
from mergeflow.analysis.provable.correlation import Correlations, correlations
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.subset import Subset
from studies.lab.coloured import Digits, Pretrained, accuracy, coloured, name_of
from studies.lab.scales import task_vector
from studies.old.pieces import grid
from studies.old.rows import Row
from studies.theory.coefficients import out_of_domain

FIRST, TARGET = 0.95, 0.9
CASES = {"irrelevant": 0.5, "aligned": 0.9, "contradictory": 0.05}
ONTO = (0.85, 0.05)
SCALES = grid(-1, 2, 0.2)
MARGINS = (1.0, 0.2)
BETA, C = 0.01, 0.02
GOOD = 2.0
Point = tuple[float, ...]


@dataclass(frozen=True)
class Setting:
    """The experts of one seed and length, and the digits.

    Attributes:
        base: The net and Ψ^(0).
        experts: Weights by task.
        splits: The digits.
        samples: Of each task's validation digits, for α̂.
        step: Of the grid of λ_1 and λ_2.
    """

    base: Pretrained
    experts: Mapping[str, Mapping[str, Tensor]]
    splits: Mapping[str, Digits]
    samples: int
    step: float

    @cached_property
    def vectors(self) -> dict[str, dict[str, Tensor]]:
        """ΔΨ by task."""
        return {task: task_vector(state, self.base.start) for task, state in self.experts.items()}

    def task(self, red_if_odd: float, split: str) -> Classification:
        """Return a task's digits of a split.

        Args:
            red_if_odd: r_o.
            split: train, validation or test.
        """
        return coloured(self.splits[split], red_if_odd, name_of(red_if_odd))

    def accuracies(self, scales: Mapping[float, float], judged: tuple[float, ...], split: str) -> list[float]:
        """Return the accuracy of Ψ^(0) + Σ λ ΔΨ on tasks, in %.

        Args:
            scales: r_o → λ.
            judged: r_o of the tasks.
            split: train, validation or test.
        """
        state = {
            name: value + sum(scale * self.vectors[name_of(one)][name] for one, scale in scales.items())
            for name, value in self.base.start.items()
        }
        found = accuracy(self.base.model, state, {name_of(one): self.task(one, split) for one in judged})
        return [found[name_of(one)] for one in judged]


def measured_rows(setting: Setting) -> list[Row]:
    """Return the rows of one seed and length.

    Args:
        setting: the experts and the digits.
    """
    colours = [float(name.removeprefix("r")) for name in setting.experts]
    samples = {name_of(one): Subset.first(setting.task(one, "validation"), setting.samples) for one in colours}
    asked = ask(setting.base.model, setting.base.start, setting.experts, samples)
    alphas = correlations(asked.experts)
    return [
        *_correlation_rows(setting, alphas, correlations(asked.changes)),
        *(row for case in CASES for row in _case_rows(setting, case)),
        *_target_rows(setting, alphas),
    ]


def _correlation_rows(setting: Setting, alphas: Correlations, changes: Correlations) -> Iterator[Row]:
    names = list(setting.experts)
    cosines = cosine_matrix([setting.vectors[name] for name in names])
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            figures = {"alpha": alphas.values[i][j], "change": changes.values[i][j], "cosine": cosines[i][j]}
            own = setting.accuracies({float(first[1:]): 1.0}, (float(second[1:]),), "test")[0]
            yield {"part": "pair", "first": first, "second": second, **figures, "test_1": own}


def _case_rows(setting: Setting, case: str) -> Iterator[Row]:
    """Yield validation accuracies over λ, and test accuracies where λ was chosen."""
    second = CASES[case]

    def on(split: str, scale: float) -> list[float]:
        return setting.accuracies({FIRST: 1.0, second: scale}, (FIRST, second), split)

    found = {scale: on("validation", scale) for scale in SCALES}
    for scale, (one, two) in found.items():
        yield {"part": "curve", "case": case, "scale": scale, "validation_1": one, "validation_2": two}
    chosen = {
        "addition": middle_of_best({(scale,): sum(judged) for scale, judged in found.items()})[0],
        "unlearning": middle_of_best({(scale,): one - two for scale, (one, two) in found.items()})[0],
        "λ = 0": 0.0,
    }
    experts = [setting.accuracies({one: 1.0}, (one,), "test")[0] for one in (FIRST, second)]
    for way, scale in chosen.items():
        one, two = on("test", scale)
        yield {
            "part": "chosen",
            "case": case,
            "way": way,
            "scale": scale,
            "test_1": one,
            "test_2": two,
            "expert_1": experts[0],
            "expert_2": experts[1],
        }


def middle_of_best(scores: Mapping[Point, float]) -> Point:
    """Return the point with the best score; of equally good ones that nearest to their mean, the first if two are.

    Accuracies of few samples tie on whole plateaus, of which the first point is a corner.

    Args:
        scores: point → score; scores that differ by rounding alone are equal.
    """
    most = max(scores.values())
    tied = [point for point, score in scores.items() if score > most - 1e-9]
    middle = np.mean(tied, axis=0)
    return min(tied, key=lambda point: round(float(np.linalg.norm(middle - point)), 9))


def _target_rows(setting: Setting, alphas: Correlations) -> Iterator[Row]:
    """Yield accuracies on the third task over λ_1 and λ_2, with Equation 7's promise, and what they are to reach."""
    values = grid(-2, 3, setting.step)
    points = [(one, two) for one in values for two in values]
    gammas = [alphas.of(name_of(one), name_of(TARGET)) for one in ONTO]
    promised = {margin: out_of_domain(points, gammas, BETA, C, margin) for margin in MARGINS}
    found = [setting.accuracies(dict(zip(ONTO, point, strict=True)), (TARGET,), "validation")[0] for point in points]
    for number, (one, two) in enumerate(points):
        told = {f"promised_{margin:g}": bool(promised[margin][number]) for margin in MARGINS}
        row = {"part": "grid", "scale_1": one, "scale": two, "validation_1": found[number], **told}
        yield {**row, "good": found[number] >= max(found) - GOOD}
    best = middle_of_best(dict(zip(points, found, strict=True)))
    held: dict[str, dict[float, float]] = {
        "the third task's own expert": {TARGET: 1.0},
        "expert 1": {ONTO[0]: 1.0},
        "expert 2": {ONTO[1]: 1.0},
        "the best of the grid": dict(zip(ONTO, best, strict=True)),
    }
    for way, scales in held.items():
        at = {"scale_1": best[0], "scale": best[1]} if way == "the best of the grid" else {}
        test = setting.accuracies(scales, (TARGET,), "test")[0]
        yield {"part": "target", "way": way, "test_1": test, "gamma_1": gammas[0], "gamma_2": gammas[1], **at}
