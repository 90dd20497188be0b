"""Sparse methods: which entries of the task vectors, or rows of their matrices, are summed."""

from __future__ import annotations

from math import floor, prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import DType
from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.matrices import Matrices, SplitQkv
from mergeflow.merging.method import (
    NORMALIZE,
    Args,
    Copies,
    Model,
    Parts,
    Pass,
    Stack,
    all_but_matrices,
    matrices,
    method,
    tensors,
)
from mergeflow.merging.thresholds import kth_largest_passes, kth_smallest, kth_smallest_passes

if TYPE_CHECKING:
    from torch import Tensor

# Share of the smallest and largest magnitudes that PCB clips, as in its authors' implementation.
_PCB_CLIP = 1e-4


class CutArgs(Args):
    beta: float = Field(0.85, ge=0, le=1, description="share of smallest magnitudes dropped per tensor, 0 … 1")
    gamma: float = Field(0.01, ge=0, le=1, description="share of largest magnitudes dropped per tensor, 0 … 1")
    per_expert: ClassVar[tuple[str, ...]] = ("beta", "gamma")

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        check_cuts(self.beta, self.gamma)
        return self


class BreadcrumbsArgs(CutArgs):
    normalize: bool = Field(False, description=NORMALIZE)


class ConsensusArgs(Args):
    scale: float = Field(0.3, description="factor of the direction; any real number")
    threshold: float = Field(0.4, ge=0, description="λ of the TALL masks, ≥ 0")
    min_agree: int = Field(2, ge=0, description="masks that must hold an entry, 0 … number of experts")

    def check_experts(self, count: int) -> None:
        if self.min_agree > count:
            raise MergeflowError(
                f"method 'consensus': min_agree is {self.min_agree}, but there {'are' if count > 1 else 'is'} {count} "
                f"expert{'s' * (count > 1)}: no entry would move from the base. Choose {count} at most."
            )


class PcbArgs(Args):
    scale: float = Field(1.2, description="factor of the direction; any real number")
    keep: float = Field(0.1, gt=0, le=1, description="share of entries kept by competition score, (0, 1]")


# Elements of a tensor from which on it is read three times, in pieces: to hold it with all experts would take more than
# all else that a merge holds.
LARGE = 2**22


def _in_blocks(args: CutArgs, name: str, model: Model) -> bool:
    return prod(model.shapes[name]) > LARGE


def _places(args: CutArgs, n: int, count: int) -> list[tuple[int, int]]:
    """Return the places in rising order, 1 … n, of the least and the greatest magnitude that each expert keeps."""
    cuts = list(zip(args.each("beta", count), args.each("gamma", count), strict=True))
    for beta, gamma in cuts:
        check_cuts(beta, gamma)
    return [(floor(beta * n + 1e-9) + 1, n - floor(gamma * n + 1e-9)) for beta, gamma in cuts]


def _ranks(args: CutArgs, n: int, count: int) -> list[list[int]]:
    return [[min(first, n), max(last, 1)] for first, last in _places(args, n, count)]


@method(
    "breadcrumbs",
    BreadcrumbsArgs,
    elementwise=_in_blocks,
    passes=kth_smallest_passes(_ranks, "kept", _in_blocks),
    workspace=tensors(lambda experts: 3),
    on_device=Copies(1, 3),
)
def breadcrumbs(stack: Stack, args: BreadcrumbsArgs) -> Parts:
    """Sum of the task vectors without their smallest and largest entries.

    m_t = 0 for the ⌊β·n⌋ smallest and the ⌊γ·n⌋ largest magnitudes of each tensor, else 1
    θ = θ0 + scale · Σ w_t m_t ⊙ τ_t, over Σ w_t with `normalize`

    Magnitudes equal to one that is kept are kept; a tensor too small for a cut keeps what that cut would take.

    Property:
        With β = γ = 0 it is task arithmetic; outliers have no influence.

    Source:
        Davari and Belilovsky, Model breadcrumbs (ECCV 2024), section 3.
    """
    return stack.base, stack.total(breadcrumbs_sparsify(stack, args), args.normalize)


def check_cuts(beta: float, gamma: float) -> None:
    if beta + gamma > 1 + 1e-9:
        raise ValueError(f"beta + gamma is {beta + gamma:g}, and more than 1 leaves the base: lower one of them")


def breadcrumbs_sparsify(stack: Stack, args: CutArgs) -> Tensor:
    """Return w_t m_t ⊙ τ_t, [T, *base.shape], without the smallest and the largest magnitudes of each task vector."""
    count, n = len(stack.taus), prod(stack.shape)
    thresholds = stack.model.results.get("kept", {}).get(stack.name)
    taus = stack.take(weighted=False)
    room = torch.empty_like(taus[0]).reshape(-1)  # fresh memory for each expert would cost as much as the arithmetic
    for index, (first, last) in enumerate(_places(args, n, count)):
        tau = taus[index].reshape(-1)
        if first > last:
            tau.zero_()
        elif first > 1 or last < n:
            magnitudes = torch.abs(tau, out=room)
            bounds = [
                (thresholds[index][place] if thresholds else kth_smallest(magnitudes, k)) if cut else None
                for place, (k, cut) in enumerate([(first, first > 1), (last, last < n)])
            ]
            _keep_between(tau, magnitudes, *bounds)
        if stack.model.has_weights:
            tau.mul_(stack.weight_column[index].reshape(()))
    return taus


def _keep_between(
    tau: Tensor, magnitudes: Tensor, least: Tensor | float | None, greatest: Tensor | float | None
) -> None:
    """Zero a task vector where its magnitudes [n] are below the least or above the greatest that are kept."""
    mask = torch.empty_like(tau[:BLOCK])  # 1 and 0: to multiply by numbers takes a fifth of the time of truth values
    for part, size in zip(tau.split(BLOCK), magnitudes.split(BLOCK), strict=True):
        if least is not None:
            part.mul_(torch.ge(size, least, out=mask[: len(part)]))
        if greatest is not None:
            part.mul_(torch.le(size, greatest, out=mask[: len(part)]))


@method("magmax", Args, elementwise=True, weights="none", on_device=Copies(2, 3))
def magmax(stack: Stack, args: Args) -> Parts:
    """Entry of largest magnitude among the task vectors.

    θ = θ0 + scale · τ_{t*},  t* = argmax_t abs(τ_t) per entry (the first name where magnitudes are equal)

    Property:
        Where only one expert moved, its task vector survives whole.

    Source:
        Marczak et al., MagMax (ECCV 2024), equation 2.
    """
    chosen = stack.taus.abs().argmax(0, keepdim=True)
    return stack.base, stack.taus.gather(0, chosen)[0]


def tall_masks(taus: Tensor, total: Tensor, threshold: float) -> Tensor:
    """Return abs(τ_t) > threshold · abs(Στ − τ_t), [T, …] of bools, of τ_t [T, …] and their total Στ."""
    return taus.abs() > threshold * (total - taus).abs()


@method("consensus", ConsensusArgs, elementwise=True, on_device=Copies(4, 2))
def consensus(stack: Stack, args: ConsensusArgs) -> Parts:
    """Sum of the task vectors where enough TALL masks agree.

    m_t = abs(τ_t) > threshold · abs(Στ − τ_t)
    θ = θ0 + scale · [Σ_t m_t ≥ min_agree] ⊙ Σ w_t τ_t

    Property:
        Entries that matter to fewer than min_agree experts ("selfish" and "catastrophic" weights) stay at the base.

    Source:
        Wang et al., Localizing task information (ICML 2024), equations 3 and 7.
    """
    taus = stack.weighted
    total = taus.sum(0)
    agreeing = tall_masks(taus, total, args.threshold).sum(0) >= args.min_agree
    return stack.base, torch.where(agreeing, total, 0)


def _competition(stack: Stack, args: PcbArgs) -> Tensor:
    """Scores β_t = exp(T · norm(abs τ_t)²) ⊙ tanh(τ_t ⊙ Στ), [T, …]."""
    low, high = (_column(stack, f"pcb.{edge}") for edge in ("low", "high"))
    spread = torch.where(high > low, high - low, 1)
    intra = ((_clipped(stack).abs() - low) / spread).square()
    return torch.exp(len(stack.taus) * intra) * torch.tanh(stack.weighted * stack.weighted.sum(0))


def _clipped(stack: Stack) -> Tensor:
    low, high = (_column(stack, f"pcb.{edge}") for edge in ("low", "high"))
    return stack.weighted.sign() * stack.weighted.abs().clamp(low, high)


def _column(stack: Stack, name: str) -> Tensor:
    values: Tensor = stack.model.results[name]
    return values.to(stack.taus.device, stack.taus.dtype).reshape(-1, *[1] * (stack.taus.ndim - 1))


def _pcb_passes(args: Any, dtype: DType) -> tuple[Pass, ...]:
    def weighted(stack: Stack, args: Any) -> Tensor:
        return stack.weighted

    def clip(n: int) -> int:
        return floor(_PCB_CLIP * n)

    return (
        *kth_largest_passes(weighted, lambda args, n: clip(n) + 1, dtype, "pcb.high", magnitudes=True),
        *kth_largest_passes(weighted, lambda args, n: n - clip(n), dtype, "pcb.low", magnitudes=True),
        *kth_largest_passes(_competition, lambda args, n: max(1, floor(args.keep * n + 1e-9)), dtype, "pcb.cut"),
        *kth_largest_passes(_competition, lambda args, n: 1, dtype, "pcb.top"),
    )


@method("pcb", PcbArgs, elementwise=True, passes=_pcb_passes, on_device=Copies(5, 1))
def pcb(stack: Stack, args: PcbArgs) -> Parts:
    """Sum of the task vectors balanced by competition within and between them.

    β_t = exp(T · norm(abs τ_t)²) ⊙ tanh(τ_t ⊙ Στ)
    s_t = β_t rescaled to 0 at its ⌊keep·n⌋-th largest entry and 1 at its largest, 0 below
    θ = θ0 + scale · Σ s_t ⊙ τ_t / Σ s_t

    norm maps the magnitudes of an expert's whole vector, clipped at their 1e-4 and 1 − 1e-4 quantiles, to 0 … 1.

    Property:
        Entries without any score among the best stay at the base; where one expert alone scores, its entry survives.

    Source:
        Du et al., Parameter competition balancing for model merging (NeurIPS 2024), section 3, with the activations of
        the authors' implementation.
    """
    cut, top = _column(stack, "pcb.cut"), _column(stack, "pcb.top")
    spread = torch.where(top > cut, top - cut, 1)
    scores = ((_competition(stack, args) - cut).clamp_(min=0)) / spread
    return stack.base, (_clipped(stack) * scores).sum(0) / scores.sum(0).clamp_(min=1e-12)


class RowPruneArgs(Args):
    keep: float = Field(0.5, ge=0, le=1, description="share of the rows of each matrix that are kept, 0 … 1")
    rows: Literal["largest", "smallest"] = Field("largest", description="which rows are kept, by their 2-norm")
    matrices: Matrices = "mlp"
    split_qkv: SplitQkv = False


@method(
    "row_prune",
    RowPruneArgs,
    elementwise=all_but_matrices,
    workspace=matrices(lambda args, shape: shape.nbytes),  # the sum
    on_device=Copies(1, 2.1),
)
def row_prune(stack: Stack, args: RowPruneArgs) -> Parts:
    """Sum of the task vectors without the smallest rows of their matrices.

    m_t = 1 for the ⌊keep·m⌋ rows of a matrix [m, n] of τ_t with the largest 2-norm, else 0; of equal rows the first
    θ = θ0 + scale · Σ w_t m_t ⊙ τ_t;  other tensors: θ0 + scale · Σ w_t τ_t

    A row of a matrix [out, in] is what one neuron reads. `rows: smallest` is the control, which should do harm.

    Property:
        At keep 1 it is task arithmetic; whole neurons of each expert are either taken or left at the base.

    Source:
        Li et al., When is task vector provably effective for model editing? (ICLR 2025), corollary 2.
    """
    if not stack.is_matrix(args.matrices):
        return stack.base, stack.weighted.sum(0)
    return stack.base, stack.merged(_sum_of_kept_rows, args)


def _sum_of_kept_rows(taus: Tensor, args: RowPruneArgs) -> Tensor:
    """Return the sum [m, n] of matrices [T, m, n], whose other rows become 0."""
    order = taus.norm(dim=2).argsort(dim=1, descending=args.rows == "largest", stable=True)
    count = floor(args.keep * order.shape[1] + 1e-9)
    for matrix, rows in zip(taus, order, strict=True):
        matrix[rows[count:]] = 0
    return taus.sum(0)
