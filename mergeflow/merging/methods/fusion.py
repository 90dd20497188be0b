"""Methods that select entries of each expert: NearSwap, Arcee Fusion, SCE and RAM."""

from __future__ import annotations

from math import floor, prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.method import Args, Copies, Model, Parts, Pass, Stack, method, tensors
from mergeflow.merging.thresholds import kth_smallest

if TYPE_CHECKING:
    from torch import Tensor

# Elements whose softmax is held in float64 at a time.
_CHUNK = 2**20
_EPS = 1e-8


class NearswapArgs(Args):
    t: float = Field(1e-4, ge=0, description="largest change of an entry, ≥ 0")


class SceArgs(Args):
    keep: float = Field(1.0, ge=0, le=1, description="share kept of the entries in which experts differ, 0 … 1")


class RamArgs(Args):
    epsilon: float = Field(1e-5, ge=0, description="magnitude above which an entry of a task vector has changed, ≥ 0")


class RamPlusArgs(RamArgs):
    r: float = Field(0.1, ge=0, description="strength of the boost of unique entries, ≥ 0")
    alpha: float = Field(0.2, ge=0, description="largest ratio of shared to unique entries that counts, ≥ 0")
    over: Literal["model", "tensor"] = Field("model", description="where shared and unique entries are counted")


@method("nearswap", NearswapArgs, elementwise=True, weights="none", experts=(1, 1), on_device=Copies(0, 3))
def nearswap(stack: Stack, args: NearswapArgs) -> Parts:
    """The base, moved to the expert where they are near, by t at most.

    θ = θ0 + scale · min(1, t/abs(τ)) ⊙ τ

    Property:
        No entry moves by more than t; entries within t of each other are the expert's.

    Source:
        alchemonaut, QuartetAnemoi-70B (2024), as documented in mergekit.
    """
    return stack.base, stack.taus[0].clamp(-args.t, args.t)


def _arcee_bytes(args: Args, name: str, model: Model) -> int:
    numel = prod(model.shapes[name])
    return 5 * numel * model.dtype.itemsize + 8 * 8 * min(numel, _CHUNK)


@method("arcee_fusion", Args, weights="none", experts=(1, 1), workspace=_arcee_bytes, on_device=Copies(0, 13))
def arcee_fusion(stack: Stack, args: Args) -> Parts:
    """The base, with those entries of an expert that are important by size and by the change of the row's softmax.

    s = abs(τ) · KL(softmax θ_1 ‖ softmax θ0) along the last axis,  θ = θ0 + scale · [s ≥ median + 1.5 (Q3 − Q1)] ⊙ τ

    Quartiles are those of the whole tensor, at index ⌊q(n−1)⌋ of the sorted scores.

    Property:
        Equal scores give the expert itself; entries of average importance stay at the base.

    Source:
        Arcee Fusion (2025), as documented in mergekit; the quartiles are exact instead of sampled.
    """
    tau = stack.taus[0]
    if tau.numel() == 0:
        return stack.base, tau
    scores = tau.abs() * _softmax_divergence(stack.base, tau)
    n = scores.numel()
    flat = scores.reshape(-1)
    first, median, third = (kth_smallest(flat, floor(q * (n - 1)) + 1) for q in (0.25, 0.5, 0.75))
    return stack.base, torch.where(scores >= median + 1.5 * (third - first), tau, 0)


def _softmax_divergence(base: Tensor, tau: Tensor) -> Tensor:
    """Return KL(softmax(base + tau) ‖ softmax(base)) of each row along the last axis, [..., 1]; float64 within."""
    width = base.shape[-1] if base.ndim else 1
    rows, moved = base.reshape(-1, width), tau.reshape(-1, width)
    divergence = torch.empty(len(rows), dtype=base.dtype, device=base.device)
    step = max(1, _CHUNK // max(width, 1))
    for start in range(0, len(rows), step):
        before = rows[start : start + step].double()
        p = torch.softmax(before + moved[start : start + step].double(), -1) + _EPS
        q = torch.softmax(before, -1) + _EPS
        divergence[start : start + step] = (p * torch.log(p / q)).sum(-1)
    return divergence.reshape(*base.shape[:-1], 1) if base.ndim else divergence.reshape(())


@method("sce", SceArgs, weights="none", workspace=tensors(lambda experts: 5 * experts + 3), on_device=Copies(5, 1))
def sce(stack: Stack, args: SceArgs) -> Parts:
    """Select entries by their variance, weight experts by their energy, erase minority signs; per tensor.

    m = the ⌊keep · #{var > 0}⌋ entries of largest variance over the experts,  τ̂_t = m ⊙ τ_t
    w_t = mean τ̂_t² / Σ_s mean τ̂_s²,  γ = sign Σ τ̂_t (+ where it is 0)
    θ = θ0 + scale · Σ w_t [sign τ̂_t = γ] τ̂_t / Σ w_t [sign τ̂_t = γ]

    Variances equal to the last one that is kept are kept.

    Property:
        An expert that moved further has more to say, and none that disagrees with the sum's sign.

    Source:
        Wan et al., FuseChat (2024), section 3.3.
    """
    taus = stack.taus
    if taus[0].numel() == 0:
        return stack.base, taus.sum(0)
    if args.keep < 1:
        variance = taus.var(0, unbiased=False)
        k = floor(args.keep * int(variance.count_nonzero()) + 1e-9)
        if k == 0:
            return stack.base, torch.zeros_like(stack.base)
        least = kth_smallest(variance.reshape(-1), variance.numel() - k + 1)
        taus = taus * (variance >= least)
    energy = taus.reshape(len(taus), -1).double().square().mean(1)
    weights = energy / energy.sum() if float(energy.sum()) else torch.full_like(energy, 1 / len(energy))
    positive = taus.sum(0) >= 0
    agreeing = torch.where(positive, taus > 0, taus < 0) * weights.to(taus.dtype).reshape(stack.weight_column.shape)
    total = agreeing.sum(0)
    return stack.base, (taus * agreeing).sum(0) / torch.where(total > 0, total, 1)


def _changed(stack: Stack, args: RamArgs) -> tuple[Tensor, Tensor]:
    """Return which entries each expert changed, [T, …], and how many experts changed each."""
    changed = stack.taus.abs() > args.epsilon
    return changed, changed.sum(0)


@method("ram", RamArgs, elementwise=True, weights="none", on_device=Copies(2.2, 5.25))
def ram(stack: Stack, args: RamArgs) -> Parts:
    """Mean of the task vectors over the experts that changed an entry; a unique change is kept whole.

    m_t = abs(τ_t) > epsilon,  θ = θ0 + scale · Σ m_t ⊙ τ_t / max(1, Σ m_t)

    Property:
        Where one expert alone moved, its task vector survives whole; where all did, it is the average.

    Source:
        Reinforced Agent Merging (2026), arXiv 2601.13572, as documented in mergekit.
    """
    changed, count = _changed(stack, args)
    return stack.base, torch.where(changed, stack.taus, 0).sum(0) / count.clamp(min=1)


def _counts(stack: Stack, args: RamPlusArgs) -> Tensor:
    """Return of each expert how many of its changed entries are shared and how many unique, [T, 2]."""
    changed, count = _changed(stack, args)
    flat, shared = changed.reshape(len(changed), -1), (count > 1).reshape(-1)
    return torch.stack([(flat & shared).sum(1), (flat & ~shared).sum(1)], dim=1).cpu()


def _over_model(args: Any) -> bool:
    return bool(args.over == "model")


def _ram_passes(args: Any, dtype: DType) -> tuple[Pass, ...]:
    if not _over_model(args):
        return ()
    return (
        Pass(
            "ram.counts",
            lambda model, args: torch.zeros(len(model.experts), 2, dtype=torch.int64),
            lambda total, stack, args: total + _counts(stack, args),
            lambda a, b: a + b,
            lambda total, model, args: total,
        ),
    )


@method(
    "ram_plus",
    RamPlusArgs,
    elementwise=lambda args, _name, _model: _over_model(args),
    weights="none",
    passes=_ram_passes,
    workspace=tensors(lambda experts: 3 * experts + 3),
    on_device=Copies(3.25, 5.5),
)
def ram_plus(stack: Stack, args: RamPlusArgs) -> Parts:
    """RAM with the unique changes of an expert boosted, the more of its changes are shared with others.

    λ_t = 1 + r · min(alpha, shared_t/unique_t);  unique entries: λ_t τ_t;  shared ones: their mean

    Property:
        With r = 0, or where nothing is shared, it is RAM.

    Source:
        Reinforced Agent Merging (2026), arXiv 2601.13572, as documented in mergekit.
    """
    counts = stack.model.results["ram.counts"] if _over_model(args) else _counts(stack, args)
    ratio = counts[:, 0].double() / counts[:, 1].double().clamp(min=args.epsilon or _EPS)
    boost = (1 + args.r * ratio.clamp(0, args.alpha)).to(stack.taus.device, stack.taus.dtype)
    changed, count = _changed(stack, args)
    taus = torch.where(changed, stack.taus, 0)
    mean = taus.sum(0) / count.clamp(min=1)
    return stack.base, torch.where(count == 1, (taus * boost.reshape(stack.weight_column.shape)).sum(0), mean)
