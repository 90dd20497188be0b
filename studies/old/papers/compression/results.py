"""Study `compression`: its tables, findings, notes, and the numbers of its figure."""

from collections.abc import Sequence
from typing import Any

from studies.old.claims import judge, paired
from studies.old.papers.compression.figures import storage_figure
from studies.old.papers.compression.measured import (
    Sizes,
    counts,
    formula_bits,
    labels,
    of,
    relative,
    share,
    smallest,
)
from studies.old.papers.compression.tables import tables
from studies.old.results import Finding, StudyResult, with_interval
from studies.old.rows import Row, tidy
from studies.old.verdicts import all_hold, within

STORAGE = 0.25  # of all experts' bytes


def result(rows: Sequence[Row], tried: Sequence[Row], sizes: Sizes, ratio: float, target: float) -> StudyResult:
    """Return all that the study leaves in words and numbers.

    Args:
        rows: one per suite, seed and way of compressing.
        tried: one per suite, seed and threshold of TALL masks, with the accuracy on validation.
        sizes: the shape of every tensor.
        ratio: of CART-Indexing in the tables.
        target: the relative accuracy asked of the smallest rank.
    """
    found = findings(rows, ratio, target)
    return StudyResult(tables(rows, sizes, ratio), found, notes(rows, ratio), tidy_rows(rows, tried, sizes))


def tidy_rows(rows: Sequence[Row], tried: Sequence[Row], sizes: Sizes) -> list[dict[str, Any]]:
    """Return one row for each number of tasks, seed, way of compressing, split and task; `part` tells them apart.

    `suites`: accuracy in % of what is read out of the file and of the task's expert, and bytes: of the file, of its
    shared part, of one task's part, of what reading one task takes, of all experts, and of θ0, which may be needed
    beside it. `formula_bits` is a task's part by the paper's formula. `thresholds`: those of TALL masks.

    Args: As of `result`.
    """
    parts = ("file", "shared", "own", "one_task", "all_experts", "base", "needs_base")
    suites = [
        {
            "part": "suites",
            "seed": row["seed"],
            "tasks": row["tasks"],
            "kind": row["kind"],
            "rank_ratio": row["args"].get("rank_ratio"),
            "threshold": row["args"].get("threshold"),
            "file_share": share(row, False),
            "with_base_share": share(row, True),
            **{name: row[name] for name in parts},
            "formula_bits": formula_bits(row, sizes),
            "split": split,
            "task": task,
            "accuracy": 100 * value,
            "expert": 100 * row["experts"][split][task],
        }
        for row in rows
        for split in row["relative"]
        for task, value in row[split].items()
    ]
    thresholds = [
        {
            "part": "thresholds",
            **{name: row[name] for name in ("seed", "tasks", "threshold", "chosen")},
            "kind": "tall",
            "split": "validation",
            "task": task,
            "accuracy": 100 * value,
        }
        for row in tried
        for task, value in row["validation"].items()
    ]
    return tidy([*suites, *thresholds])


def findings(rows: Sequence[Row], ratio: float, target: float) -> list[Finding]:
    """Hold the papers' statements against the rows.

    Args:
        rows: as of `suite`, for each seed and number of tasks.
        ratio: the paper's rank ratio.
        target: the share of individual accuracy that is to be kept.
    """
    numbers = counts(rows)
    chosen = {count: smallest(rows, count, target) for count in numbers}
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
            ours=True,
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
        "ratio is 64ρ for a square matrix of any width (5.1 at 8 %), so a wider model does not bring a rank that grows "
        "with it nearer to a mask; what the width decides is a fixed rank, which beats a mask of such a matrix from "
        "M = 64k on. The printed break-even at M ≈ 1024 holds for k = 16, a ratio of 1.6 %. Other shapes differ.",
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
