"""Which tensors the spectral methods treat as matrices, and as how many."""

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mergeflow.merging.architectures.architecture import Architecture, Selected
from mergeflow.merging.architectures.families import family_of
from mergeflow.merging.architectures.roles import TREATED


def _selection(value: Any) -> Any:
    patterns = isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value)
    if not patterns and not (isinstance(value, str) and value in TREATED):
        raise ValueError(f"expected {', '.join(TREATED)}, or a list of patterns of names, found {value!r:.60}")
    return value


Selection = Annotated[Selected, BeforeValidator(_selection)]
"""`attn_mlp`: attention, MLP and experts; `mlp`: the last two; `all`: projections too; or patterns of names.

See docs/architectures.md.
"""

Matrices = Annotated[
    Selection,
    Field(description=f"which matrices are treated: {', '.join(TREATED)}, or glob patterns; see architectures.md"),
]
SplitQkv = Annotated[
    bool, Field(description="treat each fused weight (q/k/v, gate/up) as the matrices it holds; see architectures.md")
]


def is_matrix(name: str, shape: Sequence[int], selection: Selection, architecture: Architecture | None = None) -> bool:
    """Whether a selection takes a tensor as a matrix; without an architecture its name alone decides.

    Args:
        name: The tensor.
        shape: Its shape.
        selection: "attn_mlp", "mlp", "all", or glob patterns of names.
        architecture: What the model's tensors are; by default as the name tells.

    Example:
        >>> is_matrix("visual.resblocks.0.attn.out_proj.weight", (8, 8), "attn_mlp")
        True
    """
    known = architecture or Architecture(family_of(None, [name]))
    return known.treats(name, shape, selection)


def rank_of(shape: Sequence[int], ratio: float, rounding: Literal["ceil", "floor"]) -> int:
    """Return k for a matrix: ceil(ratio · min side), or max(1, floor(·)).

    Args:
        shape: The matrix's, (m, n).
        ratio: Share of the smaller side, (0, 1].
        rounding: "ceil" as CART, "floor" with 1 at least.

    Example:
        >>> rank_of((768, 3072), 0.08, "ceil"), rank_of((768, 3072), 0.08, "floor")
        (62, 61)
    """
    exact = ratio * min(shape)
    # A product such as 0.07 · 100 = 7.000000000000001 must not round up to 8.
    near = round(exact)
    if abs(exact - near) < 1e-9:
        return max(1, near)
    return ceil(exact) if rounding == "ceil" else max(1, int(exact))
