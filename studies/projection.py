"""Study `projection` (G8): where do the merges of every method and the iterative trajectory lie?

**Question.** Seen on a plane, the paper finds merges by TIES and by Breadcrumbs close to each other, one by DARE apart,
and the trajectory of iterative merging ends elsewhere, at a lower loss. Is it so, and is it so off the plane?

**Method.** For each seed: the base, experts tuned once, the merge of these experts by every method of the catalog that
needs no data (its own default arguments; its scale from validation, first seed, ¼ to 2 times the default), the merged
model after each round of the iterative runs, and a jointly trained model. All training has the same budget. With
G = ⟨θ_i − θ̄, θ_j − θ̄⟩ = U Λ Uᵀ the coordinates are U √Λ; distances ‖θ_i − θ_j‖ and cosines of θ − θ0 are those of the
whole space. Planes are fitted without the other methods, and once without DARE too. The size of DARE's mask can be told
beforehand: E ‖θ_DARE − θ_TA‖² = λ² p/(1 − p) Σ_t ‖τ_t‖² for the same λ and drop p. The mask is at right angles to the
merges without one, so that a component of a plane that DARE is fitted to is its mask: read the whole space.
Two merges share a basin where no barrier lies between them: with L the mean loss over tasks, B(a, b) is the largest of
L((1 − s) θ_a + s θ_b) − (1 − s) L(θ_a) − s L(θ_b) over s = ¼, ½, ¾.
The findings on DARE, TIES and Breadcrumbs compare these and task arithmetic alone: methods that keep few directions
lie further from all others than DARE does. Where a scale is ¼ or 2 times the default, one beyond may do better.
Test accuracy and loss are those of the first images of every task. ± is over seeds: the order of the batches.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 5.3 and Figure 4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, groupby
from math import dist, sqrt
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field, field_validator
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure, methods
from mergeflow.modalities.classification import Subset
from mergeflow.modality import Examples
from mergeflow.search.candidates import best_on_line, line, score_all
from studies.lab import Claim, Laboratory, Row, Section, Study, select
from studies.lab.claims import needs, with_interval
from studies.lab.inputs import State, mean_accuracy
from studies.lab.plots import side_by_side
from studies.lab.rows import Samples
from studies.theory.landscape import centred_gram, cosines_from, distances, principal_coordinates
from tasks.plotting.drawing import FULL_WIDTH, dress, new_figure, panels, plain, series_style
from tasks.plotting.palette import GRID, INK, SERIES, SURFACE
from tasks.plotting.panels import numbered, place_labels

AGAINST = "task_arithmetic"  # what DARE is, but for its mask
BETWEEN = (0.25, 0.5, 0.75)  # where on the line between two merges a barrier is looked for
PAIR = ("ties", "breadcrumbs")
OTHERS = ("task_arithmetic", "ties", "breadcrumbs", "dare")  # the methods that the paper names, and their plain sum
COMPARED = ("average", *OTHERS)  # what the planes show: the paper does not say what Figure 4 is fitted to


class Options(Section):
    one_shot: str  # the run whose experts are merged
    paths: list[str] = Field(min_length=1)  # the iterative runs
    joint: str  # the joint run
    factors: list[float] = Field(min_length=1)  # of a method's default scale, tried on validation
    images: int = Field(ge=1)  # per task, of validation for that choice and of test for the accuracies
    drops: list[float]  # of DARE, compared with what is expected
    methods: list[str] = Field(default_factory=list)  # which are merged; without any, all that need no data

    @field_validator("methods")
    @classmethod
    def _compared(cls, names: list[str]) -> list[str]:
        missing = [name for name in OTHERS if name not in names]
        wrong = [name for name in names if name not in methods() or methods()[name].given]
        if names and (missing or wrong):
            raise ValueError(
                f"found {', '.join(names)}; expected methods of the catalog that need no data, "
                f"{', '.join(OTHERS)} among them: the findings compare these"
            )
        return names


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield for each seed its models (`model`), every two of them (`pair`), DARE's `drop`, and distances of `seeds`.

    `model`: its kind (base, expert, merge, random merge, round, joint), scale, length, and where it was scored its
    accuracy in % and loss. `pair`: the distance, the cosine of the moves from the base, and of two merges that the
    paper names the barrier between them, in nat.
    """
    chosen = lab.cached({"scales": partial(choose_scales, lab, options)})
    scales = {row["method"]: row["scale"] for row in chosen}
    yield from lab.by_seed(partial(measure_seed, lab, options, scales))
    yield from lab.cached({"across": partial(measure_across, lab, options, scales)})


def mergeable(experts: int) -> list[str]:
    """Return the methods that merge this many experts and take no data."""
    return [
        name
        for name, method in methods().items()
        if not method.given and method.experts[0] <= experts <= (method.experts[1] or experts)
    ]


def choose_scales(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield each method's best scale on a subsample of the validation images, with the first seed's experts."""
    blind = lab.blind()
    scorer = blind.scorer(lab.run(options.one_shot).experts(lab.seeds[0]))
    examples = {task: Subset.first(data, options.images) for task, data in blind.examples("validation").items()}
    for name in options.methods or mergeable(len(lab.tasks)):
        default = configure(name).scale
        tried = line("scale", sorted(default * factor for factor in options.factors), default)
        scored = score_all(name, tried, lambda call: scorer.state(scorer.merge(call), examples), mean)
        yield {"method": name, "scale": best_on_line(scored, "scale").varied["scale"]}


def measure_seed(lab: Laboratory, options: Options, scales: Mapping[str, float], seed: int) -> Iterator[Row]:
    experts = lab.run(options.one_shot).experts(seed)
    scorer = lab.scorer(experts)
    merges = {name: scorer.merge(name, scale=scale) for name, scale in scales.items()}
    paths = [path_of(lab, run, seed) for run in options.paths]
    rounds = {name: state for states in paths for name, state in states.items()}
    joint = {options.joint: lab.run(options.joint).model(seed)}
    points = {"base": lab.base, **experts, **merges, **rounds, **joint}
    random = [name for name in merges if "seed" in methods()[name].args.model_fields]
    kinds = {"base": "base", **dict.fromkeys(experts, "expert"), **dict.fromkeys(merges, "merge")}
    kinds |= dict.fromkeys(random, "random merge") | dict.fromkeys(rounds, "round") | {options.joint: "joint"}
    examples = {task: Subset.first(data, options.images) for task, data in lab.examples("test").items()}
    scored = ["base", *merges, options.joint, *(list(states)[-1] for states in paths)]
    loss = {name: total_loss(lab, points[name], examples) for name in scored}
    accuracy = {name: mean_accuracy(scorer.state(points[name], examples)) for name in scored}
    gram, names = centred_gram(points), list(points)
    apart = pd.DataFrame(distances(gram), names, names)
    cosines = pd.DataFrame(cosines_from(gram, 0), names, names).astype(object)
    cosines["base"] = cosines.loc["base"] = None  # the base does not move
    for name in names:
        yield {
            "part": "model",
            "seed": seed,
            "model": name,
            "kind": kinds[name],
            "scale": scales.get(name),
            "length": float(apart.at["base", name]),
            "cosine_with_task_arithmetic": cosines.at[name, AGAINST],
            "to_nearest_merge": float(apart.loc[name, [other for other in merges if other != name]].min()),
            "loss": loss.get(name),
            "accuracy": accuracy.get(name),
        }
    barriers = barriers_between(lab, merges, loss, examples)
    for first, second in combinations(names, 2):
        pair = {"part": "pair", "seed": seed, "model": first, "other": second}
        pair |= {"distance": float(apart.at[first, second]), "cosine": cosines.at[first, second]}
        yield {**pair, "barrier": barriers.get(frozenset((first, second)))}
    yield from measure_drops(scorer, options.drops, scales[AGAINST], seed)


def barriers_between(
    lab: Laboratory, merges: Mapping[str, State], loss: Mapping[str, float], examples: Mapping[str, Examples]
) -> dict[frozenset[str], float]:
    """Return the barrier of the mean loss over tasks between every two of the merges that the paper names."""
    barriers = {}
    for first, second in combinations(OTHERS, 2):
        ends = [(tensor, merges[second][name], name) for name, tensor in merges[first].items()]
        states = ({name: torch.lerp(a, b, share) for a, b, name in ends} for share in BETWEEN)
        between = [total_loss(lab, state, examples) for state in states]
        barriers[frozenset((first, second))] = barrier([loss[first], *between, loss[second]]) / len(lab.tasks)
    return barriers


def barrier(line: Sequence[float]) -> float:
    """Return how far losses at equal steps between two models rise above the chord between the ends; below it, < 0.

    Example:
        >>> barrier([1.0, 2.5, 2.0]), barrier([1.0, 1.25, 2.0])
        (1.0, -0.25)
    """
    last = len(line) - 1
    chord = [line[0] + (line[-1] - line[0]) * place / last for place in range(last + 1)]
    return max(value - height for value, height in list(zip(line, chord, strict=True))[1:-1])


def total_loss(lab: Laboratory, state: State, examples: Mapping[str, Examples]) -> float:
    """Return the multi-task loss Σ_t L_t."""
    return sum(lab.losses(state, examples).values())


def measure_across(lab: Laboratory, options: Options, scales: Mapping[str, float]) -> Iterator[Row]:
    """Yield how far models of two seeds lie from each other: a merge of each kind, and the paths' ends."""
    made: dict[str, dict[int, State]] = {}
    for name in (AGAINST, "ties"):
        scorers = {seed: lab.scorer(lab.run(options.one_shot).experts(seed)) for seed in lab.seeds}
        call = configure(name, {"scale": scales[name]})
        made[name] = {seed: scorer.merge(call) for seed, scorer in scorers.items()}
    for run in options.paths:
        made[run] = {seed: list(path_of(lab, run, seed).values())[-1] for seed in lab.seeds}
    for name, states in made.items():
        apart = distances(centred_gram({str(seed): state for seed, state in states.items()}))
        for (i, first), (j, second) in combinations(enumerate(states), 2):
            seeds = {"first_seed": first, "second_seed": second}
            yield {"part": "seeds", "model": name, **seeds, "distance": float(apart[i, j])}


def path_of(lab: Laboratory, run: str, seed: int) -> dict[str, State]:
    trained = lab.run(run)
    return {f"{run} round {row['round']}": trained.merged(seed, row["round"]) for row in trained.rounds(seed)}


def measure_drops(scorer: CandidateScorer, drops: Sequence[float], scale: float, seed: int) -> Iterator[Row]:
    """Yield DARE's distance from task arithmetic at the same scale, and what is expected of it."""
    plain_sum = scorer.merge(AGAINST, scale=scale)
    base, experts = scorer.merger.base, scorer.merger.experts.values()
    squares = sum(distances(centred_gram({"base": base, "expert": e}))[0, 1] ** 2 for e in experts)
    for drop in drops:
        masked = scorer.merge("dare", drop=drop, scale=scale)
        distance = float(distances(centred_gram({"plain": plain_sum, "masked": masked}))[0, 1])
        expected, accuracy = scale * sqrt(drop / (1 - drop) * squares), mean_accuracy(scorer.state(masked))
        about = {"part": "drop", "seed": seed, "model": "dare", "drop": drop}
        yield {**about, "distance": distance, "expected": expected, "accuracy": accuracy}


# What the rows are asked


class Space:
    """One seed's models in the whole space, by name; every distance is known."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.models = select(rows, part="model").set_index("model")
        self.names = list(self.models.index)
        self.merges = self.of_kind("merge", "random merge")
        self.random = self.of_kind("random merge")
        self.compared = [name for name in COMPARED if name in self.merges]
        (self.joint,) = self.of_kind("joint")
        rounds = groupby(self.of_kind("round"), lambda name: name.partition(" round ")[0])
        self.paths = {run: list(names) for run, names in rounds}
        self.ends = {run: names[-1] for run, names in self.paths.items()}
        pairs = select(rows, part="pair").pivot(index="model", columns="other", values="distance")
        upper = pairs.reindex(self.names, columns=self.names).fillna(0).to_numpy()
        self._distances = pd.DataFrame(upper + upper.T, self.names, self.names)
        # The centred Gram matrix is −J D² J / 2 with J = 1 − 11ᵀ/n.
        centring = np.eye(len(self.names)) - 1 / len(self.names)
        self._gram = -centring @ (self._distances.to_numpy() ** 2) @ centring / 2
        self.cosines = pd.DataFrame(cosines_from(self._gram, self.names.index("base")), self.names, self.names)

    def of_kind(self, *kinds: str) -> list[str]:
        return [name for name in self.names if self.models.kind[name] in kinds]

    def distance(self, first: str, second: str) -> float:
        return float(self._distances.at[first, second])

    def cosine(self, first: str, second: str) -> float:
        """Return the cosine of two models' moves from the base."""
        return float(self.cosines.at[first, second])

    def gap(self, name: str, among: Sequence[str]) -> float:
        """Return the distance to the nearest of some models."""
        return min(self.distance(name, other) for other in among if other != name)

    def plane(self, without: Sequence[str] = ()) -> tuple[pd.DataFrame, list[float]]:
        """Return places (x, y) on a plane with the distance off it, and the components' shares of the variance.

        Args:
            without: models that are on it, but that it is not fitted to.
        """
        shown = [name for name in self.names if name in COMPARED or name not in self.merges]
        fitted = [self.names.index(name) for name in shown if name not in without]
        coordinates = principal_coordinates(self._gram, fitted)
        places = pd.DataFrame(coordinates.places, self.names, ["x", "y"]).assign(off=coordinates.off)
        return places.loc[shown], coordinates.explained.tolist()

    def planar(self, first: str, second: str) -> float:
        """Return the distance of two models on the plane of the methods compared."""
        places = self.plane()[0][["x", "y"]]
        return dist(places.loc[first], places.loc[second])


def spaces(rows: pd.DataFrame) -> dict[int, Space]:
    seeds = rows[rows.part != "seeds"]
    return {int(seed): Space(group) for seed, group in seeds.groupby("seed")}


def each(rows: pd.DataFrame, measured: Callable[..., float], *args: Any) -> pd.Series:
    """Return a measure of every seed's space, which it takes before the other arguments."""
    return pd.Series({seed: measured(space, *args) for seed, space in spaces(rows).items()})


def between(rows: pd.DataFrame, model: str) -> float:
    """Return the mean distance between seeds; NaN where there is one seed, which decides nothing."""
    return float(select(rows, part="seeds", model=model).distance.mean())


def barrier_of(rows: pd.DataFrame, among: Sequence[tuple[str, str]]) -> Samples:
    pairs = select(rows, part="pair").dropna(subset=["barrier"])
    both = {pair: pairs[pairs.model.isin(pair) & pairs.other.isin(pair)] for pair in among}
    return {f"{first} – {second}": both[first, second].groupby("seed").barrier.first() for first, second in among}


def dare_less_pair(rows: pd.DataFrame) -> Samples:
    nearer = each(rows, Space.gap, "dare", PAIR)
    return {"their distance less that of DARE from the nearer of the two": each(rows, Space.distance, *PAIR) - nearer}


def on_the_plane(rows: pd.DataFrame) -> str:
    flat, cosine = (with_interval(each(rows, measured, *PAIR), 2) for measured in (Space.planar, Space.cosine))
    return f"; on the plane of the methods compared they are {flat} apart, their cosine from θ0 is {cosine}"


def pair_less_others(rows: pd.DataFrame) -> Samples:
    nearest = each(rows, lambda space: min(space.distance(*pair) for pair in _REST))
    return {"their distance less that of the nearest other pair": each(rows, Space.distance, *PAIR) - nearest}


def largest_gap_of_others(space: Space, among: Sequence[str]) -> float:
    return max(space.gap(name, among) for name in among if name != "dare")


def dare_gap(rows: pd.DataFrame) -> Samples:
    largest = each(rows, largest_gap_of_others, OTHERS)
    return {"DARE's gap less the largest of the others": each(rows, Space.gap, "dare", OTHERS) - largest}


def dare_among_all(rows: pd.DataFrame) -> str:
    dare = with_interval(each(rows, lambda space: space.gap("dare", space.merges)), 2)
    lonely = with_interval(each(rows, lambda space: largest_gap_of_others(space, space.merges)), 2)
    return f"; among all methods DARE is {dare} from its nearest, the most lonely other {lonely}"


def off_the_law(rows: pd.DataFrame) -> Samples:
    drops = select(rows, part="drop")
    off = (drops.distance / drops.expected - 1).abs().groupby(drops.seed).max()
    return {"largest relative difference of measured and expected": 100 * off}


def of_ends(rows: pd.DataFrame, measured: Callable[[Space, str], float]) -> dict[str, pd.Series]:
    """Return a measure of the last model of each iterative run, by the run."""
    runs = next(iter(spaces(rows).values())).ends
    return {run: each(rows, lambda space, run: measured(space, space.ends[run]), run) for run in runs}


def beyond_merges(rows: pd.DataFrame) -> Samples:
    seeds = partial(between, rows)
    return {
        f"{run}, from its nearest merge, less {seeds(run):.2f} between seeds": gap - seeds(run)
        for run, gap in of_ends(rows, lambda space, end: space.gap(end, space.merges)).items()
    }


def turned_away(rows: pd.DataFrame) -> str:
    cosines = of_ends(rows, lambda space, end: max(space.cosine(end, name) for name in space.merges))
    return (
        f"; largest cosine from θ0 with a merge: {listed(cosines)}; a merge by TIES of two seeds is "
        f"{between(rows, 'ties'):.2f} apart"
    )


def listed(of_runs: Mapping[str, pd.Series]) -> str:
    return ", ".join(f"{run} {with_interval(values, 2)}" for run, values in of_runs.items())


def less_best_merge(rows: pd.DataFrame) -> Samples:
    less = of_ends(rows, lambda space, end: space.models.loss[end] - space.models.loss[space.merges].min())
    return {f"{run}, Σ L_t less that of the best merge": values for run, values in less.items()}


def toward_joint(rows: pd.DataFrame) -> str:
    aims = of_ends(rows, lambda space, end: space.cosine(end, space.joint))
    merges = with_interval(each(rows, lambda space: max(space.cosine(name, space.joint) for name in space.merges)), 2)
    return f"; cosine with joint training, from θ0: {listed(aims)}; a one-shot merge at most {merges}"


# fmt: off
_REST = [pair for pair in combinations(OTHERS, 2) if pair != PAIR]
_APART = [pair for pair in _REST if pair == ("ties", "dare")]
_NO_BARRIER = "barrier of the mean loss over tasks on the line between them"
CLAIMS = [
    Claim("G8", "TIES and Breadcrumbs converge to similar basins.", partial(barrier_of, among=[PAIR]),
          high=0.1, of=_NO_BARRIER, unit="nat", digits=3, caveat="100 test images a task",
          needs=needs(partial(barrier_of, among=_APART), "barrier of a pair that the paper finds apart,", "nat",
                      low=0.1)),
    Claim("G8", "Task arithmetic and DARE lie in that basin as well: no barrier between any two of the four.",
          partial(barrier_of, among=_REST), high=0.1, of=_NO_BARRIER, unit="nat", digits=3, ours=True),
    Claim("G8", "DARE diverges significantly from TIES and Breadcrumbs.", dare_less_pair,
          high=0, of="paired difference in the whole space", unit="", digits=2, also=on_the_plane),
    Claim("G8", "No two of task arithmetic, TIES, Breadcrumbs and DARE lie closer together than TIES and Breadcrumbs.",
          pair_less_others, high=0, of="paired difference in the whole space", unit="", digits=2, ours=True),
    Claim("G8", "DARE lands farther from its nearest merge than task arithmetic, TIES and Breadcrumbs from theirs.",
          dare_gap, low=0, unit="", digits=2, ours=True, also=dare_among_all,
          of="paired difference in the whole space, among task arithmetic, TIES, Breadcrumbs and DARE,"),
    Claim("G8", "How far DARE lands from task arithmetic is the size of its random mask: λ √(p/(1 − p) Σ_t ‖τ_t‖²).",
          off_the_law, high=5, of="relative difference", unit="%", ours=True),
    Claim("G8", "The iterative trajectory moves toward a distinct region.", beyond_merges, low=0, unit="", digits=2,
          of="distance from the nearest one-shot merge less that of ends of different seeds", also=turned_away),
    Claim("G8", "The trajectory ends at a lower loss than every one-shot merge.", less_best_merge,
          high=0, of="paired difference of the multi-task loss on test images", unit="nat", digits=2,
          also=toward_joint),
]
# fmt: on


def model_table(rows: pd.DataFrame) -> pd.DataFrame:
    models = select(rows, part="model").dropna(subset="loss")
    columns = ["scale", "length", "cosine_with_task_arithmetic", "to_nearest_merge", "accuracy", "loss"]
    digits = dict.fromkeys(columns, 2) | {"accuracy": 1}
    made = side_by_side(models, "model", dict(zip(columns, columns, strict=True)), digits)
    return made.replace("nan.*", "", regex=True)


def plane_figure(rows: pd.DataFrame) -> Figure:
    """Draw the first seed's models on the plane of the methods compared, fitted to all or without DARE (Figure 4)."""
    space = next(iter(spaces(rows).values()))
    figure, axes = panels(2, 1, 4.2)
    figure.set_size_inches(FULL_WIDTH, 4.2 * len(axes))
    planes = {"the methods compared": space.plane(), "the same without DARE": space.plane(space.random)}
    for axis, (title, (places, explained)) in zip(axes, planes.items(), strict=True):
        x, y = (f"component {i + 1} ({100 * share:.0f} %)" for i, share in enumerate(explained))
        dress(axis, f"Fit: {title}", x, y, grid="both")
        draw_models(axis, space, places[["x", "y"]])
    figure.draw_without_rendering()  # labels are placed on panels of their final size
    for axis, (places, _) in zip(axes, planes.values(), strict=True):
        points = dict(zip(places.index, places[["x", "y"]].itertuples(index=False, name=None), strict=True))
        names = {"θ0": "base", "joint training": space.joint, "experts": space.of_kind("expert")[0]}
        names |= {f"{run}, end": end for run, end in space.ends.items()}
        names |= {name: name for name in space.compared}
        place_labels(axis, {label: points[name] for label, name in names.items()}, points.values())
    return figure


def draw_models(axis: Axes, space: Space, places: pd.DataFrame) -> None:
    def draw(names: Sequence[str], **style: Any) -> None:
        edge = {"linestyle": "", "markeredgecolor": SURFACE, "markeredgewidth": 0.7}
        axis.plot(*places.loc[list(names)].to_numpy().T, **{**edge, **style})

    draw(space.of_kind("expert"), color=GRID, marker="o", markersize=6)
    for number, names in enumerate(space.paths.values(), start=1):
        draw(["base", *names], **series_style(number) | {"markersize": 3.5, "linewidth": 1.0})
        draw(names[-1:], **series_style(number) | {"markersize": 9, "marker": "*"})
    draw(space.compared, **series_style(0) | {"linestyle": ""})
    draw([space.joint], color=SERIES[3], marker="D", markersize=7)
    draw(["base"], color=INK, marker="o", markersize=8)
    axis.margins(0.1)


def cosine_figure(rows: pd.DataFrame) -> Figure:
    """Draw the cosines of the whole space, mean over seeds, models that point the same way beside each other."""
    every = list(spaces(rows).values())
    first = every[0]
    labels = {name: name for name in first.merges} | {end: f"{run}, end" for run, end in first.ends.items()}
    labels |= {first.joint: "joint training"}
    cosines = np.mean([space.cosines.loc[list(labels), list(labels)] for space in every], axis=0)
    apart = squareform((1 - cosines).clip(min=0) * (1 - np.eye(len(labels))), checks=False)
    order = leaves_list(linkage(apart, "average", optimal_ordering=True))
    figure = new_figure(FULL_WIDTH, 0.4 * len(labels) + 1.6)
    axis = figure.subplots()
    dress(axis, "Cosine of θ − θ0, whole space", grid="both")
    names = [plain(list(labels.values())[index]) for index in order]
    numbered(axis, names, cosines[np.ix_(order, order)].tolist(), 0, 1)
    axis.tick_params("x", rotation=90)
    return figure


STUDY = Study(
    options=Options,
    runs=lambda options: [options.one_shot, *options.paths, options.joint],
    splits=("validation", "test"),
    systems=("G8",),
    measure=measure,
    claims=CLAIMS,
    tables={
        "Models made with one budget: lengths, cosines, distances, test accuracy in %, Σ L_t": model_table,
    },
    figures={"planes": plane_figure, "cosines": cosine_figure},
)
