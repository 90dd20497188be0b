"""Study `landscape` (M5): do the valleys of two tasks turn towards each other when merging while tuning?

**Question.** Take the plane through the base and the experts of two tasks, and measure each task's error at every point
of it. With experts of N = 1, 4 and 8 rounds of merge and tune at the same budget: where are the two valleys, and does
the mean of the two experts lie in both?

**Method.** With τ_t = θ_t − θ0, u = τ_1/‖τ_1‖ and v = (τ_2 − ⟨τ_2, u⟩u)/‖·‖, the points are P(x, y) = θ0 + x u + y v on
a grid around θ0, θ_1 and θ_2. Error is 1 − accuracy, on the grid that of a subsample of the validation images, at named
models that of the whole test sets. A task's *valley* is the part of the grid where its error is within 5 points of the
smallest, its *centre* the mean of these points. *Turn* is the angle between the two centres seen from θ0, *distance*
that between them as a share of (‖τ_1‖ + ‖τ_2‖)/2, *overlap* |A ∩ B| / |A ∪ B|. The merged model is the mean of the
experts of all tasks; it lies off the plane, which holds the mean of the two. The paper's pairs are (Cars, RESISC45) and
(DTD, SUN397), its N 1, 4 and 8. Each grid is fitted to its own three models, so that it is narrower where they lie
closer together: part of what turn and distance lose with N is that. ± is over seeds: the order of the batches.

**Source.** MIMA, Section 5.3, Figures 7 and 12; the plane is that of Izmailov et al. 2018.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from mergeflow.evaluation.averages import mean
from mergeflow.merging import configure
from mergeflow.modalities.subset import Subset
from studies.lab.inputs import Laboratory
from studies.old.claims import judge, steps_between
from studies.old.papers.landscape.figures import landscape_figure
from studies.old.papers.landscape.rows import tidy_rows
from studies.old.pieces import kept_all
from studies.old.results import Finding, StudyResult, Table, with_interval
from studies.old.rows import Row
from studies.theory.landscape import Grid, angle_between, measure_grid, plane_through, valley
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    rounds: the N whose runs `mima_N` are read. pairs: which two tasks. size: points along each side of the grid.
    margin: room around the three models, as a share of their box. images: validation images per task and point.
    height: what belongs to a valley, error above its smallest.
    """

    rounds: list[int] = Field(min_length=2)
    pairs: list[list[str]] = Field(min_length=1)
    size: int = Field(ge=3)
    margin: float = Field(ge=0)
    images: int = Field(ge=1)
    height: float = Field(gt=0, lt=1)


DECLARED = Declaration(
    Options, runs=lambda options: [f"mima_{n}" for n in options.rounds], splits=("validation", "test"), systems=("M5",)
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/landscape`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    measures = {
        f"{'_'.join(pair)}_{n}_{seed}": partial(measure, inputs, options, pair, n, seed)
        for pair in options.pairs
        for n in options.rounds
        for seed in _seeds(inputs, n)
    }
    rows = [{**row, **geometry(row, options.height)} for row in kept_all(io, measures, "planes")]
    result = StudyResult(tables(rows), findings(rows), notes(rows), tidy_rows(rows))
    result.write(io, figures(rows))


def measure(inputs: Laboratory, options: Options, pair: Sequence[str], rounds: int, seed: int) -> Row:
    """Return one plane: its grid and errors, where the models lie, and their errors on test.

    Args:
        inputs: the study's inputs.
        options: its choices.
        pair: the two tasks whose experts span the plane with the base.
        rounds: N of the run.
        seed: of the run.
    """
    experts = inputs.run(f"mima_{rounds}").experts(seed)
    first, second = (experts[task] for task in pair)
    plane = plane_through(inputs.base, first, second)
    places = {"base": (0.0, 0.0), **{t: plane.coordinates(s)[0] for t, s in zip(pair, (first, second), strict=True)}}
    places["mean"] = tuple(np.mean([places[task] for task in pair], axis=0).tolist())
    grid = Grid.around(list(places.values()), options.size, options.margin)
    examples = {task: Subset.first(inputs.examples("validation")[task], options.images) for task in pair}
    scorer = inputs.scorer({})
    errors = measure_grid(plane, grid, lambda state: error_of(scorer.state(state, examples)))
    halfway = {name: (first[name] + second[name]) / 2 for name in first}
    merged = inputs.scorer(experts).merge(configure("average"))
    models = {"base": inputs.base, pair[0]: first, pair[1]: second, "mean": halfway, "merged": merged}
    return {
        "pair": list(pair),
        "rounds": rounds,
        "seed": seed,
        "xs": grid.xs.tolist(),
        "ys": grid.ys.tolist(),
        "errors": {task: values.tolist() for task, values in errors.items()},
        "places": places,
        "off": plane.coordinates(merged)[1],
        "test": {name: error_of(inputs.accuracy(state, "test", pair)) for name, state in models.items()},
    }


def geometry(row: Row, height: float) -> dict[str, float]:
    """Return a plane in numbers.

    Returns:
        `angle` of the task vectors in degrees, their mean `length`; `turn` in degrees, `distance` and `overlap` of the
        valleys; `floor`, the smallest mean error of the two tasks on the grid.
    """
    grid = Grid(np.array(row["xs"]), np.array(row["ys"]))
    first, second = (np.array(row["errors"][task]) for task in row["pair"])
    one, two = valley(first, grid, height), valley(second, grid, height)
    places = [row["places"][task] for task in row["pair"]]
    length = float(np.mean([np.hypot(*place) for place in places]))
    return {
        "angle": angle_between(*places),
        "length": length,
        "turn": angle_between(one.centre, two.centre),
        "distance": float(np.hypot(*np.subtract(one.centre, two.centre))) / length,
        "overlap": one.overlap(two),
        "floor": float(((first + second) / 2).min()),
    }


def error_of(accuracy: Mapping[str, float]) -> dict[str, float]:
    return {task: 1 - value for task, value in accuracy.items()}


def of(rows: Sequence[Row], pair: Sequence[str], rounds: int | None = None) -> list[Row]:
    """Return the rows of a pair, of one N or of all.

    Args:
        rows: as of `measure`.
        pair: the two tasks.
        rounds: N; None for all.
    """
    return [row for row in rows if row["pair"] == list(pair) and rounds in (None, row["rounds"])]


def series(rows: Sequence[Row], name: str) -> list[float]:
    """Return one measure per seed: one of the geometry, or a model's mean test error on both tasks in %."""
    if name in rows[0]["test"]:
        return [100 * mean(row["test"][name]) for row in rows]
    return [row[name] for row in rows]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return what the planes measure, and the errors of the models on them."""
    cells = [(pair, n) for pair in _pairs(rows) for n in _rounds(rows)]
    shapes = [
        {
            "tasks": ", ".join(pair),
            "N": n,
            "angle of the τ, °": with_interval(series(of(rows, pair, n), "angle")),
            "turn, °": with_interval(series(of(rows, pair, n), "turn")),
            "distance of the valleys": with_interval(series(of(rows, pair, n), "distance"), 2),
            "overlap": with_interval(series(of(rows, pair, n), "overlap"), 2),
            "mean ‖τ‖": with_interval(series(of(rows, pair, n), "length"), 2),
            "merged model off the plane": with_interval(series(of(rows, pair, n), "off"), 2),
        }
        for pair, n in cells
    ]
    errors = [
        {
            "tasks": ", ".join(pair),
            "N": n,
            "θ0": with_interval(series(of(rows, pair, n), "base")),
            "merged model": with_interval(series(of(rows, pair, n), "merged")),
            "mean of both experts": with_interval(series(of(rows, pair, n), "mean")),
            "best point of the grid (validation)": with_interval(
                [100 * value for value in series(of(rows, pair, n), "floor")]
            ),
            "each expert on its own task": with_interval(
                [50 * sum(row["test"][task][task] for task in pair) for row in of(rows, pair, n)]
            ),
            "each expert on the other's": with_interval(
                [50 * (row["test"][pair[0]][pair[1]] + row["test"][pair[1]][pair[0]]) for row in of(rows, pair, n)]
            ),
        }
        for pair, n in cells
    ]
    return [Table("The plane of two task vectors", shapes), Table("Test error, mean of the two tasks, %", errors)]  # type: ignore[arg-type]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the planes of all seeds."""
    many = _rounds(rows)[-1]
    return [
        _falls(rows, "The angle between the task vectors shrinks as N grows.", "angle", "°", 1),
        _falls(
            rows,
            "The valleys rotate towards each other: the angle between them, seen from θ0, shrinks.",
            "turn",
            "°",
            1,
        ),
        _falls(rows, "The minima move together: the distance of the valleys shrinks.", "distance", "", 2),
        judge(
            "M5",
            f"At N = {many} the two valleys are nearly parallel.",
            {" and ".join(pair): series(of(rows, pair, many), "turn") for pair in _pairs(rows)},
            "angle between the valleys, seen from θ0, ≤ 10° at the largest N",
            high=10,
            unit="°",
        ),
        _falls(rows, "The valleys become one shared basin: their overlap grows.", "overlap", "", 2, sign=-1),
        judge(
            "M5",
            f"At N = {many} the average model lies within the shared basin, with a low error for both tasks.",
            {
                f"{' and '.join(pair)}, error on {task} less that of its expert": [
                    100 * (row["test"]["mean"][task] - row["test"][task][task]) for row in of(rows, pair, many)
                ]
                for pair in _pairs(rows)
                for task in pair
            },
            "test error of the mean of the two experts, which lies in the plane, less each expert's own, ≤ 5 points",
            high=5,
        ),
        _falls(rows, "The error of the merged model falls on these tasks.", "merged", " points", 1),
        _falls(rows, "The error of the mean of the two experts falls.", "mean", " points", 1, ours=True),
    ]


def _falls(
    rows: Sequence[Row], claim: str, name: str, unit: str, digits: int, sign: int = 1, ours: bool = False
) -> Finding:
    """Return a finding that holds where a measure falls (rises, for sign −1) from N to N for every pair."""
    steps = {
        f"{' and '.join(pair)}, {step}": changes
        for pair in _pairs(rows)
        for step, changes in steps_between({n: series(of(rows, pair, n), name) for n in _rounds(rows)}).items()
    }
    low, high, word = (-math.inf, 0.0, "≤") if sign > 0 else (0.0, math.inf, "≥")
    rule = f"paired difference from each N to the next {word} 0, for each pair of tasks"
    return judge("M5", claim, steps, rule, low=low, high=high, unit=unit, digits=digits, ours=ours)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what decides what was seen, and what the pictures do not show."""
    numbers = _rounds(rows)
    few, many = ([row for row in rows if row["rounds"] == n] for n in (numbers[0], numbers[-1]))
    apart = [np.hypot(*np.subtract(*(r["places"][t] for t in r["pair"]))) / r["length"] for r in many]
    own = {
        n: 50 * np.mean([sum(r["test"][t][t] for t in r["pair"]) for r in rows if r["rounds"] == n]) for n in numbers
    }
    return [
        f"At N = {numbers[0]} the mean of two experts is a merge of these two tasks alone; its error is "
        f"{_mean(few, 'mean'):.1f} %, that of the merge of all tasks {_mean(few, 'merged'):.1f} %. The merge of all "
        f"tasks lies {_mean(few, 'off'):.2f} off the plane and is not in the picture. With more rounds each expert "
        f"holds the mean of all tasks and the two errors come closer: {_mean(many, 'mean'):.1f} and "
        f"{_mean(many, 'merged'):.1f} % at N = {numbers[-1]}.",
        f"At N = {numbers[-1]} the experts of a pair lie {float(np.mean(apart)):.3f} ‖τ‖ apart (`alignment` has the "
        f"lengths). The price is in the experts: their own error is {_listed(own)}.",
    ]


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean(series(rows, name)))


def _listed(values: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.1f} % (N = {n})" for n, value in values.items())


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw the planes of the first seed, one figure per pair."""
    seed = rows[0]["seed"]
    return {
        "_".join(pair): landscape_figure([row for row in of(rows, pair) if row["seed"] == seed])
        for pair in _pairs(rows)
    }


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["pair"][0], row["pair"][1]) for row in rows))


def _seeds(inputs: Laboratory, rounds: int) -> list[int]:
    return inputs.run(f"mima_{rounds}").seeds


def _rounds(rows: Sequence[Row]) -> list[int]:
    return sorted({row["rounds"] for row in rows})
