"""Task vectors, their sums at scales, and the scale that is best."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mergeflow.modality import State


def task_vector(state: State, start: State) -> dict[str, Tensor]:
    """Return ΔΨ = Ψ − Ψ^(0), in the tensors' own types.

    Args:
        state: Ψ, tuned weights.
        start: Ψ^(0), what they were tuned from.
    """
    return {name: state[name] - value for name, value in start.items()}


def combined(start: State, vectors: Mapping[str, State], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """Return Ψ^(0) + Σ λ_i ΔΨ_i.

    Args:
        start: Ψ^(0).
        vectors: ΔΨ by task.
        scales: λ by task; tasks that are not named have 0.
    """
    return {
        name: value + sum(scale * vectors[task][name] for task, scale in scales.items() if scale)
        for name, value in start.items()
    }


def best_scale(scales: Sequence[float], score: Callable[[float], float]) -> float:
    """Return the λ with the largest score; of several that are alike the middle one, the lower of two.

    Args:
        scales: those to try.
        score: of one.

    Example:
        >>> best_scale([0.1, 0.2, 0.3, 0.4], lambda scale: min(scale, 0.2))
        0.3
    """
    scores = [score(scale) for scale in scales]
    best = [scale for scale, value in zip(scales, scores, strict=True) if value == max(scores)]
    return best[(len(best) - 1) // 2]
