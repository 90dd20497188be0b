"""One merged vector for all tasks and a bit mask for each."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.compression.compressor import CompressArgs, Payload, Stored, compressor, pack, unpack
from mergeflow.merging.method import RUNNING, ByUnit, Model, Pass, Stack, gathering
from mergeflow.merging.methods.sparse import tall_masks
from mergeflow.merging.methods.ties import TiesArgs, ties

if TYPE_CHECKING:
    from torch import Tensor


class TallMaskArgs(CompressArgs):
    """Arguments of `tall_mask`."""

    threshold: float = Field(0.4, ge=0, description="λ of the TALL masks, ≥ 0")
    of: Literal["task_arithmetic", "ties"] = Field("task_arithmetic", description="how the shared vector is merged")
    keep: float = Field(0.2, ge=0, le=1, description="share of entries TIES keeps, 0 … 1")


class EmrArgs(CompressArgs):
    """Arguments of `emr`."""


def _statistics(stack: Stack) -> Payload | None:
    """Store BatchNorm's statistics of each task; those of masked sums may have negative variances."""
    if not stack.name.endswith(RUNNING):
        return None
    return Payload(per_task=tuple({"own": value} for value in stack.base + stack.taus))


def _ties_args(args: TallMaskArgs) -> TiesArgs:
    return TiesArgs.model_validate({"keep": args.keep, "reduce": "sum"})


def _tall_passes(args: TallMaskArgs, dtype: DType) -> tuple[Pass, ...]:
    if args.of != "ties":
        return ()
    return tuple(first_pass.with_arguments(_ties_args) for first_pass in ties.passes(_ties_args(args), dtype))


def _masked(stored: Stored, args: TallMaskArgs) -> Tensor:
    assert stored.base is not None
    if "own" in stored.task_part:
        return stored.task_part["own"]
    merged = stored.shared["vector"].to(stored.base.dtype).reshape(stored.base.shape)
    return stored.base + torch.where(unpack(stored.task_part["mask"], stored.base.shape), merged, 0)


@compressor("tall_mask", TallMaskArgs, _masked, passes=_tall_passes)
def tall_mask(stack: Stack, args: TallMaskArgs) -> Payload:
    """One merged task vector and a bit mask per task.

    θ̂_t = θ0 + m_t ⊙ τ,  τ = Σ w_t τ_t (or TIES by sum),  m_t = abs(τ_t) > threshold · abs(τ − τ_t)

    Statistics of BatchNorm are each task's.

    Property:
        One task alone keeps its task vector wherever it is not zero.

    Source:
        Wang et al., Localizing task information (ICML 2024), equations 3 and 4.
    """
    if (statistics := _statistics(stack)) is not None:
        return statistics
    merged = ties(stack, _ties_args(args))[1] if args.of == "ties" else stack.weighted.sum(0)
    masks = tall_masks(stack.taus, merged, args.threshold)
    return Payload({"vector": merged}, tuple({"mask": pack(mask)} for mask in masks))


def _elected(taus: Tensor) -> Tensor:
    sign = taus.sum(0).sign()
    return torch.where(taus * sign > 0, taus.abs(), 0).amax(0) * sign


def _emr_passes(args: Any, dtype: DType) -> tuple[Pass, ...]:
    def lengths(stack: Stack, args: Any) -> list[tuple[float, float]]:
        if stack.name.endswith(RUNNING):
            return [(0.0, 0.0) for _ in stack.taus]
        elected = _elected(stack.taus)
        return [
            (float(tau.double().abs().sum()), float(torch.where(tau * elected > 0, elected, 0).double().abs().sum()))
            for tau in stack.taus
        ]

    def finish(norms: ByUnit[list[tuple[float, float]]], model: Model, args: Any) -> list[float]:
        sums = [[fsum(rows[t][side] for rows in norms.values()) for side in (0, 1)] for t in range(len(model.experts))]
        return [length / masked if masked else 1.0 for length, masked in sums]

    return (gathering("emr", lengths, finish),)


def _emr_whole(model: Model) -> dict[str, dict[str, Tensor]]:
    return {
        name: {"rescale": torch.tensor(value, dtype=torch.float32)}
        for name, value in zip(model.experts, model.results["emr"], strict=True)
    }


def _rescaled(stored: Stored, args: EmrArgs) -> Tensor:
    assert stored.base is not None
    if "own" in stored.task_part:
        return stored.task_part["own"]
    elected = stored.shared["vector"].to(stored.base.dtype).reshape(stored.base.shape)
    signed = torch.where(unpack(stored.task_part["mask"], stored.base.shape), elected, 0)
    return stored.base + signed * float(stored.whole["rescale"])


@compressor("emr", EmrArgs, _rescaled, passes=_emr_passes, whole=_emr_whole)
def emr(stack: Stack, args: EmrArgs) -> Payload:
    """An elected vector for all tasks, a bit mask and one rescaler per task.

    τ = γ ⊙ max_t{abs(τ_t) : sign τ_t = γ},  γ = sign Στ_t;  m_t = [τ_t ⊙ τ > 0];  λ_t = Σ abs(τ_t) / Σ abs(m_t ⊙ τ)
    θ̂_t = θ0 + λ_t · m_t ⊙ τ

    Statistics of BatchNorm are each task's.

    Property:
        One task alone is kept, up to the rounding of its type; the mean magnitude of every task vector is kept.

    Source:
        Huang et al., EMR-Merging (NeurIPS 2024), algorithm 1.
    """
    if (statistics := _statistics(stack)) is not None:
        return statistics
    elected = _elected(stack.taus)
    return Payload({"vector": elected}, tuple({"mask": pack(tau * elected > 0)} for tau in stack.taus))
