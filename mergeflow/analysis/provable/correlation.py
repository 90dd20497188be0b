"""How far tasks are correlated, seen by what their experts answer to samples without labels."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mergeflow.errors import MergeflowError


@dataclass(frozen=True)
class Correlations:
    """α̂ of all pairs of experts."""

    names: tuple[str, ...]
    values: list[list[float]]  # [T][T], symmetric, in [−1, 1], with 1 on the diagonal
    left_out: int  # samples that an expert answered exactly as it does on average; they have no direction

    def of(self, first: str, second: str) -> float:
        """Return α̂ of two experts."""
        return self.values[self.names.index(first)][self.names.index(second)]


def output_correlation(first: Tensor, second: Tensor) -> tuple[float, int]:
    """Return α̂ in [−1, 1] of two models' logits [n, C], and the number of samples for which one has no direction.

    α̂(·, ·, D) = (1/n) Σ_i cos⟨ỹ_1^i, ỹ_2^i⟩,  ỹ_l^i = y_l^i − mean_i y_l^i

    Source:
        Li et al. 2025, Equation 11. With one logit, or two that sum to nothing, the cosine of a sample is the
        agreement in sign.
    """
    if first.shape != second.shape or first.ndim != 2 or not len(first):
        raise MergeflowError(
            f"outputs of shapes {tuple(first.shape)} and {tuple(second.shape)} were found; expected those of two "
            "models on the same samples, [samples, classes] both, at least one sample."
        )
    if not (first.isfinite().all() and second.isfinite().all()):
        raise MergeflowError(
            "the outputs hold a NaN or an infinity: a model with these has no correlation with any other."
        )
    centred = [(outputs.double() - outputs.double().mean(0)) for outputs in (first, second)]
    lengths = [outputs.norm(dim=1) for outputs in centred]
    # What rounding leaves of equal answers is no direction.
    scale = [1e-7 * outputs.double().abs().max() for outputs in (first, second)]
    changed = (lengths[0] > scale[0]) & (lengths[1] > scale[1])
    if not changed.any():
        raise MergeflowError("a model answers all samples alike: its outputs have no correlation with any other's.")
    cosines = (centred[0] * centred[1]).sum(1)[changed] / (lengths[0] * lengths[1])[changed]
    return float(cosines.mean().clamp(-1, 1)), int((~changed).sum())


def correlations(outputs: Mapping[str, Mapping[str, Tensor]]) -> Correlations:
    """Return α̂ of all pairs of experts, each pair on the samples of its two tasks.

    α̂(Ψ_1, Ψ_2) = ½ [α̂(Ψ_1, Ψ_2, D_1) + α̂(Ψ_1, Ψ_2, D_2)]

    Args:
        outputs: task → expert, named by its own task → its logits on the samples of the former, [n, C of that task].

    Source: Li et al. 2025, Equation 11.
    """
    names = tuple(outputs)
    values = [[float(name == other) for other in names] for name in names]
    left_out = 0
    for i, first in enumerate(names):
        for j, second in enumerate(names[:i]):
            measured = [_on(task, outputs[task], first, second) for task in (first, second)]
            values[i][j] = values[j][i] = (measured[0][0] + measured[1][0]) / 2
            left_out += measured[0][1] + measured[1][1]
    return Correlations(names, values, left_out)


def _on(task: str, answers: Mapping[str, Tensor], first: str, second: str) -> tuple[float, int]:
    if missing := [name for name in (first, second) if name not in answers]:
        raise MergeflowError(f"the outputs of expert '{missing[0]}' on the samples of '{task}' are missing; give them.")
    try:
        return output_correlation(answers[first], answers[second])
    except MergeflowError as error:
        raise MergeflowError(f"experts '{first}' and '{second}' on the samples of '{task}': {error}") from error
