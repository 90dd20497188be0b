"""Study `compression`: its tables."""

from collections.abc import Sequence

from studies.lab.inputs import mean_accuracy
from studies.old.papers.compression.measured import (
    Sizes,
    counts,
    formula_bits,
    labels,
    low_rank_bits,
    mask_bits,
    of,
    share,
)
from studies.old.results import Cell, Table, with_interval
from studies.old.rows import Row


def tables(rows: Sequence[Row], sizes: Sizes, ratio: float) -> list[Table]:
    """Return accuracy and storage, the bits of each part, the curves over the rank, and what the width decides.

    Args: As of `result`.
    """
    return [accuracy_table(rows, ratio), bits_table(rows, sizes, ratio), _curves(rows), width_table(ratio)]


def accuracy_table(rows: Sequence[Row], ratio: float) -> Table:
    """Return accuracy and storage of every method and number of tasks (the paper's Table 3)."""
    lines: list[dict[str, Cell]] = []
    for count in counts(rows):
        individual = [mean_accuracy(row["experts"]["test"]) for row in of(rows, "emr", count)]
        lines.append({"tasks": count, "method": "individual", "test accuracy, %": with_interval(individual)})
        lines[-1] |= {"relative, %": "100.0", "file, %": "100.0", "with θ0, %": "100.0", "to read one task, %": "100.0"}
        for kind, label in labels(ratio).items():
            own = of(rows, kind, count, ratio)
            lines.append(
                {
                    "tasks": count,
                    "method": label,
                    "test accuracy, %": with_interval([mean_accuracy(row["test"]) for row in own]),
                    "relative, %": with_interval([100 * row["relative"]["test"] for row in own]),
                    "file, %": f"{100 * share(own[0], False):.1f}",
                    "with θ0, %": f"{100 * share(own[0], True):.1f}",
                    "to read one task, %": f"{100 * own[0]['one_task'] * count / own[0]['all_experts']:.1f}",
                }
            )
    title = "Accuracy and storage; file and θ0 in % of all experts, what reading one task takes in % of one expert"
    return Table(title, lines)


def bits_table(rows: Sequence[Row], sizes: Sizes, ratio: float) -> Table:
    """Return the counted bits of each part beside the paper's formulas.

    Args: As of `result`.
    """
    count = counts(rows)[0]
    lines: list[dict[str, Cell]] = []
    for kind, label in labels(ratio).items():
        row = of(rows, kind, count, ratio)[0]
        formula = formula_bits(row, sizes)
        lines.append(
            {
                "method": label,
                "a task's part, kbit": f"{8e-3 * row['own']:.0f}",
                "by the formula, kbit": "" if formula is None else f"{1e-3 * formula:.0f}",
                "part / expert, %": f"{100 * row['own'] * count / row['all_experts']:.2f}",
                "shared part, kbit": f"{8e-3 * row['shared']:.0f}",
                "file, kbit": f"{8e-3 * row['file']:.0f}",
                "needs θ0": "yes" if row["needs_base"] else "no",
            }
        )
    return Table(f"Bits counted in the file of {count} tasks, first seed", lines)


def _curves(rows: Sequence[Row]) -> Table:
    lines: list[dict[str, Cell]] = []
    for count in counts(rows):
        for ratio in sorted({row["args"]["rank_ratio"] for row in of(rows, "cart", count)}):
            line: dict[str, Cell] = {"tasks": count, "rank ratio": f"{ratio:g}"}
            for kind, label in (("cart", "CART-Indexing"), ("tsv_curve", "TSV-C")):
                own = of(rows, kind, count, ratio)
                line[f"{label}, relative %"] = with_interval([100 * r["relative"]["test"] for r in own]) if own else ""
                line[f"{label}, storage %"] = f"{100 * share(own[0], True):.1f}" if own else ""
            lines.append(line)
    return Table("Over the rank: relative test accuracy, and storage with θ0 where it is needed", lines)


def width_table(ratio: float) -> Table:
    """Return what a task's part takes of an expert's attention and MLP weights, by the formulas, over the width."""
    lines: list[dict[str, Cell]] = []
    for name, width in (("pocket-clip", 128), ("ViT-B/32", 768), ("ViT-L/14", 1024), ("", 4096)):
        block = {"attn.in": [3 * width, width], "attn.out": [width, width]}
        block |= {"mlp.in": [4 * width, width], "mlp.out": [width, 4 * width]}
        whole = 32 * mask_bits(block)
        lines.append(
            {
                "model": name,
                "width M": width,
                f"rank {100 * ratio:g} % of M, %": f"{100 * low_rank_bits(block, ratio) / whole:.2f}",
                "rank 11, %": f"{100 * low_rank_bits(block, 11 / width) / whole:.2f}",
                "mask, %": f"{100 * mask_bits(block) / whole:.2f}",
                "rank of equal bits": f"{mask_bits(block) / (low_rank_bits(block, 1 / width)):.1f}",
            }
        )
    return Table("A task's part as a share of an expert's blocks, by the formulas", lines)
