"""What unlearning is held to: Equation 3 in accuracies, and of texts in losses and in Rouge-L too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from mergeflow.analysis.provable.criteria import Criterion, all_met, unlearning_criteria
from mergeflow.errors import MergeflowError
from mergeflow.modality import Examples, Model

SLACK = 1e-12  # 0.82 − 0.02 is a little more than 0.80 in floating point


@runtime_checkable
class Written(Protocol):
    """Examples that are texts: of them the loss is the logarithm of the perplexity, and says more than the score.

    A model that has unlearned a book may still name many of its next tokens while the book has become unlikely.
    """

    def token_losses(self, model: Model, rows: Tensor) -> Tensor:
        """Return −log p of each predicted token of `rows`, [m] in nats."""
        ...


def written(data: Mapping[str, Examples]) -> dict[str, Examples]:
    """Return the tasks that are texts."""
    return {task: examples for task, examples in data.items() if isinstance(examples, Written)}


@dataclass(frozen=True)
class Figures:
    """What a model does on validation.

    Attributes:
        accuracy: Task → accuracy, a fraction.
        loss: Task of texts → mean −log p of its tokens, in nats.
        recall: Task of texts → mean Rouge-L recall of how its passages are gone on with, a fraction.
    """

    accuracy: dict[str, float]
    loss: dict[str, float] = field(default_factory=dict)
    recall: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bounds:
    """What may be lost, and what counts as forgotten.

    Attributes:
        lose: What each other task may lose in accuracy, a fraction.
        rise: What the loss of each other task of texts may rise, in nats: log of the factor of its perplexity.
        at_most: The accuracy down to which the task counts as forgotten; None: that of the base.
        at_least: The loss up to which a task of texts counts as forgotten, in nats; None: that of the base.
        fall: What the Rouge-L recall of each other task of texts may fall, a fraction.
        recited: The Rouge-L recall down to which a task of texts counts as forgotten; None: that of the base.
    """

    lose: float = 0.02
    rise: float = 0.05
    at_most: float | None = None
    at_least: float | None = None
    fall: float = 0.05
    recited: float | None = None

    def check(self) -> None:
        """Refuse bounds that cannot be meant.

        Raises:
            MergeflowError: an accuracy or a recall is not a fraction, or a loss is below 0.
        """
        for names, allowed, limit in (
            (("--lose", "--at-most"), self.lose, self.at_most),
            (("--fall", "--recited"), self.fall, self.recited),
        ):
            if not 0 <= allowed < 1 or (limit is not None and not 0 <= limit <= 1):
                raise MergeflowError(
                    f"{names[0]} {allowed:g} and {names[1]} {limit} are fractions: expected 0 to 1, such as 0.02."
                )
        if not self.rise >= 0 or (self.at_least is not None and not self.at_least >= 0):
            raise MergeflowError(
                f"--rise {self.rise:g} and --at-least {self.at_least} are losses in nats: expected 0 or more, "
                "such as 0.05."
            )

    def criteria(self, found: Figures, before: Figures, base: Figures, task: str) -> list[Criterion]:
        """Return whether a model has forgotten a task and kept each other one, in accuracies, losses and Rouge-L.

        Args:
            found: of the model.
            before: of the version it was made of.
            base: of the base, on the task to forget at least.
            task: to forget.
        """
        kept = {one: before.accuracy[one] - self.lose - SLACK for one in before.accuracy if one != task}
        at_most = base.accuracy[task] if self.at_most is None else self.at_most
        judged = unlearning_criteria(found.accuracy, kept, {task: at_most}, "accuracy")
        likely = {one: before.loss[one] + self.rise + SLACK for one in before.loss if one != task}
        at_least = {task: base.loss[task] if self.at_least is None else self.at_least} if task in before.loss else {}
        judged += unlearning_criteria(found.loss, likely, at_least, "loss")
        known = {one: before.recall[one] - self.fall - SLACK for one in before.recall if one != task}
        recited = {task: base.recall[task] if self.recited is None else self.recited} if task in before.recall else {}
        return [*judged, *unlearning_criteria(found.recall, known, recited, "recall")]


@dataclass(frozen=True)
class Tried:
    """One weight of the task to forget, on validation.

    Attributes:
        scale: The weight λ.
        figures: Of the merge, on the task to forget too.
        criteria: Of Equation 3: in accuracies, and of texts in losses and in Rouge-L.
    """

    scale: float
    figures: Figures
    criteria: list[Criterion]

    @property
    def keeps(self) -> bool:
        """Whether no other task loses more than was allowed."""
        return all_met(one for one in self.criteria if one.kept)

    @property
    def forgotten(self) -> int:
        """How many of the criteria on the task to forget are met."""
        return sum(one.holds for one in self.criteria if not one.kept)


def choose(tried: Sequence[Tried], task: str) -> Tried:
    """Return the weight below 0 that forgets most among those that keep the other tasks.

    Most: it meets the most criteria of forgetting, of these its accuracy on the task is the lowest, of equal ones it
    is the nearest to 0.

    Args:
        tried: weights, 0 among them.
        task: the task to forget.

    Raises:
        MergeflowError: none below 0 keeps them.
    """
    able = [one for one in tried if one.scale < 0 and one.keeps]
    if not able:
        nearest = max((one for one in tried if one.scale < 0), key=lambda one: one.scale)
        hurt = next(one for one in nearest.criteria if one.kept and not one.holds)
        alone = next(one for one in tried if one.scale == 0)
        raise MergeflowError(
            f"no weight below 0 for '{task}' keeps every other task within its bounds: at λ = {nearest.scale:g} "
            f"{hurt.reason}{'' if alone.keeps else ', and leaving it out (λ = 0) breaks a bound already'}. Allow more "
            f"with --lose, --rise or --fall, or take it out with `mergeflow registry unmerge --task {task}`."
        )
    return min(able, key=lambda one: (-one.forgotten, one.figures.accuracy[task], -one.scale))
