"""Study `adaptation`: its tidy rows, from which every finding and table can be computed, and its coefficients."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.old.papers.adaptation.variants import NAMES
from studies.old.rows import Row, tidy


def tidy_rows(
    rows: Sequence[Row],
    starts: Sequence[Row],
    tried: Sequence[Row],
    memory: Sequence[Row],
    levels: Sequence[Row],
    blind: Row,
) -> list[dict[str, Any]]:
    """Return the study's rows; `part` tells them apart.

    `merges` and `experts`: by seed and task, accuracy on test in % and entropy in nats. `coefficients`: every λ of what
    was adapted. `course`: of the first seed, mean accuracy of the first test images over the steps. `rates`: mean
    accuracy on validation over the steps of every rate, and whether the rate was chosen. `levels`: a λ for all experts.
    `labels`: with the labels as they are and moved, the coefficients, the loss of every step and the accuracy.
    `memory`: bytes of tensors by the number of tasks.

    Args: As of `result`.
    """
    return tidy(
        [
            *(one for row in starts for one in _start(row)),
            *(one for row in rows for one in (*_merge(row), *_coefficients(row), *_course(row))),
            *_rates(tried, rows, starts[0]["seed"]),
            *({"part": "levels", "seed": starts[0]["seed"], "images": "validation", **row} for row in levels),
            *_labels(blind),
            *({"part": "memory", **{name: row[name] for name in ("tasks", "on", "peak", "model")}} for row in memory),
        ]
    )


def _start(row: Row) -> list[Row]:
    own = {"part": "merges", "seed": row["seed"], "granularity": "static", "images": ""}
    found = [
        {**own, "on": on, "scale": row[on]["scale"], **one}
        for on in (*NAMES, "cart_tuned")
        for one in _by_task(row[on]["test"], row[on].get("entropy", {}))
    ]
    experts = {"part": "experts", "seed": row["seed"]}
    return [*found, *({**experts, **one} for one in _by_task(row["experts"], {}))]


def _merge(row: Row) -> list[Row]:
    own = {"part": "merges", **_adapted(row)}
    return [{**own, **one} for one in _by_task(row["test"], row["entropy"]["test"])]


def _adapted(row: Row) -> Row:
    return {name: row[name] for name in ("seed", "on", "granularity", "images", "lr")}


def _coefficients(row: Row) -> list[Row]:
    own = {"part": "coefficients", **_adapted(row)}
    return [{**own, **one} for one in _by_tensor(row["coefficients"])]


def _course(row: Row) -> list[Row]:
    return [{"part": "course", **_adapted(row), **look} for look in row["course"]]


def _by_tensor(coefficients: Row) -> list[Row]:
    return [
        {"task": task, "tensor": tensor, "coefficient": value}
        for task, tensors in coefficients.items()
        for tensor, value in tensors.items()
    ]


def _by_task(accuracy: Row, entropy: Row) -> list[Row]:
    return [{"task": task, "accuracy": 100 * value, "entropy": entropy.get(task)} for task, value in accuracy.items()]


def _rates(tried: Sequence[Row], rows: Sequence[Row], seed: int) -> list[Row]:
    chosen = {(row["on"], row["granularity"]): row["lr"] for row in rows}
    return [
        {
            "part": "rates",
            "seed": seed,
            **{name: row[name] for name in ("on", "granularity", "lr")},
            "images": "validation",
            "chosen": chosen[row["on"], row["granularity"]] == row["lr"],
            "step": int(step),
            "accuracy": value,
        }
        for row in tried
        for step, value in row["course"].items()
    ]


def _labels(blind: Row) -> list[Row]:
    found: list[Row] = []
    for labels, run in blind["runs"].items():
        own = {"part": "labels", "seed": blind["seed"], "labels": labels}
        found += [{**own, **one} for one in _by_task(run["accuracy"], {})]
        found += [{**own, "step": step, "loss": loss} for step, loss in enumerate(run["losses"])]
        found += [{**own, **one} for one in _by_tensor(run["coefficients"])]
    return found


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write every learned coefficient: directions, granularity, images, seed, task, tensor, λ."""
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["directions", "granularity", "images", "seed", "task", "tensor", "coefficient"])
        for row in rows:
            own = [row["on"], row["granularity"], row["images"], row["seed"]]
            table.writerows([*own, *one.values()] for one in _by_tensor(row["coefficients"]))
