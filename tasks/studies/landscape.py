"""Study `landscape` (M5): do the valleys of two tasks turn towards each other when merging while tuning?

**Question.** Take the plane through the base and the experts of two tasks, and measure each task's error at every point
of it. With experts of N = 1, 4 and 16 rounds of merge and tune at the same budget: where are the two valleys, and
does the mean of the two experts lie in both?

**Method.** With τ_t = θ_t − θ0, u = τ_1/‖τ_1‖ and v = (τ_2 − ⟨τ_2, u⟩u)/‖·‖, the points are P(x, y) = θ0 + x u + y v
on a square grid around θ0, θ_1 and θ_2. Error is 1 − accuracy, on the grid that of a subsample of the validation
images, at θ0, θ_1, θ_2 and (θ_1 + θ_2)/2 that of the whole test sets. A task's *valley* is the part of the grid where
its error is within 5 points of the smallest. *Distance* is that of the valleys' centres as a share of
(‖τ_1‖ + ‖τ_2‖)/2, *overlap* is |A ∩ B| / |A ∪ B|, and *turn* is the angle between the directions in which the two
errors fall, each that of the least-squares plane through all its values. Experts of N > 1 rounds have all been averaged
with the experts of the other tasks too, so what the two share is not of these two alone.

**Source.** MIMA, Section 5.3, Figures 7 and 12; the plane is that of Izmailov et al. 2018.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import Field

from mergeflow.analysis.landscape import Grid, angle_between, descent, measure_grid, plane_through, valley
from mergeflow.evaluation.statistics import mean
from tasks.parameters import Section
from tasks.plotting.landscape import landscape_figure
from tasks.runner import StageIO
from tasks.studies.inputs import StudyInputs
from tasks.studies.pieces import Row, kept
from tasks.studies.results import Finding, StudyResult, Table, with_interval

STUDY = "landscape"


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


def run(io: StageIO) -> None:
    """Write `outputs/studies/landscape`."""
    inputs = StudyInputs(io)
    options = Options.model_validate(inputs.options(STUDY))
    pieces = [(pair, n, seed) for pair in options.pairs for n in options.rounds for seed in inputs.seeds]
    rows = []
    for done, (pair, n, seed) in enumerate(pieces):
        io.report("planes", done, len(pieces))
        name = f"{'_'.join(pair)}_{n}_{seed}"
        rows.append(kept(io, name, partial(measure, inputs, options, pair, n, seed)))
    result = StudyResult(tables(rows), findings(rows), notes(rows))
    result.write(io.out(f"outputs/studies/{STUDY}"), figures(rows))


def measure(inputs: StudyInputs, options: Options, pair: Sequence[str], rounds: int, seed: int) -> Row:
    """Return one plane: its grid and errors, where the models lie, and their errors on test."""
    trained = inputs.run(f"mima_{rounds}")
    first, second = (trained.expert(seed, task) for task in pair)
    plane = plane_through(inputs.base, first, second)
    places = {"base": (0.0, 0.0), **{t: plane.coordinates(s)[0] for t, s in zip(pair, (first, second), strict=True)}}
    places["mean"] = tuple(np.mean([places[task] for task in pair], axis=0).tolist())
    grid = Grid.around(list(places.values()), options.size, options.margin)
    images = {task: inputs.images("validation")[task].first(options.images) for task in pair}
    scorer = inputs.scorer({})
    errors = measure_grid(plane, grid, lambda state: error_of(scorer.state(state, images)))
    halfway = {name: (first[name] + second[name]) / 2 for name in first}
    models = {"base": inputs.base, pair[0]: first, pair[1]: second, "mean": halfway}
    return {
        "pair": list(pair),
        "rounds": rounds,
        "seed": seed,
        "xs": grid.xs.tolist(),
        "ys": grid.ys.tolist(),
        "errors": {task: values.tolist() for task, values in errors.items()},
        "places": places,
        "test": {name: error_of(inputs.accuracy(state, "test", pair)) for name, state in models.items()},
        **geometry(places, errors, grid, pair, options.height),
    }


def geometry(
    places: Mapping[str, tuple[float, float]],
    errors: Mapping[str, np.ndarray],
    grid: Grid,
    pair: Sequence[str],
    height: float,
) -> dict[str, float]:
    """Return a plane in numbers: `angle` of τ; `turn`, `distance`, `overlap` of the valleys; `floor` of the mean."""
    one, two = (valley(errors[task], grid, height) for task in pair)
    length = float(np.mean([np.hypot(*places[task]) for task in pair]))
    return {
        "angle": angle_between(places[pair[0]], places[pair[1]]),
        "turn": angle_between(*(descent(errors[task], grid) for task in pair)),
        "distance": float(np.hypot(*np.subtract(one.centre, two.centre))) / length,
        "overlap": one.overlap(two),
        "floor": float(((errors[pair[0]] + errors[pair[1]]) / 2).min()),
        "length": length,
    }


def error_of(accuracy: Mapping[str, float]) -> dict[str, float]:
    return {task: 1 - value for task, value in accuracy.items()}


def of(rows: Sequence[Row], pair: Sequence[str], rounds: int | None = None) -> list[Row]:
    """Return the rows of a pair, of one N or of all."""
    return [row for row in rows if row["pair"] == list(pair) and rounds in (None, row["rounds"])]


def series(rows: Sequence[Row], name: str) -> list[float]:
    """Return one measure per seed: of the geometry, or `MODEL` the mean test error of both tasks in %."""
    pair = rows[0]["pair"]
    by_name = {"first": pair[0], "second": pair[1], "base": "base", "mean": "mean"}
    if name in by_name:
        return [100 * mean(row["test"][by_name[name]]) for row in rows]
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
        }
        for pair, n in cells
    ]
    errors = [
        {
            "tasks": ", ".join(pair),
            "N": n,
            "θ0": with_interval(series(of(rows, pair, n), "base")),
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
    return [
        _falls(rows, "The angle between the task vectors shrinks as N grows.", "angle", "°", 1),
        _falls(
            rows,
            "The valleys turn towards each other: the angle between the falls of the two errors shrinks.",
            "turn",
            "°",
            1,
        ),
        _falls(rows, "The minima move together: the distance of the valleys shrinks.", "distance", "", 2),
        _falls(rows, "The valleys become one shared basin: their overlap grows.", "overlap", "", 2, sign=-1),
        _falls(rows, "The error of the mean of the two experts falls.", "mean", " %", 1),
    ]


def _falls(rows: Sequence[Row], claim: str, name: str, unit: str, digits: int, sign: int = 1) -> Finding:
    """Return a finding that holds where the mean over seeds falls (rises, for sign −1) from N to N for every pair."""
    told, holds = [], True
    for pair in _pairs(rows):
        values = {n: series(of(rows, pair, n), name) for n in _rounds(rows)}
        means = [sign * float(np.mean(one)) for one in values.values()]
        holds &= all(later < earlier for earlier, later in pairwise(means))
        numbers = ", ".join(f"{with_interval(one, digits)}{unit} (N = {n})" for n, one in values.items())
        told.append(f"{' and '.join(pair)}: {numbers}")
    return Finding("M5", claim, "; ".join(told) + ".", holds)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what the tables do not say by themselves."""
    sizes = len(rows[0]["xs"])
    spacing = np.mean([(row["xs"][1] - row["xs"][0]) / row["length"] for row in rows])
    return [
        f"The grid has {sizes} × {sizes} points, {spacing:.2f} ‖τ‖ apart; a valley's centre is a mean over its "
        "points and finer than that.",
    ]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw the planes of the first seed, one figure per pair."""
    seed = rows[0]["seed"]
    return {
        "_".join(pair): landscape_figure([row for row in of(rows, pair) if row["seed"] == seed])
        for pair in _pairs(rows)
    }


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["pair"][0], row["pair"][1]) for row in rows))


def _rounds(rows: Sequence[Row]) -> list[int]:
    return sorted({row["rounds"] for row in rows})
