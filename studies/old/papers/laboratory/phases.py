"""Addition and unlearning over α and λ, with whole task vectors and with what is left of them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from studies.old.papers.laboratory.options import Options, column, start, task_of, test_set, trained
from studies.old.rows import Row
from studies.theory.laboratory import (
    PatternTask,
    Weights,
    attention_mass,
    combined,
    frobenius_left,
    irrelevant_energy,
    judge,
    large_rows,
    leading_cosine,
    related_patterns,
    row_pruned,
    truncated,
)


def phase_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield, for every α, every λ and every kind of task vector, how Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 does on both tasks.

    The kinds are the whole vectors (`whole`), their best approximations of rank 1 and 2, and vectors whose MLP keeps a
    share of its rows: the largest (`rows …`), or the smallest, as a control (`smallest …`).
    """
    begin, output = start(options, seed)
    first, _, rest = related_patterns(0.0, options.dimensions)  # both are the same for every α
    own = task_of(options, first, rest)
    vector = trained(options, begin, output, own, 2 * seed)
    for alpha in options.alphas:
        second = related_patterns(alpha, options.dimensions)[1]
        tasks = [own, task_of(options, second, rest)]
        vectors = [vector, trained(options, begin, output, tasks[1], 2 * seed + 1)]
        yield from _structure(options, seed, alpha, begin, vectors, tasks)
        tests = [test_set(options, task, 2 * seed + number) for number, task in enumerate(tasks)]
        for kind, change in _kinds(options, alpha).items():
            scales = options.scales if kind == "whole" else [scale for scale in options.scales if -2 <= scale <= 2]
            changed = [change(vector) for vector in vectors]
            yield from _sweep(seed, alpha, kind, scales, begin, output, changed, tests)


def _kinds(options: Options, alpha: float) -> dict[str, Callable[[Weights], Weights]]:
    kinds: dict[str, Callable[[Weights], Weights]] = {"whole": lambda vector: vector}
    if alpha in (-0.5, 0.0, 0.5):
        kinds |= {f"rank {rank}": lambda vector, rank=rank: truncated(vector, rank) for rank in (1, 2)}  # type: ignore[misc]
    if alpha == 0.0:
        for keep in options.keep:
            kinds[f"rows {keep:g}"] = lambda vector, keep=keep: row_pruned(vector, keep)  # type: ignore[misc]
            kinds[f"smallest {keep:g}"] = lambda vector, keep=keep: row_pruned(vector, keep, smallest=True)  # type: ignore[misc]
    return kinds


def _sweep(
    seed: int,
    alpha: float,
    kind: str,
    scales: list[float],
    begin: Weights,
    output: Tensor,
    vectors: list[Weights],
    tests: list[tuple[Tensor, Tensor]],
) -> Iterator[Row]:
    by = column(scales)
    models = combined(begin, vectors, torch.stack([torch.ones_like(by), by], 1))
    judged = [judge(models, output, *test) for test in tests]
    for index, scale in enumerate(scales):
        row: Row = {"part": "phase", "seed": seed, "alpha": alpha, "kind": kind, "scale": scale}
        for number, found in enumerate(judged, 1):
            row[f"hinge_{number}"] = float(found.hinge[index])
            row[f"accuracy_{number}"] = float(found.accuracy[index])
            row[f"margin_{number}"] = float(found.margin[index])
        yield row


def _structure(
    options: Options, seed: int, alpha: float, begin: Weights, vectors: list[Weights], tasks: list[PatternTask]
) -> Iterator[Row]:
    """Yield what the first task's vector looks like, seen from both patterns."""
    vector, (task, other) = vectors[0], tasks
    own, across = task.pattern, other.pattern
    inputs, labels = test_set(options, task, seed)
    quadratic = [float(pattern @ vector.attention @ pattern) for pattern in (own, across)]
    values = [float((vector.value @ pattern).norm()) for pattern in (own, across)]
    yield {
        "part": "structure",
        "seed": seed,
        "alpha": alpha,
        "attention_ratio": quadratic[1] / quadratic[0],
        "value_ratio": values[1] / values[0],
        "attention_mass": attention_mass(begin.plus(vector), inputs[labels > 0], own),
        "value_cosine": leading_cosine(vector.value, own),
        "attention_cosine": leading_cosine(vector.attention, own),
        "value_left_1": frobenius_left(vector.value, 1),
        "value_left_2": frobenius_left(vector.value, 2),
        "attention_left_1": frobenius_left(vector.attention, 1),
        "irrelevant_energy": irrelevant_energy(vector, own, task.irrelevant),
        "large_rows": large_rows(vector),
    }
