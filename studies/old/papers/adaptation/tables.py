"""Study `adaptation`: its tables."""

from collections.abc import Sequence
from statistics import fmean

from mergeflow.evaluation.averages import mean
from studies.lab.inputs import mean_accuracy
from studies.old.papers.adaptation.variants import NAMES, Variant, gains, static, values
from studies.old.results import Cell, Table, with_interval
from studies.old.rows import Row


def accuracy_table(rows: Sequence[Row], starts: Sequence[Row]) -> Table:
    """Return start and adapted accuracy of every variant, and the entropy before and after."""
    lines: list[dict[str, Cell]] = []
    for on in NAMES:
        scales = ", ".join(f"{row[on]['scale']:g}" for row in starts)
        entropy = fmean(mean(row[on]["entropy"]) for row in starts)
        lines.append(
            {
                "directions": NAMES[on],
                "coefficients": f"one ({scales})",
                "images": "",
                "test accuracy, %": with_interval(static(starts, on)),
                "gain, points": "",
                "entropy, nats": f"{entropy:.3f}",
                "learning rate": "",
            }
        )
        lines += [_line(rows, starts, variant, entropy) for variant in Variant.all() if variant.on == on]
    tuned = ", ".join(f"{row['cart_tuned']['scale']:g}" for row in starts)
    level = with_interval(static(starts, "cart_tuned"))
    lines.append(
        {
            "directions": "CART, λ from validation",
            "coefficients": f"one ({tuned})",
            "images": "",
            "test accuracy, %": level,
            "gain, points": "",
            "entropy, nats": "",
            "learning rate": "",
        }
    )
    individual = fmean(mean_accuracy(row["experts"]) for row in starts)
    return Table(f"Test accuracy of static merges and of what is adapted from them (experts {individual:.1f} %)", lines)


def _line(rows: Sequence[Row], starts: Sequence[Row], variant: Variant, before: float) -> dict[str, Cell]:
    own = variant.of(rows)
    return {
        "directions": NAMES[variant.on],
        "coefficients": f"per {variant.granularity}",
        "images": variant.images,
        "test accuracy, %": with_interval(values(rows, variant)),
        "gain, points": with_interval(gains(rows, starts, variant)),
        "entropy, nats": f"{before:.3f} → {fmean(mean(row['entropy']['test']) for row in own):.3f}",
        "learning rate": f"{own[0]['lr']:g}",
    }


def task_table(rows: Sequence[Row], starts: Sequence[Row]) -> Table:
    """Return accuracy per task of both starts and of the layer-wise variants on test images."""

    def line(task: str) -> dict[str, Cell]:
        cells: dict[str, Cell] = {"task": task}
        for on in NAMES:
            own = Variant(on, "layer", "test").of(rows)  # type: ignore[arg-type]
            cells[NAMES[on]] = f"{fmean(100 * row[on]['test'][task] for row in starts):.1f}"
            cells[f"{NAMES[on]}, adapted"] = with_interval([100 * row["test"][task] for row in own])
        cells["expert"] = f"{fmean(100 * row['experts'][task] for row in starts):.1f}"
        return cells

    tasks = starts[0]["experts"]
    return Table("Accuracy per task, %; adapted layer by layer on test images", [line(task) for task in tasks])


def rate_table(tried: Sequence[Row], rows: Sequence[Row]) -> Table:
    """Return validation accuracy over the steps at every learning rate, and which was chosen."""
    chosen = {(row["on"], row["granularity"]): row["lr"] for row in rows}
    lines: list[dict[str, Cell]] = [
        {
            "directions": NAMES[row["on"]],
            "coefficients": f"per {row['granularity']}",
            "learning rate": f"{row['lr']:g}",
            "validation accuracy over the steps, %": ", ".join(
                f"{value:.1f} ({step})" for step, value in row["course"].items()
            ),
            "chosen": "×" if chosen[row["on"], row["granularity"]] == row["lr"] else "",
        }
        for row in tried
    ]
    return Table("Learning rates, adapted on validation images, first seed", lines)


def level_table(levels: Sequence[Row]) -> Table:
    """Return accuracy and entropy on validation of the static merges around the chosen scale."""
    lines: list[dict[str, Cell]] = [
        {
            "merge": NAMES[row["on"]],
            "λ": f"{row['scale']:.3g}",
            "accuracy, %": f"{row['accuracy']:.1f}",
            "entropy, nats": f"{row['entropy']:.3f}",
        }
        for row in levels
    ]
    return Table("One λ for all experts: accuracy and entropy on validation, first seed", lines)


def memory_table(memory: Sequence[Row]) -> Table:
    """Return the most bytes that learning holds, by the number of tasks."""
    lines: list[dict[str, Cell]] = [
        {
            "tasks": row["tasks"],
            "directions": NAMES[row["on"]],
            "peak of tensors, MB": f"{row['peak'] / 1e6:.2f}",
            "all experts, MB": f"{row['tasks'] * row['model'] / 1e6:.1f}",
        }
        for row in memory
    ]
    return Table("A step with more tasks, layer-wise: bytes of tensors at once beyond base and images", lines)


def time_tables(rows: Sequence[Row], memory: Sequence[Row]) -> list[Table]:
    """Return the seconds of a step, by variant and by the number of tasks."""
    variants: list[dict[str, Cell]] = [
        {
            "directions": NAMES[v.on],
            "coefficients": f"per {v.granularity}",
            "images": v.images,
            "seconds a step": f"{fmean(row['seconds'] for row in v.of(rows)):.2f}",
        }
        for v in Variant.all()
    ]
    tasks: list[dict[str, Cell]] = [
        {"tasks": row["tasks"], "directions": NAMES[row["on"]], "seconds a step": f"{row['seconds']:.2f}"}
        for row in memory
    ]
    return [Table("Seconds of a step", variants), Table("Seconds of a step with more tasks, layer-wise", tasks)]
