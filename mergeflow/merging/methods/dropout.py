"""Sparsification before a sum or a TIES merge: DARE, DELLA and breadcrumbs.

Every mask is drawn from a generator seeded by (seed, expert, tensor, block), so neither the order of the experts nor
the number of threads changes a bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import DType
from mergeflow.late import np, torch
from mergeflow.merging.method import NORMALIZE, Args, Copies, Model, Parts, Pass, Stack, method, tensors
from mergeflow.merging.methods.sparse import CutArgs, breadcrumbs_sparsify
from mergeflow.merging.methods.ties import REDUCE, Reduce, disjoint_merge, majority_pass, ties_copies
from mergeflow.merging.thresholds import threshold_passes, trim_to
from mergeflow.schema import Seed

if TYPE_CHECKING:
    from torch import Tensor


class ThenArgs(Args):
    """Arguments of methods that sparsify and then merge with another method."""

    then: Literal["task_arithmetic", "ties"] = Field("task_arithmetic", description="how the rest is merged")
    keep: float = Field(1.0, ge=0, le=1, description="share TIES keeps of what is left, 0 … 1")
    reduce: Reduce = Field("mean", description=f"how TIES reduces; {REDUCE}")
    scale: float = Field(0.3, description="factor of the direction; default .3, or 1 with TIES")

    @model_validator(mode="before")
    @classmethod
    def _scale_of_then(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("then") == "ties":
            return {"scale": 1.0, **values}
        return values

    @model_validator(mode="after")
    def _read_by_ties(self) -> Self:
        unread = [name for name in ("keep", "reduce") if getattr(self, name) != type(self).model_fields[name].default]
        if unread and self.then != "ties":
            names = " and ".join(unread)
            raise ValueError(f"only `then: ties` reads {names}; the share of entries that are left is 1 − drop")
        return self


class SumArgs(ThenArgs):
    """Arguments of methods that sum the rest, unless TIES merges it."""

    normalize: bool = Field(False, description=f"{NORMALIZE}; TIES has `reduce` for it")

    @model_validator(mode="after")
    def _one_divisor(self) -> Self:
        if self.normalize and self.then == "ties":
            raise ValueError("normalize is of sums: what TIES divides by is `reduce`, such as weighted_mean")
        return self


class DropArgs(ThenArgs):
    drop: float = Field(0.9, ge=0, lt=1, description="probability of dropping an entry, [0, 1)")
    seed: Seed = Field(0, description="seed of the masks, ≥ 0")
    per_expert: ClassVar[tuple[str, ...]] = ("drop",)


class WindowArgs(DropArgs):
    window: float = Field(0.15, ge=0, lt=1, description="width of the range of drop probabilities, [0, 1)")

    @model_validator(mode="after")
    def _probabilities(self) -> Self:
        if self.drop + self.window / 2 >= 1 or self.drop < self.window / 2:
            raise ValueError(f"drop ± window/2 must stay in [0, 1), found {self.drop} ± {self.window / 2}")
        return self


class DareArgs(DropArgs, SumArgs):
    """Arguments of `dare`."""


class DellaArgs(WindowArgs, SumArgs):
    """Arguments of `della`."""


# Elements that are sorted at a time, in whole rows.
_DRAWN = 2**20


def uniform_bits(seed: int, expert: str, name: str, start: int, count: int) -> np.ndarray:
    """Return uniform uint32 [count] for a piece of an expert's tensor: the same for every division into pieces.

    Args:
        start: The piece's first element: a multiple of the fingerprints' `BLOCK`.
    """
    pieces = []
    for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
        key = hashlib.sha256(f"{seed}\0{expert}\0{name}\0{block}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
        size = min(BLOCK, start + count - block * BLOCK)
        # The raw bits; `random_raw` gives the same ones, but lets no other thread work meanwhile.
        drawn = generator.integers(0, 2**64 - 1, (size + 1) // 2, dtype=np.uint64, endpoint=True)
        pieces.append(drawn.view(np.uint32)[:size])
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint32), *pieces])


def dare_sparsify(stack: Stack, args: DropArgs) -> Tensor:
    """Return w_t m_t ⊙ τ_t / (1 − drop), [T, *base.shape], with m_t = 0 at the probability `drop`."""
    drops = args.each("drop", len(stack.taus))
    if not any(drops):
        return stack.weighted
    bounds = [np.uint32(min(round(drop * 2**32), 2**32 - 1)) for drop in drops]
    factors = torch.tensor(stack.model.weights, dtype=torch.float64) / (1 - torch.tensor(drops, dtype=torch.float64))
    column = factors.to(stack.taus.device, stack.taus.dtype).reshape(stack.weight_column.shape)
    sparse = stack.take(weighted=False).mul_(column)
    for name, bound, tau in zip(stack.model.experts, bounds, sparse, strict=True):
        drawn = uniform_bits(args.seed, name, stack.name, stack.start, tau.numel())
        mask = torch.from_numpy(drawn >= bound).reshape(tau.shape).to(tau.device)
        # As integers, so that what is dropped is +0 and no −0; `masked_fill_` takes eight times as long.
        tau.view(torch.int32 if tau.dtype == torch.float32 else torch.int64).mul_(mask)
    return sparse


def della_sparsify(stack: Stack, args: WindowArgs) -> Tensor:
    """Return w_t m_t ⊙ τ_t / (1 − p), [T, *base.shape], where p falls with the magnitude's rank within the row."""
    if stack.base.numel() == 0:
        return stack.taus
    taus = stack.taus.reshape(len(stack.taus), stack.base.shape[0] if stack.base.ndim > 1 else 1, -1)
    n = taus.shape[-1]
    some = max(1, _DRAWN // n)
    step = args.window / (n - 1) if n > 1 else 0.0
    by_rank = torch.arange(n, dtype=taus.dtype, device=taus.device) * step
    drops = torch.tensor(args.each("drop", len(taus)), dtype=taus.dtype, device=taus.device)
    leasts = drops - args.window / 2 if n > 1 else drops
    sparse = torch.empty_like(taus)
    for name, tau, least, out in zip(stack.model.experts, taus, leasts, sparse, strict=True):
        bits = torch.from_numpy(uniform_bits(args.seed, name, stack.name, stack.start, tau.numel())).reshape(tau.shape)
        pairs = zip(tau.split(some), bits.split(some), out.split(some), strict=True)
        for rows, drawn, into in pairs:  # some rows of one expert: what a sort holds is ten times its input
            order = _falling(rows.abs())
            drop = torch.empty_like(rows).scatter_(-1, order, (by_rank + least).expand_as(rows).contiguous())
            keep = drawn.to(rows.device).double() >= drop.double() * 2**32
            into.copy_(torch.where(keep, rows / (1 - drop), 0))
    return sparse.reshape(stack.taus.shape).mul_(stack.weight_column)


def _falling(magnitudes: Tensor) -> Tensor:
    """Return the places of magnitudes [m, n] in falling order, row by row; equal ones in the order of their places."""
    if magnitudes.dtype != torch.float32 or magnitudes.device.type != "cpu":
        return magnitudes.argsort(dim=-1, descending=True, stable=True)
    # The bits of magnitudes order as they do. With the place below them numpy sorts numbers, three times as fast.
    keys = (~magnitudes.view(torch.int32).numpy().view(np.uint32)).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(magnitudes.shape[-1], dtype=np.uint64)
    keys.sort(axis=-1)
    return torch.from_numpy((keys & np.uint64(2**32 - 1)).view(np.int64))


def merge_rest(stack: Stack, args: Any, sparse: Tensor) -> Parts:
    """Return the sum or the TIES merge of sparse task vectors, times their weights, [T, *base.shape]."""
    if args.then == "task_arithmetic":
        return stack.base, stack.total(sparse, args.normalize)
    if args.keep < 1:
        sparse = trim_to(sparse, stack.model.results["threshold"])
    return stack.base, disjoint_merge(sparse, stack.model.results["majority"], args.reduce, stack.weight_column)


def rest_passes(sparsify: Callable[[Stack, Any], Tensor]) -> Callable[[Any, DType], tuple[Pass, ...]]:
    """Return the first passes that `merge_rest` needs for what a method's sparsification leaves."""

    def trimmed(stack: Stack, args: Any) -> Tensor:
        sparse = sparsify(stack, args)
        return trim_to(sparse, stack.model.results["threshold"]) if args.keep < 1 else sparse

    def passes(args: Any, dtype: DType) -> tuple[Pass, ...]:
        if args.then == "task_arithmetic":
            return ()
        cut = threshold_passes(sparsify, lambda args: args.keep, dtype) if args.keep < 1 else ()
        return (*cut, majority_pass(trimmed))

    return passes


def dare_copies(args: DropArgs) -> Copies:
    return ties_copies(args) if args.then == "ties" else Copies(1, 2)


@method("dare", DareArgs, elementwise=True, passes=rest_passes(dare_sparsify), on_device=dare_copies)
def dare(stack: Stack, args: DareArgs) -> Parts:
    """Random entries dropped and the rest rescaled, then summed or merged by TIES.

    m_t ~ Bernoulli(1 − drop),  τ̃_t = m_t ⊙ τ_t / (1 − drop)
    θ = θ0 + scale · Σ w_t τ̃_t (over Σ w_t with `normalize`), or TIES of the w_t τ̃_t

    Property:
        The mean over seeds is the method without dropping; at drop 0 it is that method exactly.

    Source:
        Yu et al., Language models are Super Mario (ICML 2024), section 3.
    """
    return merge_rest(stack, args, dare_sparsify(stack, args))


def della_workspace(args: WindowArgs, name: str, model: Model) -> int:
    """Return the bytes of DELLA: what is kept, one expert's bits, some rows that are sorted, and what follows."""
    count, numel = len(model.experts), prod(model.shapes[name])
    rows = 48 * min(numel, max(_DRAWN, model.shapes[name][-1] if model.shapes[name] else 1))
    further = 2 * count + 2 if args.then == "ties" else 1
    return (count + 1 + further) * numel * model.dtype.itemsize + rows


def della_copies(args: WindowArgs) -> Copies:
    if args.then == "task_arithmetic":
        return Copies(2, 10.3)
    return Copies(4, 6.3) if args.reduce == "weighted_mean" else Copies(3, 8.3)


@method(
    "della",
    DellaArgs,
    passes=rest_passes(della_sparsify),
    workspace=della_workspace,
    on_device=della_copies,
    by_rows=True,
)
def della(stack: Stack, args: DellaArgs) -> Parts:
    """Like DARE, but large entries are dropped less often.

    p = drop − window/2 + window · r/(n−1), r = rank by falling magnitude in the row;  τ̃_t = m_t ⊙ τ_t / (1 − p)
    θ = θ0 + scale · Σ w_t τ̃_t (over Σ w_t with `normalize`), or TIES of the w_t τ̃_t

    Property:
        At window 0 it is DARE; the mean of p over a row is `drop`.

    Source:
        Deep et al., DELLA-Merging (2024), section 3.1.
    """
    return merge_rest(stack, args, della_sparsify(stack, args))


_SCALE = "factor of the direction; any real number"


class DareTiesArgs(DropArgs):
    scale: float = Field(1.0, description=_SCALE)
    then: Literal["ties"] = Field("ties", description="always TIES")


class DellaTiesArgs(WindowArgs):
    scale: float = Field(1.0, description=_SCALE)
    then: Literal["ties"] = Field("ties", description="always TIES")


class BreadcrumbsTiesArgs(CutArgs):
    reduce: Reduce = Field("mean", description=f"how TIES reduces; {REDUCE}")


@method("dare_ties", DareTiesArgs, elementwise=True, passes=rest_passes(dare_sparsify), on_device=dare_copies)
def dare_ties(stack: Stack, args: DareTiesArgs) -> Parts:
    """Random entries dropped, the rest rescaled and merged by TIES: `dare` with `then: ties`.

    m_t ~ Bernoulli(1 − drop),  τ̃_t = m_t ⊙ τ_t / (1 − drop),  θ = θ0 + scale · TIES of the w_t τ̃_t

    Property:
        At drop 0 it is TIES of whole task vectors.

    Source:
        Yu et al., Language models are Super Mario (ICML 2024), section 3; Yadav et al. (NeurIPS 2023).
    """
    return merge_rest(stack, args, dare_sparsify(stack, args))


@method(
    "della_ties",
    DellaTiesArgs,
    passes=rest_passes(della_sparsify),
    workspace=della_workspace,
    on_device=della_copies,
    by_rows=True,
)
def della_ties(stack: Stack, args: DellaTiesArgs) -> Parts:
    """Like `dare_ties`, but large entries are dropped less often: `della` with `then: ties`.

    p = drop − window/2 + window · r/(n−1), r = rank by falling magnitude in the row;  τ̃_t = m_t ⊙ τ_t / (1 − p)
    θ = θ0 + scale · TIES of the w_t τ̃_t

    Property:
        At window 0 it is `dare_ties`.

    Source:
        Deep et al., DELLA-Merging (2024), section 3.
    """
    return merge_rest(stack, args, della_sparsify(stack, args))


@method(
    "breadcrumbs_ties",
    BreadcrumbsTiesArgs,
    passes=lambda args, dtype: (majority_pass(breadcrumbs_sparsify),),
    workspace=tensors(lambda experts: 3 * experts + 4, weighted=True),
    on_device=ties_copies,
)
def breadcrumbs_ties(stack: Stack, args: BreadcrumbsTiesArgs) -> Parts:
    """Task vectors without their smallest and largest entries, merged by TIES.

    m_t = 0 for the ⌊β·n⌋ smallest and the ⌊γ·n⌋ largest magnitudes of each tensor, else 1
    γ = sign(Σ w_t m_t ⊙ τ_t),  θ = θ0 + scale · mean over {t : sign(w_t τ_t) = γ} of w_t m_t ⊙ τ_t

    Property:
        With β = γ = 0 it is TIES of whole task vectors; neither outliers nor minorities have an influence.

    Source:
        Davari and Belilovsky, Model breadcrumbs (ECCV 2024), with the sign election of Yadav et al. (NeurIPS 2023).
    """
    sparse, majority = breadcrumbs_sparsify(stack, args), stack.model.results["majority"]
    return stack.base, disjoint_merge(sparse, majority, args.reduce, stack.weight_column)
