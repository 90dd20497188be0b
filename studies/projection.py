"""Study `projection` (G8): where do the merges of every method and the iterative trajectory lie?

**Question.** Seen on a plane, the paper finds merges by TIES and by Breadcrumbs close to each other, one by DARE apart,
and the trajectory of iterative merging ends elsewhere, at a lower loss. Is it so, and is it so off the plane?

**Method.** For each seed: the base, experts tuned once, the merge of these experts by every method of the catalog that
needs no data (its own default arguments; its scale from validation, first seed, ¼ to 2 times the default), the merged
model after each round of the iterative runs, and a jointly trained model. All training has the same budget. With
G = ⟨θ_i − θ̄, θ_j − θ̄⟩ = U Λ Uᵀ the coordinates are U √Λ; distances ‖θ_i − θ_j‖ and cosines of θ − θ0 are those of the
whole space. Planes are fitted to all models, to those with the paper's methods only, and to these without DARE. The
size of DARE's mask can be told beforehand: E ‖θ_DARE − θ_TA‖² = λ² p/(1 − p) Σ_t ‖τ_t‖² for the same λ and drop p.
Two merges share a basin where no barrier lies between them: with L the mean loss over tasks, B(a, b) is the largest of
L((1 − s) θ_a + s θ_b) − (1 − s) L(θ_a) − s L(θ_b) over s = ¼, ½, ¾.
The findings on DARE, TIES and Breadcrumbs compare these and task arithmetic alone: methods that keep few directions
lie further from all others than DARE does. Where a scale is ¼ or 2 times the default, one beyond may do better.
Test accuracy and loss are those of the first images of every task. ± is over seeds: the order of the batches.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 5.3 and Figure 4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from math import dist, nan, sqrt
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from pydantic import Field, field_validator
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from mergeflow.evaluation import Judge
from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure, methods
from mergeflow.modalities.classification import Subset
from mergeflow.modality import Examples
from mergeflow.search.candidates import best_on_line, line, score_all
from studies.lab import Claim, Laboratory, Row, Section, Study, select, table
from studies.lab.claims import needs, with_interval
from studies.lab.inputs import State, mean_accuracy
from studies.lab.rows import Samples
from studies.theory.landscape import centred_gram, cosines_from, distances, principal_coordinates
from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, new_figure, panels, plain, series_style
from tasks.plotting.palette import GRID, INK, LIGHT, SERIES, SURFACE
from tasks.plotting.panels import place_labels

AGAINST = "task_arithmetic"  # what DARE is, but for its mask
BETWEEN = (0.25, 0.5, 0.75)  # where on the line between two merges a barrier is looked for
PAIR = ("ties", "breadcrumbs")
OTHERS = ("task_arithmetic", "ties", "breadcrumbs", "dare")  # the methods that the paper names, and their plain sum
COMPARED = ("average", *OTHERS)  # what the smaller planes show: the paper does not say what Figure 4 is fitted to
PLANES = ("all models", "the methods compared", "the same without DARE")
_COSINES = LinearSegmentedColormap.from_list("cosine", [SURFACE, "#b9d9ec", LIGHT["series-1"]])


class Options(Section):
    """The study's choices.

    one_shot: the run whose experts are merged. paths: the iterative runs. joint: the joint run. factors: of a method's
    default scale, tried on validation. images: per task, of validation for that choice and of test for the accuracies.
    drops: of DARE, compared with what is expected. methods: which are merged; without any, all that need no data.
    """

    one_shot: str
    paths: list[str] = Field(min_length=1)
    joint: str
    factors: list[float] = Field(min_length=1)
    images: int = Field(ge=1)
    drops: list[float]
    methods: list[str] = Field(default_factory=list)

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


# Design and measurement


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield for each seed its models (`model`), every two of them (`pair`), DARE's `drop`, and distances of `seeds`.

    `model`: its kind (base, expert, merge, random merge, round, joint), scale, length, and where it was scored its
    accuracy in % and loss. `pair`: the distance, the cosine of the moves from the base, and of two merges that the
    paper names the barrier between them, in nat.
    """
    (chosen,) = lab.cached({"scales": partial(_scales, lab, options)})
    yield from lab.by_seed(partial(measure_seed, lab, options, chosen["scales"]))
    yield from lab.cached({"across": partial(measure_across, lab, options, chosen["scales"])})


def _scales(lab: Laboratory, options: Options) -> list[Row]:
    return [{"scales": choose_scales(lab, options)}]


def mergeable(experts: int) -> list[str]:
    """Return the methods that merge this many experts and take no data."""
    return [
        name
        for name, method in methods().items()
        if not method.given and method.experts[0] <= experts <= (method.experts[1] or experts)
    ]


def choose_scales(lab: Laboratory, options: Options) -> dict[str, float]:
    """Return each method's best scale on a subsample of the validation images, with the first seed's experts."""
    blind = lab.blind()
    scorer = blind.scorer(lab.run(options.one_shot).experts(lab.seeds[0]))
    examples = {task: Subset.first(data, options.images) for task, data in blind.examples("validation").items()}
    chosen = {}
    for name in options.methods or mergeable(len(lab.tasks)):
        default = configure(name).scale
        scales = sorted(default * factor for factor in options.factors)
        candidates = score_all(
            name, line("scale", scales, default), lambda call: scorer.state(scorer.merge(call), examples), mean
        )
        chosen[name] = best_on_line(candidates, "scale").varied["scale"]
    return chosen


def measure_seed(lab: Laboratory, options: Options, scales: Mapping[str, float], seed: int) -> Iterator[Row]:
    experts = lab.run(options.one_shot).experts(seed)
    scorer = lab.scorer(experts)
    merges = {name: scorer.merge(configure(name, {"scale": scale})) for name, scale in scales.items()}
    paths = {run: _path(lab, run, seed) for run in options.paths}
    ends = {list(states)[-1]: list(states.values())[-1] for states in paths.values()}
    joint = {options.joint: lab.run(options.joint).model(seed)}
    steps = {name: state for states in paths.values() for name, state in states.items()}
    points = {"base": lab.base, **experts, **merges, **steps, **joint}
    scored = {"base": lab.base, **merges, **joint, **ends}
    examples = {task: Subset.first(data, options.images) for task, data in lab.examples("test").items()}
    loss = {name: _loss(lab, state, examples) for name, state in scored.items()}
    accuracy = {name: mean_accuracy(scorer.state(state, examples)) for name, state in scored.items()}
    kinds = {"base": "base", **dict.fromkeys(experts, "expert"), **dict.fromkeys(steps, "round")}
    kinds |= {name: "random merge" if "seed" in methods()[name].args.model_fields else "merge" for name in merges}
    kinds |= dict.fromkeys(joint, "joint")
    gram = centred_gram(points)
    names = list(points)
    apart = pd.DataFrame(distances(gram), names, names)
    cosines = pd.DataFrame(cosines_from(gram, 0), names, names)
    for name in names:
        others = [other for other in merges if other != name]
        yield {
            "part": "model",
            "seed": seed,
            "model": name,
            "kind": kinds[name],
            "scale": scales.get(name),
            "length": float(apart.at["base", name]),
            "cosine_with_task_arithmetic": None if name == "base" else float(cosines.at[name, AGAINST]),
            "to_nearest_merge": float(apart.loc[name, others].min()),
            "loss": loss.get(name),
            "accuracy": accuracy.get(name),
        }
    barriers = _barriers(lab, merges, loss, examples)
    for first, second in combinations(names, 2):
        between: Row = {"distance": float(apart.at[first, second])}
        between |= {"cosine": None if first == "base" else float(cosines.at[first, second])}
        barred = barriers.get(frozenset((first, second)))
        yield {"part": "pair", "seed": seed, "model": first, "other": second, **between, "barrier": barred}
    yield from _drops(scorer, options.drops, scales[AGAINST], seed)


def _barriers(
    lab: Laboratory, merges: Mapping[str, State], loss: Mapping[str, float], examples: Mapping[str, Examples]
) -> dict[frozenset[str], float]:
    """Return the barrier of the mean loss over tasks between every two of the merges that the paper names."""
    barriers = {}
    for first, second in combinations(OTHERS, 2):
        between = [_loss(lab, _at(merges[first], merges[second], share), examples) for share in BETWEEN]
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


def _at(first: State, second: State, share: float) -> State:
    """Return (1 − share) θ_first + share θ_second."""
    return {name: torch.lerp(tensor, second[name], share) for name, tensor in first.items()}


def _loss(lab: Laboratory, state: State, examples: Mapping[str, Examples]) -> float:
    """Return the multi-task loss Σ_t L_t."""
    lab.model.load(state)
    return sum(Judge(lab.model, **dict(lab.io.section("evaluation"))).losses(examples).values())


def measure_across(lab: Laboratory, options: Options, scales: Mapping[str, float]) -> Iterator[Row]:
    """Yield how far models of two seeds lie from each other: a merge of each kind, and the paths' ends."""
    for name in (AGAINST, "ties"):
        states = {}
        for seed in lab.seeds:
            scorer = lab.scorer(lab.run(options.one_shot).experts(seed))
            states[seed] = scorer.merge(configure(name, {"scale": scales[name]}))
        yield from _between_seeds(name, states)
    for run in options.paths:
        yield from _between_seeds(run, {seed: list(_path(lab, run, seed).values())[-1] for seed in lab.seeds})


def _between_seeds(name: str, states: Mapping[int, State]) -> Iterator[Row]:
    between_seeds = distances(centred_gram({str(seed): state for seed, state in states.items()}))
    for i, j in combinations(range(len(states)), 2):
        seeds = {"first_seed": list(states)[i], "second_seed": list(states)[j]}
        yield {"part": "seeds", "model": name, **seeds, "distance": float(between_seeds[i, j])}


def _path(lab: Laboratory, run: str, seed: int) -> dict[str, State]:
    trained = lab.run(run)
    rounds = [row["round"] for row in trained.rounds(seed)]
    return {f"{run} round {number}": trained.merged(seed, number) for number in rounds}


def _drops(scorer: CandidateScorer, drops: Sequence[float], scale: float, seed: int) -> Iterator[Row]:
    """Yield DARE's distance from task arithmetic at the same scale, and what is expected of it."""
    plain_sum = scorer.merge(configure(AGAINST, {"scale": scale}))
    base, experts = scorer.merger.base, scorer.merger.experts.values()
    squares = sum(distances(centred_gram({"base": base, "expert": e}))[0, 1] ** 2 for e in experts)
    for drop in drops:
        masked = scorer.merge(configure("dare", {"drop": drop, "scale": scale}))
        distance = float(distances(centred_gram({"plain": plain_sum, "masked": masked}))[0, 1])
        expected, accuracy = scale * sqrt(drop / (1 - drop) * squares), mean_accuracy(scorer.state(masked))
        about = {"part": "drop", "seed": seed, "model": "dare", "drop": drop}
        yield {**about, "distance": distance, "expected": expected, "accuracy": accuracy}


# What the rows are asked


class Space:
    """One seed's models in the whole space, by name; every distance is known."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.models = select(rows, part="model").set_index("model", drop=False)
        self.names = list(self.models.index)
        self.joint = self.of_kind("joint")[0]
        self.merges = [name for name in self.names if self.models.kind[name] in ("merge", "random merge")]
        self.random = self.of_kind("random merge")
        self.paths: dict[str, list[str]] = {}
        for name in self.of_kind("round"):
            self.paths.setdefault(name.partition(" round ")[0], []).append(name)
        self.ends = {run: names[-1] for run, names in self.paths.items()}
        pairs = select(rows, part="pair")
        wide = pairs.pivot(index="model", columns="other", values="distance").reindex(self.names, columns=self.names)
        upper = wide.fillna(0).to_numpy()
        self._distances = pd.DataFrame(upper + upper.T, self.names, self.names)
        # The centred Gram matrix is −J D² J / 2 with J = 1 − 11ᵀ/n.
        centring = np.eye(len(self.names)) - 1 / len(self.names)
        self.gram = -centring @ (self._distances.to_numpy() ** 2) @ centring / 2
        self._cosines = pd.DataFrame(cosines_from(self.gram, self.names.index("base")), self.names, self.names)
        self.plane = cache(self._plane)

    def of_kind(self, kind: str) -> list[str]:
        return [name for name in self.names if self.models.kind[name] == kind]

    def distance(self, first: str, second: str) -> float:
        return float(self._distances.at[first, second])

    def cosine(self, first: str, second: str) -> float:
        """Return the cosine of two models' moves from the base."""
        return float(self._cosines.at[first, second])

    def gap(self, name: str, among: Sequence[str]) -> float:
        """Return the distance to the nearest of some models."""
        return min(self.distance(name, other) for other in among if other != name)

    def _plane(self, title: str) -> tuple[dict[str, tuple[float, float]], dict[str, float], list[float]]:
        """Return places, distances off the plane of models it was not fitted to, and shares of the variance."""
        hidden = set() if title == PLANES[0] else set(self.merges) - set(COMPARED)
        shown = [name for name in self.names if name not in hidden]
        fitted = [name for name in shown if title != PLANES[2] or name not in self.random]
        index = {name: place for place, name in enumerate(self.names)}
        coordinates = principal_coordinates(self.gram, [index[name] for name in fitted])
        places = {
            name: (float(coordinates.places[index[name], 0]), float(coordinates.places[index[name], 1]))
            for name in shown
        }
        off = {name: float(coordinates.off[index[name]]) for name in shown if name not in fitted}
        return places, off, coordinates.explained.tolist()

    def planar(self, title: str, first: str, second: str) -> float:
        """Return the distance of two models on a plane."""
        places = self.plane(title)[0]
        return dist(places[first], places[second])


def spaces(rows: pd.DataFrame) -> dict[int, Space]:
    seeds = rows[rows.part != "seeds"]
    return {int(seed): Space(group) for seed, group in seeds.groupby("seed")}


def each(rows: pd.DataFrame, measured: Callable[[Space], float]) -> pd.Series:
    """Return a measure of every seed."""
    return pd.Series({seed: measured(space) for seed, space in spaces(rows).items()})


def between(rows: pd.DataFrame, model: str) -> float:
    """Return the mean distance between seeds; NaN where there is one seed, which decides nothing."""
    measured = select(rows, part="seeds", model=model).distance
    return float(measured.mean()) if len(measured) else nan


def barrier_of(rows: pd.DataFrame, among: Sequence[tuple[str, str]]) -> Samples:
    pairs = select(rows, part="pair").dropna(subset=["barrier"])
    barriers = {}
    for first, second in among:
        both = pairs[pairs.model.isin([first, second]) & pairs.other.isin([first, second])]
        barriers[f"{first} – {second}"] = both.groupby("seed").barrier.first()
    return barriers


def dare_less_pair(rows: pd.DataFrame) -> Samples:
    nearer = each(rows, lambda s: min(s.distance("dare", name) for name in PAIR))
    return {
        "their distance less that of DARE from the nearer of the two": each(rows, lambda s: s.distance(*PAIR)) - nearer
    }


def on_the_plane(rows: pd.DataFrame) -> str:
    flat = with_interval(each(rows, lambda s: s.planar(PLANES[1], *PAIR)), 2)
    cosine = with_interval(each(rows, lambda s: s.cosine(*PAIR)), 2)
    return f"; on the plane of the methods compared they are {flat} apart, their cosine from θ0 is {cosine}"


def pair_less_others(rows: pd.DataFrame) -> Samples:
    others = [pair for pair in combinations(OTHERS, 2) if pair != PAIR]
    nearest = each(rows, lambda s: min(s.distance(*pair) for pair in others))
    return {"their distance less that of the nearest other pair": each(rows, lambda s: s.distance(*PAIR)) - nearest}


def dare_gap(rows: pd.DataFrame) -> Samples:
    dare = each(rows, lambda s: s.gap("dare", OTHERS))
    largest = each(rows, lambda s: max(s.gap(name, OTHERS) for name in OTHERS if name != "dare"))
    return {"DARE's gap less the largest of the others": dare - largest}


def dare_among_all(rows: pd.DataFrame) -> str:
    dare = with_interval(each(rows, lambda s: s.gap("dare", s.merges)), 2)
    lonely = each(rows, lambda s: max(s.gap(name, s.merges) for name in s.merges if name != "dare"))
    return f"; among all methods DARE is {dare} from its nearest, the most lonely other {with_interval(lonely, 2)}"


def off_the_law(rows: pd.DataFrame) -> Samples:
    drops = select(rows, part="drop")
    off = (drops.distance / drops.expected - 1).abs().groupby(drops.seed).max()
    return {"largest relative difference of measured and expected": 100 * off}


def runs_of(rows: pd.DataFrame) -> list[str]:
    return list(next(iter(spaces(rows).values())).paths)


def beyond_merges(rows: pd.DataFrame) -> Samples:
    gaps_beyond = {}
    for run in runs_of(rows):
        gaps, seeds = each(rows, lambda s, run=run: s.gap(s.ends[run], s.merges)), between(rows, run)  # type: ignore[misc]
        gaps_beyond[f"{run}, from its nearest merge, less {seeds:.2f} between seeds"] = gaps - seeds
    return gaps_beyond


def turned_away(rows: pd.DataFrame) -> str:
    turned = [
        f"{run} {with_interval(each(rows, lambda s, run=run: max(s.cosine(s.ends[run], n) for n in s.merges)), 2)}"  # type: ignore[misc]
        for run in runs_of(rows)
    ]
    return (
        f"; largest cosine from θ0 with a merge: {', '.join(turned)}; a merge by TIES of two seeds is "
        f"{between(rows, 'ties'):.2f} apart"
    )


def less_best_merge(rows: pd.DataFrame) -> Samples:
    return {
        f"{run}, Σ L_t less that of the best merge": each(
            rows,
            lambda s, run=run: s.models.loss[s.ends[run]] - s.models.loss[s.merges].min(),  # type: ignore[misc]
        )
        for run in runs_of(rows)
    }


def toward_joint(rows: pd.DataFrame) -> str:
    aims = ", ".join(
        f"{run} {with_interval(each(rows, lambda s, run=run: s.cosine(s.ends[run], s.joint)), 2)}"  # type: ignore[misc]
        for run in runs_of(rows)
    )
    merges = with_interval(each(rows, lambda s: max(s.cosine(name, s.joint) for name in s.merges)), 2)
    return f"; cosine with joint training, from θ0: {aims}; a one-shot merge at most {merges}"


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


# What is shown


def model_table(rows: pd.DataFrame) -> pd.DataFrame:
    models = select(rows, part="model")
    models = models[models.loss.notna()]
    digits = {
        "scale": 2,
        "length": 2,
        "cosine_with_task_arithmetic": 2,
        "to_nearest_merge": 2,
        "accuracy": 1,
        "loss": 2,
    }
    parts = [table(models.dropna(subset=[name]), "model", value=name, digits=places) for name, places in digits.items()]
    return pd.concat(parts, axis=1).reindex(models.model.unique()).fillna("")


def distance_table(rows: pd.DataFrame) -> pd.DataFrame:
    first = next(iter(spaces(rows).values()))
    main, *others = first.ends.values()
    pairs = [PAIR, ("ties", AGAINST), ("breadcrumbs", AGAINST), ("dare", AGAINST), ("dare", "ties"), (main, AGAINST)]
    pairs += [(main, "ties"), (main, first.joint), *((main, end) for end in others)]
    lines = {}
    for a, b in pairs:
        planar = {
            f"on the plane of {title}": each(rows, lambda s, a=a, b=b, t=title: s.planar(t, a, b))  # type: ignore[misc]
            for title in PLANES[:2]
        }
        distance = each(rows, lambda s, a=a, b=b: s.distance(a, b))  # type: ignore[misc]
        cosine = each(rows, lambda s, a=a, b=b: s.cosine(a, b))  # type: ignore[misc]
        values = {"‖θ − θ′‖": distance, **planar, "cosine from θ0": cosine}
        lines[f"{a} – {b}"] = {name: with_interval(value, 2) for name, value in values.items()}
    return pd.DataFrame(lines).T.rename_axis("models")


def drop_table(rows: pd.DataFrame) -> pd.DataFrame:
    drops, digits = select(rows, part="drop"), {"distance": 3, "expected": 3, "accuracy": 1}
    return pd.concat([table(drops, "drop", value=name, digits=places) for name, places in digits.items()], axis=1)


def seeds_table(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part="seeds").groupby("model", sort=False)[["distance"]].mean().round(2)


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    shares = [each(rows, lambda s, t=title: 100 * sum(s.plane(t)[2])) for title in PLANES]  # type: ignore[misc]
    listed_shares = ", ".join(
        f"{with_interval(share)} % ({title})" for title, share in zip(PLANES, shares, strict=True)
    )
    off = with_interval(each(rows, lambda s: s.plane(PLANES[2])[1]["dare"]), 1)
    flat = with_interval(each(rows, lambda s: s.planar(PLANES[2], "dare", AGAINST)), 1)
    far = with_interval(each(rows, lambda s: s.distance("dare", AGAINST)), 1)
    drops = select(rows, part="drop")
    least = drops.sort_values(["seed", "drop"]).iloc[0]
    return [
        f"The planes show of the variance: {listed_shares}. A random mask moves a model at right angles to the merges "
        "without such a mask, so one component of a plane that DARE is fitted to is its mask. On the plane without it "
        f"DARE seems to lie {flat} from task arithmetic; the whole distance is {far}, and DARE lies {off} off this "
        "plane. Read the whole space.",
        "How far DARE lies from task arithmetic follows from scale, drop and the lengths of the task vectors: with "
        f"drop {least['drop']:g} it is {least.distance:.2f}. Another order of the data moves a merge by TIES by "
        f"{between(rows, 'ties'):.2f}, and by task arithmetic by {between(rows, AGAINST):.2f}.",
        "Distance alone does not tell a trajectory from another method: "
        + "; ".join(_alone(rows, run) for run in runs_of(rows))
        + ".",
    ]


def _alone(rows: pd.DataFrame, run: str) -> str:
    """Return how far a trajectory's end is from its nearest merge, and how many merges are as far from theirs."""
    far = each(rows, lambda s: s.gap(s.ends[run], s.merges))
    as_far = each(rows, lambda s: sum(s.gap(name, s.merges) >= s.gap(s.ends[run], s.merges) for name in s.merges))
    count = len(next(iter(spaces(rows).values())).merges)
    return (
        f"the end of {run} lies {with_interval(far, 2)} from its nearest merge, and {with_interval(as_far)} of the "
        f"{count} merges lie as far from theirs"
    )


def plane_figure(rows: pd.DataFrame) -> Figure:
    """Draw the first seed's models on the planes that leave out the other methods (the paper's Figure 4)."""
    space = next(iter(spaces(rows).values()))
    figure, axes = panels(2, 1, 4.2)
    figure.set_size_inches(FULL_WIDTH, 4.2 * len(axes))
    for panel, title in zip(axes, PLANES[1:], strict=True):
        first, second = (f"component {i + 1} ({100 * share:.0f} %)" for i, share in enumerate(space.plane(title)[2]))
        dress(panel, f"Fit: {title}", first, second, grid="both")
        _models(panel, space, title)
    figure.draw_without_rendering()  # labels are placed on panels of their final size
    for panel, title in zip(axes, PLANES[1:], strict=True):
        place_labels(panel, _labels(space, title), space.plane(title)[0].values())
    return figure


def _models(panel: Axes, space: Space, title: str) -> None:
    places, off, _ = space.plane(title)

    def scatter(names: Sequence[str], **style: Any) -> None:
        xs, ys = zip(*(places[name] for name in names), strict=True)
        panel.plot(xs, ys, **{"linestyle": "", "markeredgecolor": SURFACE, "markeredgewidth": 0.7, **style})

    scatter(space.of_kind("expert"), color=GRID, marker="o", markersize=6)
    for number, names in enumerate(space.paths.values(), start=1):
        scatter(["base", *names], **series_style(number) | {"markersize": 3.5, "linewidth": 1.0})
        scatter(names[-1:], **series_style(number) | {"markersize": 9, "marker": "*"})
    blue = series_style(0) | {"linestyle": ""}
    for name in (name for name in space.merges if name in places):
        hollow = {"markerfacecolor": SURFACE, "markeredgecolor": SERIES[0]} if name in off else {}
        scatter([name], **blue | hollow)
    scatter([space.joint], color=SERIES[3], marker="D", markersize=7)
    scatter(["base"], color=INK, marker="o", markersize=8)
    panel.margins(0.1)


def _labels(space: Space, title: str) -> dict[str, tuple[float, float]]:
    places, off, _ = space.plane(title)
    labels = {"θ0": places["base"], "joint training": places[space.joint]}
    labels |= {f"{run}, end": places[end] for run, end in space.ends.items()}
    for name in (name for name in space.merges if name in places):
        labels[f"{name} ({off[name]:.1f} off)" if name in off else name] = places[name]
    experts = space.of_kind("expert")
    middle = np.mean([places[name] for name in experts], axis=0)
    nearest = min(experts, key=lambda name: float(np.hypot(*np.subtract(places[name], middle))))
    return {**labels, "experts": places[nearest]}


def cosine_figure(rows: pd.DataFrame) -> Figure:
    """Draw the cosines of the whole space, mean over seeds, models that point the same way beside each other."""
    every = list(spaces(rows).values())
    labels = {name: name for name in every[0].merges} | {end: f"{run}, end" for run, end in every[0].ends.items()}
    labels |= {every[0].joint: "joint training"}
    cosines = np.mean([[[s.cosine(a, b) for b in labels] for a in labels] for s in every], axis=0)
    names = list(labels.values())
    away = squareform((1 - (cosines + cosines.T) / 2).clip(min=0) * (1 - np.eye(len(names))), checks=False)
    order = leaves_list(linkage(away, "average", optimal_ordering=True))
    shown = cosines[np.ix_(order, order)]
    figure = new_figure(FULL_WIDTH, 0.4 * len(names) + 1.6)
    panel = figure.subplots()
    dress(panel, "Cosine of θ − θ0, whole space", grid="both")
    panel.imshow(shown, cmap=_COSINES, vmin=0, vmax=1, aspect="auto")
    panel.grid(False)
    ticks = [plain(names[index]) for index in order]
    panel.set_xticks(range(len(names)), labels=ticks, rotation=45, ha="right")
    panel.set_yticks(range(len(names)), labels=ticks)
    for row, values in enumerate(shown.tolist()):
        for column, value in enumerate(values):
            colour = SURFACE if value > 0.75 else INK
            text = f"{value:.2f}".replace("0.", ".").replace("1.00", "1")
            panel.text(column, row, text, ha="center", va="center", fontsize=SMALL - 1.5, color=colour)
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
        "Distances in the whole space and on the planes": distance_table,
        "Distance between the same model of two seeds: what another order of the data does": seeds_table,
        "DARE beside task arithmetic at the same λ: distance, expected, validation accuracy in %": drop_table,
    },
    figures={"planes": plane_figure, "cosines": cosine_figure},
    notes=notes,
)
