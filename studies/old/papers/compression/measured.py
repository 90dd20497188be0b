"""What the study `compression` measured: its rows found by how the experts were compressed, sizes and bits."""

from collections.abc import Mapping, Sequence
from math import prod
from statistics import fmean

from mergeflow.merging.matrices import is_matrix, rank_of
from studies.old.rows import Row

Sizes = Mapping[str, Sequence[int]]


def counts(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of tasks that were measured."""
    return sorted({row["tasks"] for row in rows})


def labels(ratio: float) -> dict[str, str]:
    """Return the rows of the tables."""
    return {
        "cart": f"CART-Indexing, {100 * ratio:g} %",
        "own": f"CART-Indexing, {100 * ratio:g} %, own",
        "emr": "EMR",
        "tall": "TALL mask + TIES",
        "tsv": "TSV-C",
    }


def of(rows: Sequence[Row], kind: str, count: int, ratio: float | None = None) -> list[Row]:
    """Return one row per seed; for the curve `cart` those of a ratio.

    Args:
        rows: as of `suite`.
        kind: of compression.
        count: how many tasks.
        ratio: a rank ratio of the curve; None for all.
    """
    wanted = ratio if kind in ("cart", "tsv_curve") else None
    return [
        row
        for row in rows
        if (row["kind"], row["tasks"]) == (kind, count) and (wanted is None or row["args"]["rank_ratio"] == wanted)
    ]


def share(row: Row, with_base: bool) -> float:
    """Return the file's share of all experts' bytes, with θ0 where it is needed and asked for."""
    base: float = row["base"] if with_base and row["needs_base"] else 0
    return float(row["file"] + base) / float(row["all_experts"])


def relative(rows: Sequence[Row]) -> float:
    """Return the mean relative test accuracy of rows."""
    return fmean(row["relative"]["test"] for row in rows)


def smallest(rows: Sequence[Row], count: int, target: float) -> float | None:
    """Return the smallest rank ratio of CART-Indexing that keeps the target on validation, mean over seeds.

    Args:
        rows, count: as of `of`.
        target: the share of individual accuracy that is to be kept.
    """
    for ratio in sorted({row["args"]["rank_ratio"] for row in of(rows, "cart", count)}):
        if fmean(row["relative"]["validation"] for row in of(rows, "cart", count, ratio)) >= target:
            return float(ratio)
    return None


def mask_bits(sizes: Sizes) -> int:
    """Return the bits of one task's mask by the paper's formula, one an entry.

    Example:
        >>> mask_bits({"a.mlp.weight": [4, 3], "b": [3]})
        15
    """
    return sum(prod(shape) for shape in sizes.values())


def low_rank_bits(sizes: Sizes, ratio: float) -> int:
    """Return the bits of one task's low-rank part by the paper's formula, Σ 32 (m + n) k over the treated matrices."""
    treated = [shape for name, shape in sizes.items() if is_matrix(name, shape, "attn_mlp")]
    return sum(32 * sum(shape) * rank_of(shape, ratio, "ceil") for shape in treated)


def formula_bits(row: Row, sizes: Sizes) -> int | None:
    """Return the bits of one task's part by the paper's formula; None for what has none."""
    if row["kind"] == "cart":
        return low_rank_bits(sizes, row["args"]["rank_ratio"])
    return mask_bits(sizes) if row["kind"] in ("emr", "tall") else None
