"""Geometric methods: weights as points on a sphere, task vectors as edges of a simplex."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from mergeflow.checkpoints.fingerprint import blocks
from mergeflow.late import torch
from mergeflow.merging.method import Args, Parts, Stack, method

if TYPE_CHECKING:
    from torch import Tensor

# Beyond this cosine the sine in the denominator loses more digits than the arc differs from the chord.
_PARALLEL = 0.9995


class SlerpArgs(Args):
    """Arguments of `slerp`."""

    t: float = Field(0.5, ge=0, le=1, description="place on the arc from the first expert (0) to the second (1)")

    @property
    def needs_base(self) -> bool:
        """Whether the result depends on the base: only where it is scaled."""
        return self.scale != 1


class KarcherArgs(Args):
    """Arguments of `karcher`."""

    iterations: int = Field(10, ge=1, description="most iterations, ≥ 1")
    tolerance: float = Field(1e-5, gt=0, description="length of the step (radians) at which to stop, > 0")

    @property
    def needs_base(self) -> bool:
        """Whether the result depends on the base: only where it is scaled."""
        return self.scale != 1


class ModelStockArgs(Args):
    """Arguments of `model_stock`."""


def _inner(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a · a, b · b and a · b summed in float64, on the processor in pieces that fit its cache."""
    pairs = zip(blocks(a), blocks(b), strict=True) if a.device.type == "cpu" else [(a, b)]
    found = torch.zeros(3, dtype=torch.float64, device=a.device)
    for x, y in ((x.double(), y.double()) for x, y in pairs):
        found += torch.stack([(x * x).sum(), (y * y).sum(), (x * y).sum()])
    return found[0], found[1], found[2]


@method("slerp", SlerpArgs, anchor="–", weights="none", experts=(2, 2))
def slerp(stack: Stack, args: SlerpArgs) -> Parts:
    """Spherical interpolation of two experts, per tensor.

    ω = arccos(θ_1·θ_2 / (‖θ_1‖ ‖θ_2‖)),  θ = sin((1−t)ω)/sin ω · θ_1 + sin(tω)/sin ω · θ_2

    Linear where abs(cos ω) > .9995. Stored as θ0 + scale · (θ − θ0), so scale 1 is the interpolation itself.

    Property:
        The result of two tensors of equal norm has that norm.

    Source:
        Shoemake, Animating rotation with quaternion curves (SIGGRAPH 1985).
    """
    first, second = stack.base + stack.taus[0], stack.base + stack.taus[1]
    t = args.t if stack.model.listed[0] == stack.model.experts[0] else 1 - args.t
    one, other, both = _inner(first, second)
    norms = one.sqrt() * other.sqrt()
    cosine = (both / norms).clamp(-1, 1) if float(norms) else torch.ones((), dtype=torch.float64)
    shares = (1 - t, t)
    if abs(float(cosine)) <= _PARALLEL:
        angle = torch.arccos(cosine)
        shares = (float(torch.sin((1 - t) * angle) / torch.sin(angle)), float(torch.sin(t * angle) / torch.sin(angle)))
    # In place: fresh memory of a tensor's size costs as much as the arithmetic on it.
    return stack.base, first.mul_(shares[0]).add_(second.mul_(shares[1])).sub_(stack.base)


@method("karcher", KarcherArgs, anchor="–", weights="shares")
def karcher(stack: Stack, args: KarcherArgs) -> Parts:
    """Riemannian mean of the experts on the sphere, per tensor.

    u_t = θ_t/‖θ_t‖;  μ ← exp_μ(Σ w_t log_μ(u_t) / Σ w_t) until the step is short;  θ = μ · Σ w_t ‖θ_t‖ / Σ w_t

    Stored as θ0 + scale · (θ − θ0). Experts whose tensor is zero have no direction and count for the norm alone.

    Property:
        The mean of two experts is their spherical midpoint (`slerp` at t = .5, for equal norms).

    Source:
        Karcher, Riemannian center of mass (1977).
    """
    thetas = stack.base + stack.taus
    flat = thetas.reshape(len(thetas), stack.base.numel()).double()
    weights = torch.tensor(stack.model.weights, dtype=torch.float64, device=flat.device)
    weights = weights / weights.sum()
    norms = flat.norm(dim=1)
    some = norms > 0
    if not bool(some.any()):
        return stack.base, (stack.taus * weights.to(thetas.dtype).reshape(stack.weight_column.shape)).sum(0)
    mean = _karcher_mean(flat[some] / norms[some, None], weights[some], args)
    merged = (mean * (weights * norms).sum()).to(thetas.dtype).reshape(stack.base.shape)
    return stack.base, merged - stack.base


def _karcher_mean(units: Tensor, weights: Tensor, args: KarcherArgs) -> Tensor:
    mean = weights @ units
    length = mean.norm()
    if float(length) < 1e-12:  # opposite points: every great circle between them is as good, take the first expert
        return units[0]
    mean = mean / length
    for _ in range(args.iterations):
        cosines = (units @ mean).clamp(-1, 1)
        angles = torch.arccos(cosines)
        sines = torch.sin(angles)
        factors = torch.where(sines > 1e-12, angles / sines.clamp(min=1e-12), 1.0)
        step = (weights * factors) @ (units - cosines[:, None] * mean)
        size = step.norm()
        if float(size) < args.tolerance:
            break
        mean = torch.cos(size) * mean + torch.sin(size) * step / size
        mean = mean / mean.norm()
    return mean


@method("model_stock", ModelStockArgs)
def model_stock(stack: Stack, args: ModelStockArgs) -> Parts:
    """Mean of the task vectors, shortened by how much they disagree, per tensor.

    t = N cos θ / (1 + (N−1) cos θ),  θ = θ0 + scale · t · Σ w_t τ_t / N

    cos θ is the mean cosine over pairs of task vectors; a negative one (no common direction) counts as 0.

    Property:
        Equal experts give t = 1, orthogonal ones t = 0.

    Source:
        Jang et al., Model Stock (ECCV 2024), equation 5.
    """
    count = len(stack.taus)
    mean = stack.weighted.sum(0) / count
    flat = stack.weighted.reshape(count, stack.base.numel()).double()
    norms = flat.norm(dim=1)
    if count < 2 or not bool((norms > 0).any()):
        return stack.base, mean
    units = flat / norms.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    cosine = max(0.0, float((units.sum(0).square().sum() - (norms > 0).sum()) / (count * (count - 1))))
    return stack.base, mean * (count * cosine / (1 + (count - 1) * cosine))
