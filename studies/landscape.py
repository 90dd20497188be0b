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

`texts_landscape` is the same with two pairs of real tasks on a pre-trained encoder (worlds/real-texts).

**Source.** MIMA, Section 5.3, Figures 7 and 12; the plane is that of Izmailov et al. 2018.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.modalities.classification import Subset
from studies.lab import Claim, Laboratory, Row, Section, Study, per_seed, select, table
from studies.lab.plots import contours, side_by_side
from studies.lab.rows import Samples, each, samples, steps
from studies.theory.landscape import Grid, angle_between, measure_grid, plane_through, valley
from tasks.plotting.drawing import FULL_WIDTH, dress, new_figure
from tasks.plotting.palette import INK, MUTED, SURFACE
from tasks.plotting.panels import place_labels

LEVELS = (0, 5, 10, 20, 30, 40, 50, 60, 80, 100)  # error in %
_LABELS = {"base": "θ0", "mean": "mean"}
Point = tuple[float, float]


class Options(Section):
    rounds: list[int] = Field(min_length=2)  # the N whose runs `mima_N` are read
    pairs: list[list[str]] = Field(min_length=1)  # which two tasks
    size: int = Field(ge=3)  # points along each side of the grid
    margin: float = Field(ge=0)  # room around the three models, as a share of their box
    images: int = Field(ge=1)  # validation images per task and point
    height: float = Field(gt=0, lt=1)  # what belongs to a valley, error above its smallest


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield for every pair of tasks, N and seed the plane's geometry (`plane`), its models and its `grid`.

    Accuracies are in %: of a `model` on test, of a point of the grid on validation. The merge of all tasks lies off the
    plane and has no place on it.
    """
    for pair in options.pairs:
        measured = partial(measure_plane, options=options, pair=pair)
        yield from lab.by_run([f"mima_{n}" for n in options.rounds], measured, name=f"{'_'.join(pair)}_")


def measure_plane(lab: Laboratory, run: str, seed: int, options: Options, pair: Sequence[str]) -> Iterator[Row]:
    experts, rounds = lab.run(run).experts(seed), len(lab.run(run).rounds(seed))
    first, second = (experts[task] for task in pair)
    plane = plane_through(lab.base, first, second)
    places = {"base": (0.0, 0.0), **{t: plane.coordinates(s)[0] for t, s in zip(pair, (first, second), strict=True)}}
    places["mean"] = tuple(np.mean([places[task] for task in pair], axis=0).tolist())
    grid = Grid.around(list(places.values()), options.size, options.margin)
    examples = {task: Subset.first(lab.examples("validation")[task], options.images) for task in pair}
    scorer = lab.scorer({})
    errors = measure_grid(plane, grid, lambda state: error_of(scorer.state(state, examples)))
    halfway = {name: (first[name] + second[name]) / 2 for name in first}
    merged = lab.scorer(experts).merge("average")
    about = {"seed": seed, "rounds": rounds, "pair": " – ".join(pair)}
    shape = geometry(grid, errors, [places[task] for task in pair], options.height)
    yield {"part": "plane", **about, **shape, "off": plane.coordinates(merged)[1]}
    models = {"base": lab.base, pair[0]: first, pair[1]: second, "mean": halfway, "merged": merged}
    for name, state in models.items():
        x, y = places.get(name, (None, None))
        for task, error in error_of(lab.accuracy(state, "test", pair)).items():
            point = {"model": name, "task": task, "x": x, "y": y, "accuracy": 100 * (1 - error)}
            yield {"part": "model", **about, **point}
    for task, values in errors.items():
        for x, y, error in grid.points(values):
            yield {"part": "grid", **about, "task": task, "x": x, "y": y, "accuracy": 100 * (1 - error)}


def geometry(grid: Grid, errors: Mapping[str, np.ndarray], places: Sequence[Point], height: float) -> dict[str, float]:
    """Return a plane in numbers.

    Returns:
        `angle` of the task vectors in degrees, their mean `length`; `turn` in degrees, `distance` and `overlap` of the
        valleys; `floor`, the smallest mean error of the two tasks on the grid.
    """
    first, second = errors.values()
    basin, two = valley(first, grid, height), valley(second, grid, height)
    length = float(np.mean([np.hypot(*place) for place in places]))
    return {
        "angle": angle_between(*places),
        "length": length,
        "turn": angle_between(basin.centre, two.centre),
        "distance": float(np.hypot(*np.subtract(basin.centre, two.centre))) / length,
        "overlap": basin.overlap(two),
        "floor": float(((first + second) / 2).min()),
    }


def error_of(accuracy: Mapping[str, float]) -> dict[str, float]:
    return {task: 1 - value for task, value in accuracy.items()}


# What the rows are asked


def series(rows: pd.DataFrame, pair: str, name: str) -> pd.DataFrame:
    """Return N × seed of a measure of the geometry, or of a model's mean test error on both tasks in %."""
    if name in ("base", "mean", "merged"):
        return 100 - per_seed(rows, "rounds", part="model", pair=pair, model=name)
    return per_seed(rows, "rounds", value=name, part="plane", pair=pair)


def pairs(rows: pd.DataFrame) -> dict[str, str]:
    """Return the pairs by their names in sentences."""
    return {pair.replace(" – ", " and "): pair for pair in rows.pair.drop_duplicates()}


def changes(name: str, rows: pd.DataFrame) -> Samples:
    return each(pairs(rows), lambda words: steps(series(rows, pairs(rows)[words], name)))


def mean_less_expert(rows: pd.DataFrame) -> Samples:
    """Return the test error of the mean of two experts less each expert's own, at the largest N."""
    last = select(rows, part="model", rounds=rows["rounds"].max())
    differences = {}
    for words, pair in pairs(rows).items():
        for task in pair.split(" – "):
            of_task = select(last, pair=pair, task=task)
            words_of = f"{words}, error on {task} less that of its expert"
            differences[words_of] = samples(of_task, model=task) - samples(of_task, model="mean")
    return differences


# fmt: off
def claims(options: Options) -> list[Claim]:
    many = max(options.rounds)
    to_next = "paired difference from each N to the next, for each pair of tasks,"

    def falls(says: str, name: str, unit: str, digits: int, ours: bool = False) -> Claim:
        return Claim("M5", says, partial(changes, name), high=0, of=to_next, unit=unit, digits=digits, ours=ours)

    return [
        falls("The angle between the task vectors shrinks as N grows.", "angle", "°", 1),
        falls("The valleys rotate towards each other: the angle between them, seen from θ0, shrinks.", "turn", "°", 1),
        falls("The minima move together: the distance of the valleys shrinks.", "distance", "", 2),
        Claim("M5", f"At N = {many} the two valleys are nearly parallel.",
              lambda rows: {words: series(rows, pair, "turn").iloc[-1] for words, pair in pairs(rows).items()},
              high=10, of="angle between the valleys, seen from θ0, at the largest N", unit="°",
              caveat="10° is ours; a plane has 9 × 9 points, on which a valley has 3 to 5"),
        Claim("M5", "The valleys become one shared basin: their overlap grows.", partial(changes, "overlap"),
              low=0, of=to_next, unit="", digits=2),
        Claim("M5", f"At N = {many} the average model lies within the shared basin, with a low error for both tasks.",
              mean_less_expert, high=5,
              of="test error of the mean of the two experts, which lies in the plane, less each expert's own"),
        falls("The error of the merged model falls on these tasks.", "merged", "points", 1),
        falls("The error of the mean of the two experts falls.", "mean", "points", 1, ours=True),
    ]
# fmt: on


def shape_table(rows: pd.DataFrame) -> pd.DataFrame:
    digits = {"angle": 1, "turn": 1, "distance": 2, "overlap": 2, "length": 2, "off": 2}
    return side_by_side(select(rows, part="plane"), ["pair", "rounds"], list(digits), digits)


def error_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return test errors of models; of an expert on its own task and on the other's; the grid's best on validation."""
    models = select(rows, part="model")
    expert = ~models.model.isin(["base", "mean", "merged"])
    kind = models.model.where(
        ~expert, np.where(models.model == models.task, "expert on its own", "expert on the other's")
    )
    errors = table(models.assign(kind=kind, error=100 - models.accuracy), ["pair", "rounds"], "kind", value="error")
    floor = select(rows, part="plane").assign(floor=100 * rows.floor)
    return pd.concat([errors, table(floor, ["pair", "rounds"], value="floor")], axis=1)


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    models = select(rows, part="model")
    errors = 100 - models[models.model == models.task].groupby("rounds").accuracy.mean()
    return [
        "At the smallest N the mean of two experts is a merge of these two tasks alone; the merge of all tasks lies "
        "off the plane and is not in the picture. With more rounds each expert holds the mean of all tasks, so that "
        "the errors of the two merges come closer. The price is in the experts: their own error is "
        f"{', '.join(f'{value:.1f} % (N = {n})' for n, value in errors.items())}."
    ]


# The planes of the first seed


def landscape_figure(pair: str, rows: pd.DataFrame) -> Figure:
    """Draw one row of panels per N: each task's error on the plane, and the mean of both."""
    of_pair = select(rows, pair=pair, seed=rows.seed.min())
    planes = list(select(of_pair, part="plane").sort_values("rounds").itertuples())
    points = {plane.rounds: select(of_pair, part="grid", rounds=plane.rounds) for plane in planes}
    spans = {n: float(np.ptp(grid.y) / np.ptp(grid.x)) for n, grid in points.items()}
    heights = [3.1 * max(span, 0.35) for span in spans.values()]
    figure = new_figure(FULL_WIDTH, sum(heights) + 0.9 * len(planes))
    axes = figure.subplots(len(planes), 3, squeeze=False, height_ratios=heights)
    places = {plane.rounds: _places(select(of_pair, part="model", rounds=plane.rounds)) for plane in planes}
    for line, plane in zip(axes, planes, strict=True):
        grids = {
            task: 100 - grid.pivot(index="y", columns="x", values="accuracy")
            for task, grid in points[plane.rounds].groupby("task", sort=False)
        }
        grids["mean of both"] = sum(grids.values()) / 2
        for number, (panel, (name, errors)) in enumerate(zip(line, grids.items(), strict=True)):
            title, y_label = f"N = {plane.rounds}, {plane.angle:.2g}°: {name}", "" if number else "y along v"
            dress(panel, title, "x along u", y_label, grid="both")
            contours(panel, errors, LEVELS, "%d %%")
            _models(panel, places[plane.rounds], pair, plane.angle)
    figure.draw_without_rendering()  # labels are placed on panels of their final size
    for line, plane in zip(axes, planes, strict=True):
        labels = {_LABELS.get(name, f"θ {name}"): place for name, place in places[plane.rounds].items()}
        ends = [np.array(places[plane.rounds][task]) for task in pair.split(" – ")]
        arrows = [(float(x), float(y)) for end in ends for x, y in np.linspace(0, 1, 40)[:, None] * end]
        for panel in line:
            place_labels(panel, labels, arrows)
    return figure


def _places(models: pd.DataFrame) -> dict[str, Point]:
    placed = models.dropna(subset=["x"]).drop_duplicates("model")
    return {name: (x, y) for name, x, y in placed[["model", "x", "y"]].itertuples(index=False)}


def _models(panel: Axes, places: Mapping[str, Point], pair: str, angle: float) -> None:
    """Draw the task vectors as arrows, the arc between them, and the models as points."""
    first, second = pair.split(" – ")
    arrow = {"arrowstyle": "-|>", "color": MUTED, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 3}
    for task in (first, second):
        panel.annotate("", places[task], places["base"], arrowprops=arrow)
    for place in places.values():
        panel.plot(*place, "o", color=INK, markersize=5.5, markeredgecolor=SURFACE, markeredgewidth=0.9)
    radius = 0.28 * float(np.hypot(*places[first]))
    turn = np.radians(np.linspace(0, angle, 30))
    panel.plot(radius * np.cos(turn), radius * np.sin(turn), color=INK, linewidth=1.0)


def figures(options: Options) -> dict[str, Callable[[pd.DataFrame], Figure]]:
    return {"_".join(pair): partial(landscape_figure, " – ".join(pair)) for pair in options.pairs}


STUDY = Study(
    options=Options,
    runs=lambda options: [f"mima_{n}" for n in options.rounds],
    splits=("validation", "test"),
    systems=("M5",),
    measure=measure,
    claims=claims,
    tables={
        "The plane of two task vectors": shape_table,
        "Test error, mean of the two tasks, %; of the grid's best point on validation": error_table,
    },
    figures=figures,
    notes=notes,
)

STUDIES = {"landscape": STUDY, "texts_landscape": STUDY}
