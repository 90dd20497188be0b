"""Study `compression`: its tables, findings, notes, and the numbers of its figure."""

from collections.abc import Mapping, Sequence
from math import prod
from statistics import fmean
from typing import Any

from mergeflow.merging.matrices import is_matrix, rank_of
from tasks.studies.claims import judge, paired
from tasks.studies.inputs import mean_accuracy
from tasks.studies.papers.compression.figures import storage_figure
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval
from tasks.studies.rows import Row
from tasks.studies.verdicts import all_hold, within

Sizes = Mapping[str, Sequence[int]]
STORAGE = 0.25  # of all experts' bytes


def result(rows: Sequence[Row], sizes: Sizes, ratio: float, target: float) -> StudyResult:
    """Return all that the study leaves in words and numbers.

    Args:
        rows: one per suite, seed and way of compressing.
        sizes: the shape of every tensor.
        ratio: of CART-Indexing in the tables.
        target: the relative accuracy asked of the smallest rank.
    """
    chosen = {count: smallest(rows, count, target) for count in counts(rows)}
    tables = [
        accuracy_table(rows, ratio),
        bits_table(rows, sizes, ratio),
        _curves(rows),
        width_table(ratio),
    ]
    return StudyResult(tables, findings(rows, ratio, target, chosen), notes(rows, ratio), tidy_rows(rows))


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


def accuracy_table(rows: Sequence[Row], ratio: float) -> Table:
    """Return accuracy and storage of every method and number of tasks (the paper's Table 3)."""
    lines: list[dict[str, Cell]] = []
    for count in counts(rows):
        individual = [mean_accuracy(row["experts"]) for row in of(rows, "emr", count)]
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


def bits_table(rows: Sequence[Row], sizes: Sizes, ratio: float) -> Table:
    """Return the counted bits of each part beside the paper's formulas.

    Args: As of `result`.
    """
    count = counts(rows)[0]
    formulas = {"cart": low_rank_bits(sizes, ratio), "emr": mask_bits(sizes), "tall": mask_bits(sizes)}
    lines: list[dict[str, Cell]] = []
    for kind, label in labels(ratio).items():
        row = of(rows, kind, count, ratio)[0]
        formula = formulas.get(kind)
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


def tidy_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each number of tasks, seed, way of compressing and task."""
    return [
        {
            "seed": row["seed"],
            "tasks": row["tasks"],
            "kind": row["kind"],
            "rank_ratio": row["args"].get("rank_ratio"),
            "threshold": row["args"].get("threshold"),
            "file_share": share(row, False),
            "with_base_share": share(row, True),
            "task": task,
            "accuracy": 100 * value,
            "expert": 100 * row["experts"][task],
        }
        for row in rows
        for task, value in row["test"].items()
    ]


def findings(rows: Sequence[Row], ratio: float, target: float, chosen: Mapping[int, float | None]) -> list[Finding]:
    """Hold the papers' statements against the rows.

    Args:
        rows: as of `suite`, for each seed and number of tasks.
        ratio: the paper's rank ratio.
        target: the share of individual accuracy that is to be kept.
        chosen: the smallest rank ratio that keeps it on validation, by the number of tasks; None where none does.
    """
    numbers = counts(rows)
    kept = {f"{n} tasks": _relative(of(rows, "cart", n, ratio)) for n in numbers}
    storage = [share(of(rows, "cart", n, ratio)[0], False) for n in numbers]
    found = {f"{n} tasks, rank ratio {one:g}": _relative(of(rows, "cart", n, one)) for n, one in chosen.items() if one}
    emr = {n: _relative(of(rows, "emr", n)) for n in numbers}
    small = all(one <= STORAGE for one in storage)
    told = "; ".join(
        f"{name}: {with_interval(values)} % in {100 * size:.1f} %"
        for (name, values), size in zip(kept.items(), storage, strict=True)
    )
    more = {f"{numbers[0]} → {numbers[-1]} tasks": paired(emr[numbers[-1]], emr[numbers[0]])}
    return [
        judge(
            "C5",
            f"CART-Indexing at {100 * ratio:g} % rank keeps {100 * target:g} % of individual accuracy.",
            kept,
            f"relative accuracy ≥ {100 * target:g} %, at every number of tasks (the paper: 99.6 % with 8 tasks)",
            low=100 * target,
            unit=" %",
        ),
        Finding(
            "C5",
            f"CART-Indexing at {100 * ratio:g} % rank keeps 98 % of individual accuracy in a quarter of the storage.",
            told,
            all_hold([within(values, low=98) for values in kept.values()]) if small else False,
            f"relative accuracy ≥ 98 % and file ≤ {100 * STORAGE:g} % of all experts, at every number of tasks",
            ours=True,
        ),
        judge(
            "C5",
            f"CART-Indexing keeps {100 * target:g} % of individual accuracy at the rank that does so on validation.",
            found if len(found) == len(numbers) else {},
            f"relative accuracy ≥ {100 * target:g} − 0.1 % on test, at every number of tasks",
            low=100 * target - 0.1,
            unit=" %",
            ours=True,
        ),
        _against(rows, ratio, "emr", "CART-Indexing keeps more accuracy than EMR.", 0.0),
        _against(rows, ratio, "tall", "CART-Indexing comes within a point of TALL masks on TIES.", -1.0),
        judge(
            "C5",
            "EMR loses more accuracy with more tasks.",
            more if len(numbers) > 1 else {},
            "paired difference of relative accuracy ≤ 0",
            high=0,
        ),
    ]


def _relative(rows: Sequence[Row]) -> list[float]:
    """Return relative test accuracy in %, one value per seed."""
    return [100 * row["relative"]["test"] for row in rows]


def _against(rows: Sequence[Row], ratio: float, kind: str, claim: str, least: float) -> Finding:
    gaps = {
        f"{n} tasks": paired(_relative(of(rows, "cart", n, ratio)), _relative(of(rows, kind, n))) for n in counts(rows)
    }
    rule = f"paired difference of relative accuracy ≥ {least:g} points, at every number of tasks"
    return judge("C5", claim, gaps, rule, low=least)


def notes(rows: Sequence[Row], ratio: float) -> list[str]:
    """Return what the tables do not say by themselves."""
    count, most = counts(rows)[0], counts(rows)[-1]
    part = {
        kind: of(rows, kind, count, ratio)[0]["own"] * count / of(rows, kind, count, ratio)[0]["all_experts"]
        for kind in labels(ratio)
    }
    thresholds = ", ".join(
        f"{row['args']['threshold']:g} ({row['tasks']} tasks)" for row in rows if row["kind"] == "tall"
    )
    return [
        f"Per task, {100 * ratio:g} % rank costs {100 * part['cart']:.1f} % of an expert and a mask "
        f"{100 * part['emr']:.1f} %. The paper's formulas give 32 · 2Mk bits for k = ρM against M² for a mask: their "
        "ratio is 64ρ at every width (5.1 at 8 %), so a wider model does not bring a rank that grows with it nearer to "
        "a mask; what the width decides is a fixed rank, which beats a mask from M = 64k on. The printed break-even at "
        "M ≈ 1024 holds for k = 16, a ratio of 1.6 %.",
        f"The shared part is paid once: a mean or a merged vector is {100 / count:.1f} % of {count} experts and "
        f"{100 / most:.1f} % of {most}. The masks and TSV-C need θ0 beside the file, CART-Indexing does not.",
        "Whether other tensors than matrices are the mean's or each task's own is the row `own`: "
        + "; ".join(
            f"{n} tasks {100 * (relative(of(rows, 'own', n)) - relative(of(rows, 'cart', n, ratio))):+.1f} points for "
            f"{100 * (share(of(rows, 'own', n)[0], False) - share(of(rows, 'cart', n, ratio)[0], False)):.1f} % more"
            for n in counts(rows)
        )
        + ".",
        f"TALL's threshold, from validation: {thresholds}.",
    ]


def figures(rows: Sequence[Row], ratio: float) -> dict[str, Any]:
    """Return the study's figure: relative accuracy over storage, a panel per number of tasks."""
    panels: dict[int, dict[str, list[tuple[float, list[float]]]]] = {}
    for count in counts(rows):
        lines: dict[str, list[tuple[float, list[float]]]] = {}
        for kind, label in (("cart", "CART-Indexing"), ("tsv_curve", "TSV-C")):
            ratios = sorted({row["args"]["rank_ratio"] for row in of(rows, kind, count)})
            lines[label] = [_point(of(rows, kind, count, each)) for each in ratios]
        for kind in ("emr", "tall"):
            lines[labels(ratio)[kind]] = [_point(of(rows, kind, count))]
        panels[count] = lines
    return {"storage": storage_figure(panels)}


def _point(own: Sequence[Row]) -> tuple[float, list[float]]:
    return 100 * share(own[0], True), [100 * row["relative"]["test"] for row in own]
