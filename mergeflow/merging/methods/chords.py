"""Spherical methods by weights: NuSLERP between two experts, Multi-SLERP of any number; on weights or task vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.method import Args, Copies, Model, Parts, Stack, method, tensors
from mergeflow.merging.methods.inner_products import arc_shares, combined, in_blocks, inner_product_pass, inner_products
from mergeflow.merging.stack import Pass

if TYPE_CHECKING:
    from torch import Tensor

# A sum of unit vectors shorter than this vanishes: its square is known to about 1e-16.
_OPPOSITE = 1e-7
# sin² below which arc and chord differ by less than float64 can tell from the rounding of arccos.
_PARALLEL = 1e-12


class SphereArgs(Args):
    """Arguments of spherical methods that may work on the weights or on the task vectors."""

    on: Literal["task_vectors", "weights"] = Field(
        "task_vectors", description="what is interpolated; the result on `weights` does not depend on the base"
    )

    @property
    def needs_base(self) -> bool:
        """Whether the result depends on the base: not on weights, unless scaled."""
        return self.on == "task_vectors" or self.scale != 1


class NuslerpArgs(SphereArgs):
    """Arguments of `nuslerp`."""

    vectors: Literal["tensor", "rows", "columns"] = Field(
        "tensor", description="what has an angle: the whole tensor, or each of its vectors along the last or first axis"
    )


class MultislerpArgs(SphereArgs):
    """Arguments of `multislerp`."""

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


def _whole_in_blocks(args: NuslerpArgs, name: str, model: Model) -> bool:
    return args.vectors == "tensor" and in_blocks(args, name, model)


def _whole_pass(args: NuslerpArgs, dtype: DType) -> tuple[Pass, ...]:
    return inner_product_pass(lambda args: args.on)(args, dtype) if args.vectors == "tensor" else ()


def _nuslerp_bytes(args: NuslerpArgs, name: str, model: Model) -> int:
    return tensors(lambda _: 2 if args.vectors == "tensor" else 16)(args, name, model)


@method(
    "nuslerp",
    NuslerpArgs,
    elementwise=_whole_in_blocks,
    passes=_whole_pass,
    experts=(2, 2),
    workspace=_nuslerp_bytes,
    on_device=Copies(0, 14),
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
    linear = (norms == 0) | (1 - cosine.square() <= _PARALLEL)
    return arc_shares(cosine, t, linear)


@method(
    "multislerp",
    MultislerpArgs,
    elementwise=in_blocks,
    passes=inner_product_pass(lambda args: args.on),
    on_device=Copies(5, 4),
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
