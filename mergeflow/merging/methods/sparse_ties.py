"""Sparsification followed by TIES, under the names that people know: DARE, DELLA and breadcrumbs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mergeflow.checkpoints.header import DType
from mergeflow.merging.method import Copies, Parts, Stack, method, tensors
from mergeflow.merging.methods.dropout import (
    DareArgs,
    DellaArgs,
    dare_sparsify,
    della_sparsify,
    della_workspace,
    merge_rest,
    rest_passes,
)
from mergeflow.merging.methods.sparse import BreadcrumbsArgs, breadcrumbs_sparsify
from mergeflow.merging.methods.ties import REDUCE, Reduce, disjoint_merge, majority_pass
from mergeflow.merging.stack import Pass

_SCALE = "factor of the direction; any real number"


class DareTiesArgs(DareArgs):
    """Arguments of `dare_ties`."""

    scale: float = Field(1.0, description=_SCALE)
    then: Literal["ties"] = Field("ties", description="always TIES")


class DellaTiesArgs(DellaArgs):
    """Arguments of `della_ties`."""

    scale: float = Field(1.0, description=_SCALE)
    then: Literal["ties"] = Field("ties", description="always TIES")


class BreadcrumbsTiesArgs(BreadcrumbsArgs):
    """Arguments of `breadcrumbs_ties`."""

    reduce: Reduce = Field("mean", description=f"how TIES reduces; {REDUCE}")


@method("dare_ties", DareTiesArgs, elementwise=True, passes=rest_passes(dare_sparsify), on_device=Copies(3, 4))
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
    on_device=Copies(2, 10.5),
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


def _breadcrumbs_passes(args: Any, dtype: DType) -> tuple[Pass, ...]:
    return (majority_pass(breadcrumbs_sparsify),)


@method(
    "breadcrumbs_ties",
    BreadcrumbsTiesArgs,
    passes=_breadcrumbs_passes,
    workspace=tensors(lambda experts: 3 * experts + 4, weighted=True),
    on_device=Copies(3, 4),
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
    sparse, majority = breadcrumbs_sparsify(stack, args), stack.model.known["majority"]
    return stack.base, disjoint_merge(sparse, majority, args.reduce, stack.weight_column)
