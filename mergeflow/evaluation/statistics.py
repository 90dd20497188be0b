"""Summaries of per-task accuracies."""

from collections.abc import Mapping


def mean(values: Mapping[str, float]) -> float:
    """Return (1/T) Σ_t a_t."""
    return sum(values.values()) / len(values)


def normalised(merged: Mapping[str, float], individual: Mapping[str, float]) -> float:
    """Return the normalised accuracy (1/T) Σ_t merged_t / individual_t.

    Args:
        merged: accuracy of the merged model per task, in [0, 1].
        individual: accuracy of each task's own expert, in (0, 1]; a task whose expert scores 0 counts as 1 when the
            merged model scores 0 too.

    Returns:
        A value ≥ 0; 1 means that merging lost nothing. Source: CART, Section 5 ("normalized accuracy").

    Example:
        >>> normalised({"a": 0.4, "b": 0.9}, {"a": 0.8, "b": 0.9})
        0.75
    """
    assert merged.keys() == individual.keys()
    ratios = [merged[t] / individual[t] if individual[t] else 1.0 + merged[t] for t in individual]
    return sum(ratios) / len(ratios)
