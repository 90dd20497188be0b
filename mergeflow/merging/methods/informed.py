"""Methods that use statistics of data, given to them: diagonal Fishers, Gram matrices of inputs, learned coefficients.

Here they are pure functions of those statistics; who has data computes them and passes `data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import Architecture, Form
from mergeflow.merging.linalg.spectra import truncate
from mergeflow.merging.matrices import Matrices, Selection, SplitQkv, rank_of
from mergeflow.merging.method import (
    Args,
    Copies,
    Datum,
    Matrix,
    Model,
    Parts,
    Stack,
    all_but_matrices,
    decomposition,
    matrices,
    method,
)

if TYPE_CHECKING:
    from torch import Tensor

FISHER = Datum("fisher", lambda shape: shape, everywhere=True)
GRAM = Datum("gram", lambda shape: (shape[-1], shape[-1]) if len(shape) == 2 else ())
COEFFICIENTS = Datum("coefficients", lambda shape: (), needed=False)


class FisherArgs(Args):
    eps: float = Field(1e-6, gt=0, description="added to every Fisher entry, > 0")


class RegmeanArgs(Args):
    off_diagonal: float = Field(0.95, ge=0, le=1, description="factor of the Grams' off-diagonal entries, 0 … 1")


class AdamergingArgs(Args):
    granularity: Literal["task", "layer"] = Field("task", description="one λ per expert, or per expert and tensor")
    on: Literal["task_vectors", "cart"] = Field("task_vectors", description="directions that the λ multiply")
    init: float = Field(0.3, description="first value of every λ")
    lr: float = Field(1e-3, gt=0, description="Adam's learning rate, > 0")
    steps: int = Field(500, ge=0, description="optimisation steps, ≥ 0")
    clamp: bool = Field(False, description="keep every λ within 0 … 1")
    rank_ratio: float = Field(0.08, gt=0, le=1, description="rank of the directions `cart`, (0, 1]")
    matrices: Matrices = "attn_mlp"
    split_qkv: SplitQkv = False

    @property
    def selection(self) -> Selection | None:
        """Which matrices are treated apart; those of `cart` only."""
        return self.matrices if self.on == "cart" else None

    def form(self, family: Architecture, name: str, shape: Sequence[int]) -> Form | None:
        """Return how a tensor is made of matrices whose directions have a low rank; None where it is the mean alone."""
        return family.form(name, shape, self.split_qkv) if family.treats(name, shape, self.matrices) else None

    def rank(self, shape: Sequence[int]) -> int:
        return rank_of(shape, self.rank_ratio, "ceil")


def _datum(stack: Stack, kind: str, expert: str, shape: torch.Size) -> Tensor:
    datum = stack.datum(kind, expert)
    if datum is None or datum.shape != shape:
        what = "is missing" if datum is None else f"has shape {list(datum.shape)}, expected {list(shape)}"
        raise MergeflowError(f"the statistic '{kind}' of expert '{expert}' for tensor '{stack.name}' {what}.")
    return datum


@method("fisher", FisherArgs, elementwise=True, anchor="–", weights="shares", data=(FISHER,), on_device=Copies(4, 2))
def fisher(stack: Stack, args: FisherArgs) -> Parts:
    """Mean of the experts weighted by their diagonal Fisher information.

    θ = Σ w_t (F_t + eps) θ_t / Σ w_t (F_t + eps)

    Stored as θ0 + scale · (θ − θ0), so scale 1 is the weighted mean itself.

    Property:
        Equal Fishers give the average; an entry that only one expert is sure of is that expert's.

    Source:
        Matena and Raffel, Merging models with Fisher-weighted averaging (NeurIPS 2022), equation 6.
    """
    fishers = torch.stack([_datum(stack, "fisher", name, stack.base.shape) for name in stack.model.experts])
    if bool((fishers < 0).any()):
        raise MergeflowError(
            f"the Fisher information of tensor '{stack.name}' has negative entries, but squares are never negative."
        )
    shares = (fishers + args.eps) * stack.weight_column
    # Their sum may be infinite in float32; a power of two changes no bit.
    if shares.numel() and float(shares.abs().max()) > 2.0**64:
        shares = shares * 2.0**-64
    return stack.base, (shares * stack.taus).sum(0) / shares.sum(0)


def _regmean_bytes(args: RegmeanArgs, name: str, model: Model) -> int:
    shape, itemsize = model.shapes[name], model.dtype.itemsize
    inputs = shape[-1] ** 2  # the Grams as given, their sum, one on its way into it, and the pseudo-inverse
    return (len(model.experts) * itemsize + 64) * inputs + (24 + 2 * itemsize) * prod(shape)


@method(
    "regmean",
    RegmeanArgs,
    elementwise=lambda _args, name, model: all(name not in grams for grams in model.data["gram"].values()),
    anchor="–",
    weights="shares",
    data=(GRAM,),
    workspace=_regmean_bytes,
    on_device=Copies(2, 1.5, 13.4),
)
def regmean(stack: Stack, args: RegmeanArgs) -> Parts:
    """The weights whose outputs are nearest to every expert's on its own inputs.

    W = (Σ w_t W_t Ĝ_t) (Σ w_t Ĝ_t)⁻¹ for a weight W [out, in] with inputs' Gram G_t [in, in];
    Ĝ_t = G_t with its off-diagonal entries × off_diagonal

    Tensors without Grams are averaged. Stored as θ0 + scale · (θ − θ0).

    Property:
        Equal Grams give the average; with off_diagonal 1 no other weights have a smaller squared error.

    Source:
        Jin et al., Dataless knowledge fusion by merging weights (ICLR 2023), equation 2 and section 3.2.
    """
    total = sum(stack.model.weights)
    grams = [stack.datum("gram", name) for name in stack.model.experts]
    if all(gram is None for gram in grams):
        return stack.base, stack.weighted.sum(0) / total
    columns = stack.base.shape[-1]
    whole = torch.zeros(columns, columns, dtype=torch.float64, device=stack.base.device)
    pulled = torch.zeros(stack.base.shape, dtype=torch.float64, device=stack.base.device)
    for name, weight, tau in zip(stack.model.experts, stack.model.weights, stack.taus, strict=True):
        gram = _datum(stack, "gram", name, torch.Size((columns, columns))).double() * weight
        gram = args.off_diagonal * gram + (1 - args.off_diagonal) * torch.diag(gram.diagonal())
        whole += gram
        pulled += tau.double() @ gram
    # Inputs that never fire leave empty rows: the pseudo-inverse keeps θ0 there instead of failing.
    merged = pulled @ torch.linalg.pinv(whole, hermitian=True)
    return stack.base, merged.to(stack.base.dtype)


def adamerging_directions(stack: Stack, args: AdamergingArgs) -> tuple[Tensor, list[Tensor]]:
    """Return the anchor and one direction per expert that the coefficients multiply, each [*base.shape]."""
    if args.on == "task_vectors":
        return stack.base, list(stack.weighted)
    mean = stack.taus.mean(0)
    centred = (stack.taus - mean) * stack.weight_column
    form, cache = args.form(stack.model.architecture, stack.name, stack.base.shape), stack.model.cache
    if form is None:
        return stack.base + mean, [torch.zeros_like(mean) for _ in centred]
    parts = ([truncate(part, args.rank(part.shape), cache) for part in form.split(delta)] for delta in centred)
    return stack.base + mean, [form.join(low) for low in parts]


def _adamerging_bytes(args: AdamergingArgs, shape: Matrix) -> int:
    centred = (3 * shape.experts + 4) * shape.nbytes  # centred task vectors, their low-rank parts, and what makes them
    return centred + decomposition(shape) + 4 * 8 * (shape.rows + shape.columns) * shape.short


@method(
    "adamerging",
    AdamergingArgs,
    elementwise=lambda args, name, model: args.on == "task_vectors" or all_but_matrices(args, name, model),
    anchor="θ0 or mean θ_t",
    data=(COEFFICIENTS,),
    workspace=matrices(_adamerging_bytes),
    on_device=lambda args: Copies(3, 6) if args.on == "cart" else Copies(1, 3),
)
def adamerging(stack: Stack, args: AdamergingArgs) -> Parts:
    """Sum of directions with coefficients learned by entropy minimisation.

    θ = anchor + scale · Σ λ_t^l d_t^l;  d_t = τ_t on θ0 (`task_vectors`), or SVD_k(θ_t − θ̄) on the mean (`cart`)

    The λ are given as data (`coefficients`, by expert and tensor, or one number per expert; see
    `mergeflow.merging.learned.learn`); without them every λ is `init`, the static start.

    Property:
        At its start on task vectors it is task arithmetic with scale `init`.

    Source:
        Yang et al., AdaMerging (ICLR 2024), equations 3 and 4; Choi et al. (CART), section 5 for `cart`.
    """
    anchor, directions = adamerging_directions(stack, args)
    result = torch.zeros_like(stack.base)
    given = stack.model.data.get("coefficients", {})
    for name, direction in zip(stack.model.experts, directions, strict=True):
        coefficient = given.get(name, args.init)
        value = (
            float(coefficient)
            if isinstance(coefficient, int | float)
            else float(coefficient.get(stack.name, args.init))
        )
        if not isfinite(value):
            raise MergeflowError(f"the coefficient of expert '{name}' for tensor '{stack.name}' is {value}.")
        result += direction * value
    return anchor, result
