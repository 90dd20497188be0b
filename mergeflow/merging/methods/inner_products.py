"""What methods on the sphere need of a tensor: inner products of its experts, and sums of them with coefficients.

Both are taken block by block in float64, so that nothing of the tensor's size is held in that type. Tensors that are
too large to be held with all experts are read twice: once for the inner products, once for the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.stack import Model, Pass, Stack

if TYPE_CHECKING:
    from torch import Tensor

On = Literal["task_vectors", "weights"]
Rows = list[list[float]]

# Elements of a tensor from which on it is read twice, in pieces: the second time the system has it in memory, which
# costs less than to hold base and experts in the type of arithmetic.
LARGE = 2**19
_NAME = "inner_products"


def in_blocks(args: Any, name: str, model: Model) -> bool:
    """Whether a tensor is so large that it is read twice; `elementwise` of methods that read `inner_products`."""
    return prod(model.shapes[name]) > LARGE


def inner_products(stack: Stack, on: On) -> Tensor:
    """Return v_s · v_t of the whole tensor, float64 [T, T] on the CPU; v is τ (`task_vectors`) or θ (`weights`)."""
    products: dict[str, Tensor] = stack.model.results.get(_NAME, {})
    return (
        products[stack.name]
        if stack.name in products
        else _total((part for _, part in _by_block(stack, on)), len(stack.taus))
    )


def _by_block(stack: Stack, on: On) -> Iterator[tuple[int, Tensor]]:
    """Yield the first element of each block and the upper half of its inner products [T, T], on the CPU."""
    count = len(stack.taus)
    for start, points in _blocks(stack, on):
        part = torch.zeros(count, count, dtype=torch.float64, device=stack.taus.device)
        room = torch.empty_like(points[0])
        # Sums of products and no product of matrices, whose order of summing depends on the library.
        for row in range(count):
            for column in range(row, count):
                part[row, column] = torch.mul(points[row], points[column], out=room).sum()
        yield start, part.cpu()  # what follows is arithmetic on a few numbers


def _total(parts: Iterable[Tensor], count: int) -> Tensor:
    """Return the inner products [T, T] from those of the blocks in order: the same for any division into pieces."""
    total = sum(parts, start=torch.zeros(count, count, dtype=torch.float64))
    return torch.triu(total) + torch.triu(total, 1).T


def arc_shares(cosine: Tensor, t: float, linear: Tensor) -> list[Tensor]:
    """Return the factors of two vectors at t on the arc between them: sin((1−t)ω)/sin ω and sin(tω)/sin ω.

    Args:
        cosine: cos ω, […].
        t: Place on the arc, from the first vector (0) to the second (1).
        linear: Where the factors are 1 − t and t instead, […].
    """
    angle = torch.arccos(torch.where(linear, 0, cosine))
    return [torch.where(linear, share, torch.sin(share * angle) / torch.sin(angle)) for share in (1 - t, t)]


def combined(stack: Stack, coefficients: Tensor, on: On) -> Tensor:
    """Return Σ c_t v_t of a stack, less θ0 where v is θ: a direction [*base.shape].

    Args:
        stack: Base and task vectors of a tensor, or of a block of one.
        coefficients: c_t, [T] in float64.
    """
    result, column = torch.empty_like(stack.base), coefficients.to(stack.base.device)[:, None]
    flat, base = result.reshape(-1), stack.base.reshape(-1)
    for start, points in _blocks(stack, on):
        stop = start + points.shape[1]
        flat[start:stop] = points.mul_(column).sum(0)
        if on == "weights":
            flat[start:stop] -= base[start:stop]
    return result


def _blocks(stack: Stack, on: On) -> Iterator[tuple[int, Tensor]]:
    """Yield the first element of each block, and the experts' v in float64, [T, n]; on a device in one piece.

    They lie in memory that the next block takes: fresh memory would cost as much as the arithmetic.
    """
    base, taus = stack.base.reshape(-1), stack.taus.reshape(len(stack.taus), -1)
    step = BLOCK if base.device.type == "cpu" else max(len(base), 1)
    room = taus.new_empty(len(taus), min(step, len(base)), dtype=torch.float64)
    for start in range(0, len(base), step):
        points = room[:, : min(step, len(base) - start)]
        for tau, point in zip(taus[:, start : start + step], points, strict=True):
            point.copy_(tau if on == "task_vectors" else base[start : start + step] + tau)
        yield start, points


def inner_product_pass(on: Callable[[Any], On]) -> Callable[[Any, DType], tuple[Pass, ...]]:
    """Return the passes of a method that reads `inner_products`: one over large tensors alone."""

    def observe(rows: dict[int, Rows], stack: Stack, args: Any) -> dict[int, Rows]:
        # Python's numbers: small tensors would lie between the large ones that are freed, and leave holes of 3 GB.
        rows |= {stack.start + at: part.tolist() for at, part in _by_block(stack, on(args))}
        return rows

    def finish(rows: dict[int, Rows], model: Model, args: Any) -> Tensor:
        parts = (torch.tensor(rows[start], dtype=torch.float64) for start in sorted(rows))
        return _total(parts, len(model.experts))

    first_pass = Pass(
        _NAME, lambda model, args: {}, observe, lambda a, b: {**a, **b}, finish, only=in_blocks, within=True
    )
    return lambda args, dtype: (first_pass,)
