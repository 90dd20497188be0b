"""The report's tables as plain values: the template prints them all in one way, and the script sorts them all."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mergeflow.checkpoints.fingerprint import short
from tasks.plotting.curves import is_number
from tasks.plotting.rows import base_row, model_name, task_title
from tasks.report.files import Json, RunFiles


@dataclass(frozen=True)
class Column:
    """A column's heading; `note` is shown on hover."""

    title: str
    numeric: bool = True
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        order: what sorting compares: a number, or a text.
        depth: strength of the background, 0 to 1.
    """

    text: str
    order: float | str
    strong: bool = False
    depth: float = 0.0
    note: str = ""
    badges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One row; `marked` rows stand out, `apart` rows are quiet: they are what the others are compared with."""

    cells: list[Cell]
    marked: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its caption; `foot` stays at the bottom whatever the order; depth is a bar where `bars`."""

    caption: str
    columns: list[Column]
    rows: list[Row]
    foot: list[str] | None = None
    bars: bool = False


def results_table(run: RunFiles) -> Table:
    """Return test accuracy per model and task; the best merge of each column in bold, the winner's row marked."""
    tasks, rows = run.test["tasks"], run.test["rows"]
    merged = [row for row in rows if row["name"] in run.selection["methods"]]
    base, experts = base_row(rows)["accuracy"], {row["name"]: row for row in rows}["individual"]["accuracy"]
    best = {task: max(row["accuracy"][task] for row in merged) for task in tasks}
    summary = {key: max(row[key] for row in merged) for key in ("mean", "normalised")}
    examples = run.test["examples"]
    columns = [
        Column("model", numeric=False),
        Column("chosen on validation", numeric=False),
        *(Column(task_title(run.test, task), note=f"on {examples[task]} test examples") for task in tasks),
        Column("mean", note="mean of the tasks"),
        Column("normalised", note="mean over the tasks of accuracy divided by the expert's accuracy"),
    ]
    made = []
    for row in rows:
        competes = row in merged
        cells = [_model_cell(run, row["name"]), Cell(arguments_text(row["args"]), arguments_text(row["args"]))]
        for task in tasks:
            value = row["accuracy"][task]
            share = _share(value, base[task], experts[task])
            note = f"{_percent(value / experts[task])} % of the expert" if experts[task] else ""
            cells.append(_accuracy(value, competes and value == best[task], share if competes else 0.0, note))
        cells += [_accuracy(row[key], competes and row[key] == summary[key]) for key in summary]
        made.append(Row(cells, marked=row["name"] == run.test["winner"], apart=not competes))
    return Table("Test accuracy in %", columns, made)


def candidates_table(run: RunFiles, method: str) -> Table:
    """Return every candidate of a method with its accuracies on validation; the chosen one marked."""
    rows, tasks = run.sweeps[method]["candidates"], run.selection["tasks"]
    chosen = run.selection["methods"][method]["args"]
    names = list(rows[0]["args"])
    best = max(row["normalised"] for row in rows)
    columns = [Column(name, numeric=all(is_number(row["args"][name]) for row in rows)) for name in names]
    columns += [Column(task_title(run.test, task)) for task in tasks] + [Column("mean"), Column("normalised")]
    made = [
        Row(
            [_argument_cell(row["args"][name]) for name in names]
            + [_accuracy(row["accuracy"][task]) for task in tasks]
            + [_accuracy(row["mean"]), _accuracy(row["normalised"], row["normalised"] == best)],
            marked=row["args"] == chosen,
        )
        for row in rows
    ]
    return Table(f"{method}: validation accuracy in %", columns, made)


def lineage_table(run: RunFiles) -> Table:
    """Return where the winner comes from: per task its examples, its expert, and how far that went from the base."""
    columns = [
        Column("task", numeric=False),
        Column("source", numeric=False),
        Column("train", note="examples"),
        Column("validation", note="examples"),
        Column("test", note="examples"),
        Column("steps", note="optimiser steps of the expert"),
        Column("expert, validation %"),
        Column("distance %", note="norm of the task vector over the norm of the base's weights"),
        Column("expert's fingerprint", numeric=False, note="a digest of the tensors"),
    ]
    return Table("The experts that were merged", columns, [_lineage_row(run, task) for task in run.selection["tasks"]])


def cost_table(run: RunFiles) -> Table:
    """Return the cost of each stage's last run, in the order in which they started.

    The throughput is shown where a stage has trained, GPU seconds where a device was.
    """
    longest = max(record["seconds"] for record in run.costs) or 1.0
    optional = {
        "gpu_seconds": Column("GPU seconds", note="time on a CUDA device"),
        "examples_per_second": Column("examples / s", note="training throughput"),
    }
    trained: dict[str, Json] = {record["stage"]: record.get("training") or {} for record in run.costs}
    shown = {key: column for key, column in optional.items() if any(record.get(key) for record in trained.values())}
    memory = "largest resident size so far of the process that ran the stage"
    columns = [Column("stage", numeric=False), Column("started, UTC"), Column("seconds"), *shown.values()]
    columns.append(Column("peak memory, MiB", note=memory))
    rows = [
        Row(
            [
                Cell(record["stage"], record["stage"]),
                Cell(f"{datetime.fromtimestamp(record['started'], UTC):%H:%M:%S}", record["started"]),
                Cell(f"{record['seconds']:.1f}", record["seconds"], depth=round(record["seconds"] / longest, 3)),
                *(_measured(trained[record["stage"]].get(key)) for key in shown),
                Cell(f"{record['peak_memory_mib']}", record["peak_memory_mib"]),
            ]
        )
        for record in run.costs
    ]
    sums = {
        "seconds": sum(record["seconds"] for record in run.costs),
        "gpu_seconds": sum(record.get("gpu_seconds") or 0.0 for record in trained.values()),
    }
    foot = ["all stages", "", f"{sums['seconds']:.1f}"]
    foot += [f"{sums[key]:.1f}" if key in sums else "" for key in shown]
    foot.append(f"{max(record['peak_memory_mib'] for record in run.costs)}")
    return Table("Cost of each stage", columns, rows, foot, bars=True)


def gates_table(decision: Json) -> Table:
    columns = [Column("gate", numeric=False), Column("answer", numeric=False), Column("reason", numeric=False)]
    rows = []
    for gate in decision.get("gates", ()):
        answer = "passed" if gate["passed"] else "failed"
        texts = (gate["name"], answer, gate["reason"])
        rows.append(Row([Cell(text, text, strong=text == "failed") for text in texts]))
    return Table("The gates and their answers", columns, rows)


def arguments_text(args: Mapping[str, Any]) -> str:
    """Return arguments as a reader writes them.

    Example:
        >>> arguments_text({"rank_ratio": 0.08, "scale": 1.5})
        'rank_ratio 0.08, scale 1.5'
    """
    return ", ".join(f"{name} {_value_text(value)}" for name, value in args.items())


def _model_cell(run: RunFiles, name: str) -> Cell:
    edges = run.selection["methods"].get(name, {}).get("at_grid_edge", [])
    note = f"{' and '.join(edges)} at the edge of the values tried: a better one may be outside" if edges else ""
    badges = ("winner",) * (name == run.test["winner"]) + ("grid edge",) * bool(edges)
    return Cell(model_name(name), name, note=note, badges=badges)


def _lineage_row(run: RunFiles, task: str) -> Row:
    expert, splits = run.experts.get(task, {}), run.manifests.get(task, {}).get("splits", {})
    source = str(run.params.get("tasks", {}).get(task, ""))
    counts = [splits.get(split, {}).get("count") for split in ("train", "validation", "test")]
    counts = [counts[0] or expert.get("examples"), counts[1], counts[2] or run.test["examples"].get(task)]
    distance = (run.geometry or {}).get("relative_norm", {}).get(task)
    fingerprint = str(expert.get("fingerprint", ""))
    return Row(
        [
            Cell(task, task),
            Cell(source, source),
            *(_absent() if n is None else Cell(f"{n}", n) for n in [*counts, expert.get("steps")]),
            _accuracy(run.selection["individual"][task]),
            _absent() if distance is None else Cell(f"{100 * distance:.2f}", distance),
            Cell(short(fingerprint), fingerprint, note=fingerprint) if fingerprint else _absent(),
        ]
    )


def _accuracy(value: float, strong: bool = False, depth: float = 0.0, note: str = "") -> Cell:
    return Cell(_percent(value), value, strong, round(depth, 3), note)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _share(value: float, low: float, high: float) -> float:
    """Return how far from the base to the expert a value lies, in [0, 1]."""
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0


def _measured(value: float | None) -> Cell:
    return Cell(f"{value:.1f}", value) if value else _absent()


def _absent() -> Cell:
    return Cell("–", -1)


def _argument_cell(value: Any) -> Cell:
    return Cell(_value_text(value), value if is_number(value) else str(value))


def _value_text(value: Any) -> str:
    return f"{value:g}" if is_number(value) else str(value).lower() if isinstance(value, bool) else str(value)
