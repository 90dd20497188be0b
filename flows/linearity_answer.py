"""By what `mergeflow linearity` says which pairs lose more when they are merged: what the record of the study chose."""

from collections.abc import Mapping
from dataclasses import dataclass

from mergeflow.analysis.geometry import norm
from mergeflow.modality import State


@dataclass(frozen=True)
class Answer:
    """A prediction and what it was worth in the record.

    Attributes:
        prediction: its name in PREDICTIONS.
        within: its rank correlation with the loss of merging, mean over ways of training and seeds.
        across: the same over the pairs of all ways together.
    """

    prediction: str
    within: float
    across: float


# tests/studies/test_mergeability.py holds this against studies/records/mergeability.parquet.
ANSWER = Answer("distance", 0.57, 0.51)


def predicted(first: State, second: State) -> float:
    """Return the prediction of a pair, ‖θ_i − θ_j‖ over all tensors of floating-point numbers.

    Args:
        first: θ_i.
        second: θ_j.

    Example:
        >>> import torch
        >>> predicted({"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([0.0, 5.0])})
        5.0
    """
    return norm({name: value - second[name] for name, value in first.items() if value.is_floating_point()})


def sentence(values: Mapping[str, float]) -> str:
    """Return what to expect of merging pairs, and how sure that is.

    Args:
        values: pair → its prediction.
    """
    worst = max(values, key=values.__getitem__)
    told = f"{worst} will lose most when merged, as far as weights tell: its {ANSWER.prediction} is the largest."
    if len(values) == 1:
        told = f"The {ANSWER.prediction} of a pair says something beside those of other pairs of the same base alone."
    return (
        f"{told} In the study mergeability it ranked pairs by what they lost with a rank correlation of "
        f"{ANSWER.within:.2f} within one way of training and {ANSWER.across:.2f} across ways."
    )
