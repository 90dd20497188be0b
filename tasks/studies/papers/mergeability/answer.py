"""By what `mergeflow linearity` says which pairs lose more when they are merged: what the record of the study chose."""

from collections.abc import Mapping
from dataclasses import dataclass

from mergeflow.modality import State
from tasks.studies.papers.mergeability.results import PREDICTIONS
from tasks.studies.papers.mergeability.study import of_weights

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Answer:
    """A prediction and what it was worth in the record.

    Attributes:
        prediction: its name in PREDICTIONS.
        within: its rank correlation with the loss of merging, mean over ways of training and seeds.
        across: the same over the pairs of all ways together.
        thirds: of all pairs by the prediction, low, middle and high: the largest value, and the quartiles of the loss
            in points of accuracy.
    """

    prediction: str
    within: float
    across: float
    thirds: tuple[tuple[float, Quartiles], tuple[float, Quartiles], tuple[float, Quartiles]]

    def lost(self, value: float) -> Quartiles:
        """Return the quartiles of what pairs of the record lost whose prediction was in the same third."""
        return next((loss for high, loss in self.thirds if value <= high), self.thirds[-1][1])


# tests/studies/test_mergeability_suites.py holds these against docs/studies/results/mergeability.parquet.
ANSWER = Answer(
    "sign conflict", 0.28, 0.55, ((0.476, (0.1, 0.4, 2.7)), (0.496, (1.1, 2.2, 3.4)), (0.518, (2.0, 3.4, 5.0)))
)


def predicted(base: State, first: State, second: State) -> float:
    """Return the prediction of a pair, from its weights alone.

    Args:
        base: θ0.
        first: θ_i.
        second: θ_j.

    Example:
        >>> import torch
        >>> base, one, other = ({"w": torch.tensor(values)} for values in ([0.0, 0.0], [3.0, 1.0], [3.0, -1.0]))
        >>> predicted(base, one, other)
        0.25
    """
    try:
        return PREDICTIONS[ANSWER.prediction](of_weights(_vector(base, first), _vector(base, second)))
    except ZeroDivisionError:  # there is no weight that both changed, and no conflict
        return 0.0


def _vector(base: State, expert: State) -> State:
    return {name: expert[name] - value for name, value in base.items() if value.is_floating_point()}


def sentence(values: Mapping[str, float]) -> str:
    """Return what to expect of merging pairs, and how sure that is.

    Args:
        values: pair → its prediction.
    """
    worst = max(values, key=values.__getitem__)
    low, _, high = ANSWER.lost(values[worst])
    most = "This pair" if len(values) == 1 else f"{worst} will lose most when merged, as far as weights tell: it"
    return (
        f"{most} has a {ANSWER.prediction} of {values[worst]:.3f}; half of such pairs lost {low:.1f} to {high:.1f} "
        f"points in the study mergeability (rank correlation {ANSWER.within:.2f} within one way of training, "
        f"{ANSWER.across:.2f} across ways)."
    )
