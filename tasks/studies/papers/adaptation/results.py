"""Study `adaptation`: its tables, findings, notes, and the numbers of its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, Self, get_args

from mergeflow.evaluation.statistics import mean
from mergeflow.merging.matrices import is_matrix
from tasks.studies.adapting import NOT_WORSE, Direction, Granularity, Split
from tasks.studies.claims import judge, paired
from tasks.studies.inputs import mean_accuracy
from tasks.studies.papers.adaptation.figures import accuracy_figure, coefficient_figure, course_figure, memory_figure
from tasks.studies.pieces import Row
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval
from tasks.studies.rows import accuracy_rows

NAMES = {"task_vectors": "task arithmetic", "cart": "CART"}
_RULE = f"paired difference ≥ {NOT_WORSE} points (one test image in 500), as in `many_tasks`"


@dataclass(frozen=True)
class Variant:
    """What is learned, and on which images."""

    on: Direction
    granularity: Granularity
    images: Split

    @classmethod
    def all(cls) -> list[Self]:
        """Return every variant."""
        return [cls(*each) for each in product(get_args(Direction), get_args(Granularity), get_args(Split))]

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return f"{self.on}_{self.granularity}_{self.images}"

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return its rows, one per seed."""
        return [row for row in rows if all(row[name] == value for name, value in vars(self).items())]


def result(
    rows: Sequence[Row],
    starts: Sequence[Row],
    tried: Sequence[Row],
    memory: Sequence[Row],
    levels: Sequence[Row],
    blind: Row,
) -> StudyResult:
    """Return all that the study leaves in words and numbers."""
    tables = [
        accuracy_table(rows, starts),
        task_table(rows, starts),
        _rates(tried, rows),
        _levels(levels),
        _memory(memory),
    ]
    found = findings(rows, starts, memory, blind)
    return StudyResult(tables, found, notes(rows, starts, levels), tidy_rows(rows, starts))


def tidy_rows(rows: Sequence[Row], starts: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the accuracy of every start and of every adapted merge, by seed and task."""
    static = [
        {"seed": row["seed"], "on": on, "granularity": "static", "images": "", "lr": 0.0, "test": row[on]["test"]}
        for row in starts
        for on in NAMES
    ]
    return accuracy_rows([*static, *rows], ("seed", "on", "granularity", "images", "lr"), ("test",))


def values(rows: Sequence[Row], variant: Variant) -> list[float]:
    """Return a variant's mean test accuracy in %, one value per seed."""
    return [mean_accuracy(row["test"]) for row in variant.of(rows)]


def static(starts: Sequence[Row], on: str) -> list[float]:
    """Return the mean test accuracy of a static merge in %, one value per seed."""
    return [mean_accuracy(row[on]["test"]) for row in starts]


def gains(rows: Sequence[Row], starts: Sequence[Row], variant: Variant) -> list[float]:
    """Return adapted − start in points, one value per seed."""
    return [after - before for after, before in zip(values(rows, variant), static(starts, variant.on), strict=True)]


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


def _rates(tried: Sequence[Row], rows: Sequence[Row]) -> Table:
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


def _levels(levels: Sequence[Row]) -> Table:
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


def _memory(memory: Sequence[Row]) -> Table:
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


def findings(rows: Sequence[Row], starts: Sequence[Row], memory: Sequence[Row], blind: Row) -> list[Finding]:
    """Hold the papers' statements against the rows."""
    found = [_beats_start(rows, starts, on, granularity) for on, granularity in product(NAMES, get_args(Granularity))]
    layers = {v: paired(values(rows, v), values(rows, _wise(v, "task"))) for v in Variant.all() if _layer(v)}
    carts = {v: paired(values(rows, v), values(rows, _other(v))) for v in Variant.all() if v.on == "cart"}
    return [
        *found,
        judge(
            "C4",
            "Layer-wise coefficients are at least as good as task-wise ones.",
            {f"{NAMES[v.on]} on {v.images} images": gap for v, gap in layers.items()},
            _RULE,
            low=NOT_WORSE,
        ),
        judge(
            "C4",
            "AdaMerging on CART's directions is better than on task vectors.",
            {f"per {v.granularity}, {v.images} images": gap for v, gap in carts.items()},
            "paired difference ≥ 0",
            low=0,
        ),
        Finding(
            "C4",
            "Labels have no part: with every label moved to another image the coefficients are the same, bit for bit.",
            f"the same: {blind['same']}; accuracy {blind['accuracy']:.1f} % against the true labels, "
            f"{blind['accuracy of other labels']:.1f} % against the others",
            blind["same"],
            "equal bits; one seed decides it",
        ),
        _memory_finding(memory),
    ]


def _beats_start(rows: Sequence[Row], starts: Sequence[Row], on: str, granularity: str) -> Finding:
    variants = [v for v in Variant.all() if (v.on, v.granularity) == (on, granularity)]
    return judge(
        "C4",
        f"Adapted per {granularity} on {NAMES[on]}, a merge is at least as good as its static start.",
        {f"{v.images} images": gains(rows, starts, v) for v in variants},
        _RULE,
        low=NOT_WORSE,
    )


def _memory_finding(memory: Sequence[Row]) -> Finding:
    growth = {}
    for on in NAMES:
        own = sorted((row for row in memory if row["on"] == on), key=lambda row: int(row["tasks"]))
        growth[on] = (own[-1]["peak"] - own[0]["peak"]) / own[0]["model"]
    few, most = min(row["tasks"] for row in memory), max(row["tasks"] for row in memory)
    told = "; ".join(f"{NAMES[on]} {more:+.2f} models" for on, more in growth.items())
    return Finding(
        "C4",
        "Memory while learning does not depend on the number of tasks.",
        f"peak of {most} tasks − peak of {few} tasks: {told}",
        max(growth.values()) < 0.5,
        "growth below half a model; counted in bytes, the same for every seed",
        ours=True,
    )


def _layer(variant: Variant) -> bool:
    return variant.granularity == "layer"


def _wise(variant: Variant, granularity: Granularity) -> Variant:
    return Variant(variant.on, granularity, variant.images)


def _other(variant: Variant) -> Variant:
    return Variant("task_vectors", variant.granularity, variant.images)


def notes(rows: Sequence[Row], starts: Sequence[Row], levels: Sequence[Row]) -> list[str]:
    """Return what the tables do not say by themselves."""
    told = []
    for on in NAMES:
        own = [row for row in levels if row["on"] == on]
        best, surest = max(own, key=lambda row: row["accuracy"]), min(own, key=lambda row: row["entropy"])
        told.append(
            f"on {NAMES[on]} accuracy is best at λ = {best['scale']:.3g} ({best['accuracy']:.1f} %) and entropy least "
            f"at λ = {surest['scale']:.3g} ({surest['accuracy']:.1f} %)"
        )
    gaps = [
        fmean(values(rows, Variant(on, "layer", "validation"))) - fmean(values(rows, Variant(on, "layer", "test")))
        for on in get_args(Direction)
    ]
    return [
        "Entropy is not accuracy: a longer step along the same directions makes a model surer, right or wrong. With "
        f"one λ for all experts, {' and '.join(told)}.",
        "Adapting layer by layer on validation images instead of test images costs "
        f"{', '.join(f'{-gap:.1f} points ({name})' for gap, name in zip(gaps, NAMES.values(), strict=True))}.",
        "Layer by layer, mean λ by block, first to last: "
        + "; ".join(f"{', '.join(f'{value:.2f}' for value in depths(rows, on))} on {NAMES[on]}" for on in NAMES)
        + " (test images).",
        "Experts stay on disk and pass by one tensor at a time; CART's directions are written once, in low rank. "
        "Beside the merged model, its gradient and the activations of one batch, learning on CART keeps the mean. "
        "Time grows with the number of tasks, for every task's images go through the model.",
    ]


def depths(rows: Sequence[Row], on: str) -> list[float]:
    """Return the mean coefficient of each block's matrices, first block first, layer-wise on test images."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if (row["on"], row["granularity"], row["images"]) == (on, "layer", "test"):
            for tensors in row["coefficients"].values():
                for name, value in tensors.items():
                    if is_matrix(name, (2, 2), "attn_mlp") and name.endswith("weight"):
                        block = next(int(part) for part in name.split(".") if part.isdigit())
                        found.setdefault(block, []).append(value)
    return [fmean(found[block]) for block in sorted(found)]


def figures(rows: Sequence[Row], starts: Sequence[Row], memory: Sequence[Row]) -> dict[str, Any]:
    """Return the study's figures."""
    bars: dict[tuple[str, str, str], list[float]] = {
        (v.on, v.granularity, v.images): values(rows, v) for v in Variant.all()
    }
    first = [row for row in rows if row["course"]]
    return {
        "accuracy": accuracy_figure(bars, {on: static(starts, on) for on in NAMES}, NAMES),
        "coefficients": coefficient_figure(
            {NAMES[on]: [row["coefficients"] for row in Variant(on, "layer", "test").of(rows)] for on in NAMES}  # type: ignore[arg-type]
        ),
        "course": course_figure(first, NAMES),
        "memory": memory_figure(memory, NAMES),
    }
