"""Geometric methods: weights or task vectors as points on a sphere, task vectors as edges of a simplex.

What they need of a tensor are inner products of its experts, and sums of them with coefficients. Both are taken block
by block in float64, so that nothing of the tensor's size is held in that type. Tensors that are too large to be held
with all experts are read twice: once for the inner products, once for the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.method import Args, ByUnit, Copies, Model, Parts, Pass, Stack, gathering, method, tensors

if TYPE_CHECKING:
    from torch import Tensor

On = Literal["task_vectors", "weights"]
Rows = list[list[float]]

# Elements of a tensor from which on it is read twice, in pieces: the second time the system has it in memory, which
# costs less than to hold base and experts in the type of arithmetic.
LARGE = 2**19
_NAME = "inner_products"


def _of_tensors(args: Any) -> bool:
    """Whether a whole tensor has one angle, and not each of its vectors."""
    return getattr(args, "vectors", "tensor") == "tensor"


def in_blocks(args: Any, name: str, model: Model) -> bool:
    """Whether a tensor is so large that it is read twice; `elementwise` of methods that read `inner_products`."""
    return _of_tensors(args) and prod(model.shapes[name]) > LARGE


def inner_products(stack: Stack, on: On) -> Tensor:
    """Return v_s · v_t of the whole tensor, float64 [T, T] on the CPU; v is τ (`task_vectors`) or θ (`weights`)."""
    products: dict[str, Tensor] = stack.model.results.get(_NAME, {})
    if stack.name in products:
        return products[stack.name]
    return _total(_by_block(stack, on), len(stack.taus))


def _by_block(stack: Stack, on: On) -> Iterator[Tensor]:
    """Yield the upper half of each block's inner products [T, T], on the CPU."""
    count = len(stack.taus)
    for _, points in _blocks(stack, on):
        part = torch.zeros(count, count, dtype=torch.float64, device=stack.taus.device)
        room = torch.empty_like(points[0])
        # Sums of products and no product of matrices, whose order of summing depends on the library.
        for row in range(count):
            for column in range(row, count):
                part[row, column] = torch.mul(points[row], points[column], out=room).sum()
        yield part.cpu()  # what follows is arithmetic on a few numbers


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
    """Return Σ c_t v_t of a stack, less θ0 where v is θ: a direction [*base.shape]; c_t are [T] in float64."""
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

    def blocks(stack: Stack, args: Any) -> list[Rows]:
        # Python's numbers: small tensors would lie between the large ones that are freed, and leave holes of 3 GB.
        return [part.tolist() for part in _by_block(stack, on(args))]

    def finish(blocks: ByUnit[list[Rows]], model: Model, args: Any) -> Tensor:
        parts = (torch.tensor(rows, dtype=torch.float64) for _, unit in sorted(blocks.items()) for rows in unit)
        return _total(parts, len(model.experts))

    first_pass = gathering(_NAME, blocks, finish, only=in_blocks, within=True)
    return lambda args, dtype: (first_pass,) if _of_tensors(args) else ()


# A sum of unit vectors shorter than this vanishes: its square is known to about 1e-16.
_OPPOSITE = 1e-7
# Beyond this cosine the sine in the denominator loses more digits than the arc differs from the chord.
_PARALLEL = 0.9995


class OnWeightsArgs(Args):
    @property
    def needs_base(self) -> bool:
        return self.scale != 1


class SlerpArgs(OnWeightsArgs):
    t: float = Field(0.5, ge=0, le=1, description="place on the arc from the first expert (0) to the second (1)")


class KarcherArgs(OnWeightsArgs):
    iterations: int = Field(10, ge=1, description="most iterations, ≥ 1")
    tolerance: float = Field(1e-5, gt=0, description="length of the step (radians) at which to stop, > 0")


class ModelStockArgs(Args):
    vectors: Literal["tensor", "rows"] = Field(
        "tensor", description="what has an angle: the whole tensor, or each of its vectors along the last axis"
    )


def _stock_bytes(args: ModelStockArgs, name: str, model: Model) -> int:
    of_rows = args.vectors == "rows"  # in float64
    return tensors(lambda experts: 2 * experts + 6 if of_rows else 2, weighted=True)(args, name, model)


@method(
    "slerp",
    SlerpArgs,
    elementwise=in_blocks,
    passes=inner_product_pass(lambda args: "weights"),
    anchor="–",
    weights="none",
    experts=(2, 2),
    on_device=Copies(0, 9),
)
def slerp(stack: Stack, args: SlerpArgs) -> Parts:
    """Spherical interpolation of two experts, per tensor.

    ω = arccos(θ_1·θ_2 / (‖θ_1‖ ‖θ_2‖)),  θ = sin((1−t)ω)/sin ω · θ_1 + sin(tω)/sin ω · θ_2

    Linear where abs(cos ω) > .9995. Stored as θ0 + scale · (θ − θ0), so scale 1 is the interpolation itself.

    Property:
        The result of two tensors of equal norm has that norm.

    Source:
        Shoemake, Animating rotation with quaternion curves (SIGGRAPH 1985).
    """
    t = args.t if stack.model.listed[0] == stack.model.experts[0] else 1 - args.t
    products = inner_products(stack, "weights")
    norms = products.diagonal().sqrt().prod()
    cosine = (products[0, 1] / norms).clamp(-1, 1) if float(norms) else torch.ones((), dtype=torch.float64)
    shares = [float(share) for share in arc_shares(cosine, t, cosine.abs() > _PARALLEL)]
    # In place: fresh memory of a tensor's size costs as much as the arithmetic on it.
    first, second = stack.base + stack.taus[0], stack.base + stack.taus[1]
    return stack.base, first.mul_(shares[0]).add_(second.mul_(shares[1])).sub_(stack.base)


@method(
    "karcher",
    KarcherArgs,
    elementwise=in_blocks,
    passes=inner_product_pass(lambda args: "weights"),
    anchor="–",
    weights="shares",
    on_device=Copies(3, 4),
)
def karcher(stack: Stack, args: KarcherArgs) -> Parts:
    """Riemannian mean of the experts on the sphere, per tensor.

    u_t = θ_t/‖θ_t‖;  μ ← exp_μ(Σ w_t log_μ(u_t) / Σ w_t) until the step is short;  θ = μ · Σ w_t ‖θ_t‖ / Σ w_t

    Stored as θ0 + scale · (θ − θ0). Experts whose tensor is zero have no direction and count for the norm alone.

    Property:
        The mean of two experts is their spherical midpoint (`slerp` at t = .5, for equal norms).

    Source:
        Karcher, Riemannian center of mass (1977).
    """
    products = inner_products(stack, "weights")
    weights = torch.tensor(stack.model.weights, dtype=torch.float64)
    weights = weights / weights.sum()
    norms = products.diagonal().sqrt()
    some = norms > 0
    if not bool(some.any()):
        return stack.base, combined(stack, weights, "task_vectors")
    units = products[some][:, some] / (norms[some] * norms[some, None])
    coefficients = torch.zeros_like(weights)
    coefficients[some] = _karcher_mean(units, weights[some], args) / norms[some] * (weights * norms).sum()
    return stack.base, combined(stack, coefficients, "weights")


def _karcher_mean(cosines: Tensor, weights: Tensor, args: KarcherArgs) -> Tensor:
    """Return c_t with μ = Σ c_t u_t, of points u_t whose inner products [T, T] are given: μ never leaves their span."""

    def length(of: Tensor) -> Tensor:
        return (of @ cosines @ of).clamp(min=0).sqrt()

    if float(length(weights)) < _OPPOSITE:  # every great circle between them is as good, take the first expert
        return torch.eye(len(weights), dtype=weights.dtype, device=weights.device)[0]
    mean = weights / length(weights)
    for _ in range(args.iterations):
        along = (cosines @ mean).clamp(-1, 1)
        angles = torch.arccos(along)
        sines = torch.sin(angles)
        logs = weights * torch.where(sines > 1e-12, angles / sines.clamp(min=1e-12), 1.0)
        step = logs - (logs @ along) * mean
        size = length(step)
        if float(size) < args.tolerance:
            break
        mean = torch.cos(size) * mean + torch.sin(size) * step / size
        mean = mean / length(mean)
    return mean


@method(
    "model_stock",
    ModelStockArgs,
    elementwise=in_blocks,
    passes=inner_product_pass(lambda args: "task_vectors"),
    workspace=_stock_bytes,
    on_device=lambda args: Copies(5.25, 1.6) if args.vectors == "rows" else Copies(3, 4),
)
def model_stock(stack: Stack, args: ModelStockArgs) -> Parts:
    """Mean of the task vectors, shortened by how much they disagree, per tensor or per row.

    t = N cos θ / (1 + (N−1) cos θ),  θ = θ0 + scale · t · Σ w_t τ_t / N

    cos θ is the mean cosine over pairs of task vectors; a negative one (no common direction) counts as 0.

    Property:
        Equal experts give t = 1, orthogonal ones t = 0.

    Source:
        Jang et al., Model Stock (ECCV 2024), equation 5.
    """
    count, shape = len(stack.taus), stack.base.shape
    mean = stack.weighted.sum(0) / count
    if count < 2 or not mean.numel():
        return stack.base, mean
    if args.vectors == "rows":
        rows = stack.weighted.reshape(count, -1, shape[-1] if len(shape) > 1 else stack.base.numel()).double()
        products = torch.stack([(rows * row).sum(-1) for row in rows], 1)
        shares = _stock_share(products.movedim(-1, 0))[:, None].to(mean.dtype)
        return stack.base, (mean.reshape(rows.shape[1:]) * shares).reshape(shape)
    weights = torch.tensor(stack.model.weights, dtype=torch.float64)
    return stack.base, mean.mul_(
        float(_stock_share(inner_products(stack, "task_vectors") * weights * weights[:, None]))
    )


def _stock_share(products: Tensor) -> Tensor:
    """Return t, […], from inner products of task vectors, […, T, T]; 1 where all are zero."""
    count = products.shape[-1]
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt()
    units = products / (norms[..., None] * norms[..., None, :]).clamp(min=torch.finfo(torch.float64).tiny)
    cosine = (units.sum((-2, -1)) - (norms > 0).sum(-1)) / (count * (count - 1))
    share = count * cosine.clamp(min=0) / (1 + (count - 1) * cosine.clamp(min=0))
    return torch.where((norms > 0).any(-1), share, 1.0)


# sin² below which arc and chord differ by less than float64 can tell from the rounding of arccos.
_SHORT_ARC = 1e-12


class SphereArgs(Args):
    """Arguments of spherical methods that may work on the weights or on the task vectors."""

    on: Literal["task_vectors", "weights"] = Field(
        "task_vectors", description="what is interpolated; the result on `weights` does not depend on the base"
    )

    @property
    def needs_base(self) -> bool:
        return self.on == "task_vectors" or self.scale != 1


class NuslerpArgs(SphereArgs):
    vectors: Literal["tensor", "rows", "columns"] = Field(
        "tensor", description="what has an angle: the whole tensor, or each of its vectors along the last or first axis"
    )


class MultislerpArgs(SphereArgs):
    normalize: bool = Field(True, description="divide the weights by their sum; else it scales the length")


def _points(stack: Stack, args: SphereArgs) -> Tensor:
    return stack.taus if args.on == "task_vectors" else stack.base + stack.taus


def _direction(stack: Stack, args: SphereArgs, merged: Tensor) -> Tensor:
    merged = merged.to(stack.base.dtype).reshape(stack.base.shape)
    return merged if args.on == "task_vectors" else merged - stack.base


def _as_vectors(tensor: Tensor, kind: str) -> Tensor:
    """Return a tensor as float64 vectors [m, n]."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        return tensor.reshape(1, -1).double()
    rows = tensor if kind == "rows" else tensor.transpose(0, -1)
    return rows.reshape(-1, rows.shape[-1]).double()


def _as_tensor(vectors: Tensor, shape: torch.Size, kind: str) -> Tensor:
    if len(shape) < 2 or vectors.numel() == 0 or kind != "columns":
        return vectors.reshape(shape)
    turned = (shape[-1], *shape[1:-1], shape[0])
    return vectors.reshape(turned).transpose(0, -1)


def _nuslerp_bytes(args: NuslerpArgs, name: str, model: Model) -> int:
    return tensors(lambda _: 2 if args.vectors == "tensor" else 16)(args, name, model)


@method(
    "nuslerp",
    NuslerpArgs,
    elementwise=in_blocks,
    passes=inner_product_pass(lambda args: args.on),
    experts=(2, 2),
    workspace=_nuslerp_bytes,
    on_device=lambda args: Copies(0, 10 if args.vectors == "tensor" else 13.1),
)
def nuslerp(stack: Stack, args: NuslerpArgs) -> Parts:
    """Spherical interpolation of two task vectors (or experts), placed by their weights.

    t = w_2/(w_1 + w_2),  v = τ or θ,  ω = angle between v_1 and v_2
    v = sin((1−t)ω)/sin ω · v_1 + sin(tω)/sin ω · v_2,  θ = θ0 + scale · v, or θ0 + scale · (v − θ0) on weights

    Linear where v_1 and v_2 are parallel or one of them is zero; t = .5 where the weights sum to 0.

    Property:
        Exchanging the experts with their weights changes nothing; for equal norms the result has that norm.

    Source:
        NuSLERP as documented in mergekit; Shoemake, Animating rotation with quaternion curves (SIGGRAPH 1985).
    """
    a, b = stack.model.weights
    t = b / (a + b) if a + b else 0.5
    if args.vectors == "tensor":
        products = inner_products(stack, args.on)
        norms = products.diagonal().sqrt().prod()
        return stack.base, combined(stack, torch.stack(_shares(norms, products[0, 1], t)), args.on)
    first, second = (_as_vectors(point, args.vectors) for point in _points(stack, args))
    norms = first.norm(dim=1, keepdim=True) * second.norm(dim=1, keepdim=True)
    shares = _shares(norms, (first * second).sum(1, keepdim=True), t)
    merged = shares[0] * first + shares[1] * second
    return stack.base, _direction(stack, args, _as_tensor(merged, stack.base.shape, args.vectors))


def _shares(norms: Tensor, product: Tensor, t: float) -> list[Tensor]:
    """Return the factors of two vectors at t, from the product of their norms and their inner product, […]."""
    cosine = (product / torch.where(norms > 0, norms, 1)).clamp(-1, 1)
    linear = (norms == 0) | (1 - cosine.square() <= _SHORT_ARC)
    return arc_shares(cosine, t, linear)


@method(
    "multislerp",
    MultislerpArgs,
    elementwise=in_blocks,
    passes=inner_product_pass(lambda args: args.on),
    on_device=Copies(3, 4),
)
def multislerp(stack: Stack, args: MultislerpArgs) -> Parts:
    """Mean direction of the task vectors (or experts) on the sphere, with their mean length, per tensor.

    u_t = v_t/‖v_t‖,  v = τ or θ,  v̄ = Σ w_t u_t / ‖Σ w_t u_t‖ · Σ w_t ‖v_t‖  (Σ w_t = 1)
    θ = θ0 + scale · v̄, or θ0 + scale · (v̄ − θ0) on weights

    The published procedure projects to the tangent space at the mean of the u_t and back; that mean's own tangent part
    is zero, so the formula above is what it computes. Where Σ w_t u_t vanishes, the weighted mean of the v_t is taken.

    Property:
        The length is the weighted mean of the lengths, where an average of vectors shortens.

    Source:
        Goddard, Multi-SLERP (2025), as documented in mergekit.
    """
    products = inner_products(stack, args.on)
    weights = torch.tensor(stack.model.weights, dtype=torch.float64)
    weights = weights / weights.sum() if args.normalize else weights
    norms = products.diagonal().sqrt()
    shares = weights / torch.where(norms > 0, norms, 1)
    length = (shares @ products @ shares).clamp(min=0).sqrt()
    if float(length) >= _OPPOSITE:
        weights = shares / length * (weights @ norms)
    return stack.base, combined(stack, weights, args.on)
