"""What the studies of linearity share: rows of the kernel's results, their worst cases, paths of loss, figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.linearity.affine import DIRECTION, LENGTH, TRIVIAL, Linearity, combine
from mergeflow.modality import Examples, Model, State
from studies.old.results import with_interval
from studies.old.rows import Row, picked
from studies.old.verdicts import Verdict, within
from tasks.project.stage import StageIO

DIRECTION_RULE = f"worst 1 − cos ≤ {DIRECTION} of the baseline, where that is above {TRIVIAL}"
LENGTH_RULE = f"worst |median coef − 1| ≤ {LENGTH}"


@dataclass(frozen=True)
class TunedModels:
    """Models tuned from one start on some tasks; the control of a task are all the others.

    Attributes:
        model: What weights are loaded into.
        start: θ0.
        tuned: Task → θ_t.
        tests: Task → examples, or of a model of sequences what it is asked.
    """

    model: Model
    start: State
    tuned: Mapping[str, State]
    tests: Mapping[str, Any]

    def controls(self, task: str) -> list[str]:
        """Return all the other tasks."""
        return [other for other in self.tuned if other != task]


def rows_of(found: Mapping[str, Mapping[str, Linearity]], **known: Any) -> list[Row]:
    """Return one row for each combination and layer: means, the quartiles of 1 − cos and coef, and coef's median."""
    rows = []
    for name, layers in found.items():
        for number, (layer, one) in enumerate(layers.items()):
            low, high = np.quantile(one.distance, [0.25, 0.75])
            coef = np.quantile(one.coef, [0.25, 0.5, 0.75])
            rows.append(
                {
                    **known,
                    "combination": name,
                    "layer": layer,
                    "depth": number,
                    "samples": len(one.coef),
                    "distance": float(one.distance.mean()),
                    "distance_low": float(low),
                    "distance_high": float(high),
                    "base": float(one.base.mean()),
                    "coef_low": float(coef[0]),
                    "coef": float(coef[1]),
                    "coef_high": float(coef[2]),
                    "error": float(one.error.mean()),
                }
            )
    return rows


def worst_share(rows: Sequence[Row]) -> float:
    """Return the largest 1 − cos in shares of its baseline, over rows that the baseline can decide; NaN for none."""
    return max((row["distance"] / row["base"] for row in rows if row["base"] > TRIVIAL), default=math.nan)


def worst_length(rows: Sequence[Row]) -> float:
    """Return the largest |median coef − 1|."""
    return max(abs(row["coef"] - 1) for row in rows)


def by_seed(rows: Sequence[Row], **wanted: Any) -> dict[int, list[Row]]:
    """Return the rows with these values, by seed."""
    found: dict[int, list[Row]] = {}
    for row in picked(rows, **wanted):
        found.setdefault(row["seed"], []).append(row)
    return found


def direction(rows: Sequence[Row], **wanted: Any) -> tuple[str, Verdict]:
    """Return what was measured of the direction, and its verdict over seeds: undecided where no baseline decides."""
    values = [worst_share(own) for own in by_seed(rows, **wanted).values()]
    if any(map(math.isnan, values)):
        return f"no baseline above {TRIVIAL}", None
    return f"worst share {with_interval(values, 2)}", within(values, high=DIRECTION)


def length(rows: Sequence[Row], **wanted: Any) -> tuple[str, Verdict]:
    """Return what was measured of the length, and its verdict over seeds."""
    values = [worst_length(own) for own in by_seed(rows, **wanted).values()]
    return f"worst |median coef − 1| {with_interval(values, 2)}", within(values, high=LENGTH)


def mean_over(rows: Sequence[Row], value: str, **wanted: Any) -> list[float]:
    """Return the mean of a column over the rows with these values, one for each seed."""
    return [float(np.mean([row[value] for row in own])) for own in by_seed(rows, **wanted).values()]


def path_rows(
    model: Model,
    first: State,
    second: State,
    examples: Mapping[str, Examples],
    alphas: Sequence[float],
    **known: Any,
) -> list[Row]:
    """Return loss and accuracy of αθ_i + (1−α)θ_j on each task, a row for each α and task.

    Args:
        model: the network, whose weights are overwritten.
        first: θ_i.
        second: θ_j.
        examples: labelled examples by task.
        alphas: α; 1 is θ_i.
        known: what else is in every row, such as the seed.

    Returns:
        Rows with `alpha`, `on` (the task), `loss` and `accuracy` in percent.
    """
    rows = []
    for alpha in alphas:
        model.load(combine([first, second], [alpha, 1 - alpha]))
        loss, accuracy = losses(model, examples), accuracies(model, examples)
        rows += [
            {**known, "alpha": alpha, "on": task, "loss": loss[task], "accuracy": 100 * accuracy[task]}
            for task in examples
        ]
    return rows


def loss_gap(rows: Sequence[Row]) -> float:
    """Return how far a path is from linear mode connectivity: the larger of ends' difference and barrier, in nats.

    The barrier is max_α L(θ_α) − [α L(θ_i) + (1 − α) L(θ_j)].
    """
    loss = {row["alpha"]: row["loss"] for row in rows}
    ends = loss[1.0], loss[0.0]
    barrier = max(value - alpha * ends[0] - (1 - alpha) * ends[1] for alpha, value in loss.items())
    return max(abs(ends[0] - ends[1]), barrier)


def loss_gaps(rows: Sequence[Row], **wanted: Any) -> dict[int, dict[tuple[str, str], float]]:
    """Return by seed, then by (pair, D), how far the paths with these values are from linear mode connectivity."""
    found: dict[int, dict[tuple[str, str], float]] = {}
    for seed, own in by_seed(rows, **wanted).items():
        keys = dict.fromkeys((row["pair"], row["on"]) for row in own)
        found[seed] = {key: loss_gap([row for row in own if (row["pair"], row["on"]) == key]) for key in keys}
    return found


def samples_file(io: StageIO, name: object) -> Path:
    """Return where the samples of a piece are kept until the study is complete."""
    return io.scratch / "samples" / f"{name}.parquet"


def write_samples(found: Mapping[str, Mapping[str, Linearity]], path: Path) -> None:
    """Write one row for each combination, layer and sample, in float32."""
    columns: dict[str, list[Any]] = {key: [] for key in ("combination", "layer", "origin", *_VALUES)}
    for name, layers in found.items():
        for layer, one in layers.items():
            columns["combination"] += [name] * len(one.coef)
            columns["layer"] += [layer] * len(one.coef)
            columns["origin"] += one.origin.tolist()
            for key in _VALUES:
                columns[key].append(getattr(one, key).astype(np.float32))
    arrays = {key: np.concatenate(columns.pop(key)) for key in _VALUES}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({**columns, **arrays}), path)


def read_samples(path: Path) -> dict[str, dict[str, Linearity]]:
    """Return what `write_samples` wrote."""
    table = pq.read_table(path)
    names, layers = (np.array(table[key].to_pylist()) for key in ("combination", "layer"))
    origin = np.array(table["origin"].to_pylist())
    values = {key: table[key].to_numpy().astype(float) for key in _VALUES}
    found: dict[str, dict[str, Linearity]] = {}
    for name in dict.fromkeys(names.tolist()):
        for layer in dict.fromkeys(layers[names == name].tolist()):
            chosen = (names == name) & (layers == layer)
            own = {key: value[chosen] for key, value in values.items()}
            found.setdefault(name, {})[layer] = Linearity(**own, origin=origin[chosen])
    return found


_VALUES = ("distance", "coef", "error", "base")
