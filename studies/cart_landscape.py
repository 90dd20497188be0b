"""Study `cart_landscape` (C8): does keeping more and more singular vectors lead through the common basin and back?

**Question.** Weights of centred task vectors at growing rank k: the paper sees a path that leaves the average, passes
the tasks' common basin and returns, while task arithmetic ends beside it. Is it so on a plane, and is it so off it?

**Method.** With θ_avg = (1/T) Σ_t θ_t the paths are, over the share k of the full rank and over λ,

    θ_avg + λ Σ_t SVD_k(θ_t − θ_avg) (CART),    θ0 + λ Σ_t SVD_k(τ_t) (task arithmetic of low rank),

from k = 0 (θ_avg; for task arithmetic θ0) to full. Task arithmetic's λ is that of the smallest multi-task loss Σ_t L_t;
CART is drawn at λ = 1, rank ratio 0.08, which nothing was chosen for. L_t is the cross-entropy on the first validation
images of task t, computed at every model itself; the pictures show it on planes, and the table how far the models lie
off them. The paper does not say which points its principal components are found from. Here the plane of the paths is
fitted to both paths over k, the base and the average: experts are nearly orthogonal and their centred task vectors sum
to zero, so two components of the experts hold almost nothing of CART's path (the table has both). A task's own plane is
that of θ_t, CART and task arithmetic, which lie on it exactly. Components come from the n × n Gram matrix of n models,
summed block by block. *Roundness* is 4π area / length² of the path over k on the plane: 1 for a circle, 0 for a line
out and back. That CART's ends are the average, and that task arithmetic passes it at λ = 1/T, are identities, which
only a mistake can break; the losses are measured. The best CART may lie beyond the largest λ. Findings are for every
seed, pictures of the first.

**Source.** CART, Section 5.3 (Figure 5) and Appendix E (Figures 11 and 12); the contours after Li et al. 2018.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation import CandidateScorer
from mergeflow.modalities.classification import Subset
from mergeflow.modality import Examples
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, table
from studies.lab.claims import Samples, Verdict, all_within, with_interval, within
from studies.lab.inputs import State
from studies.lab.methods import USED
from studies.lab.plots import contours
from studies.lab.rows import select
from studies.theory.landscape import (
    Grid,
    Plane,
    centred_gram,
    distances,
    measure_grid,
    principal_components,
    principal_coordinates,
    principal_plane,
    roundness,
)
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style
from tasks.plotting.palette import INK, SERIES, SURFACE

LOWER = 0.1  # nat, of Σ L_t: what counts as lower
TOLERANCE = 1e-3  # of a path's reach: rounding of float32 weights
LABELS = {
    "base": "θ0",
    "average": "θ_avg",
    "cart": "CART, λ = 1, 8 %",
    "cart, best": "CART, best k and λ",
    "task_arithmetic": "task arithmetic, best λ",
    "task_arithmetic, largest": "task arithmetic, largest λ",
}
MARKS: dict[str, dict[str, Any]] = {
    "base": {"marker": "^", "label": "θ0"},
    "average": {"marker": "o", "label": "θ_avg"},
    "expert": {"marker": "*", "markersize": 13, "label": "θ_t"},
    "cart": {"marker": "*", "markersize": 13, "color": SERIES[0], "label": "CART, 8 %, λ = 1"},
    "task_arithmetic": {"marker": "s", "label": "task arithmetic"},
}


class Options(Section):
    experts: str  # the run whose experts are merged
    tasks: int = Field(ge=2)  # the first so many
    images: int = Field(ge=1)  # validation images per task
    ranks: list[float] = Field(min_length=3)  # the k of the paths beside 0.08 and 1, shares of the full rank
    scales: list[float] = Field(min_length=1)  # CART's λ beside 1
    # λ of task arithmetic beside 1/T, the largest the one that leaves the basin
    additions: list[float] = Field(min_length=2)
    size: int = Field(ge=3)  # points along each side of the paths' grid
    near: int = Field(ge=3)  # of the tasks' grids
    margin: float = Field(ge=0)  # room around the models, as a share of their box


@dataclass(frozen=True)
class Model:
    """A model by how it is made: `cart`, `low_rank` and `task_arithmetic` have λ and, but for the last, a rank k."""

    kind: str
    scale: float | None = None
    rank: float | None = None
    task: str | None = None


class Site:
    """One seed's experts, and all that is made of them."""

    def __init__(self, lab: Laboratory, run: str, seed: int, options: Options) -> None:
        self.lab, self.options = lab, options
        self.experts = lab.run(run).experts(seed)
        self.scorer: CandidateScorer = self.lab.scorer(self.experts)
        examples = self.lab.examples("validation")
        self.examples = {task: Subset.first(data, options.images) for task, data in examples.items()}

    def state(self, model: Model) -> State:
        """Return the weights; k = 0 is the anchor, for `low_rank` without what its other tensors add at k > 0."""
        if model.kind == "expert":
            assert model.task
            return self.experts[model.task]
        if model.kind == "base" or (model.kind == "low_rank" and model.rank == 0):
            return self.lab.base
        if model.kind == "average" or (model.kind == "cart" and model.rank == 0):
            return self.scorer.merge("average")
        rank = {} if model.rank is None else {"rank_ratio": model.rank}
        return self.scorer.merge(model.kind, **rank, scale=model.scale)

    def losses(self, state: Mapping[str, Any], examples: Mapping[str, Examples] | None = None) -> dict[str, float]:
        """Return L_t of every task, or on the examples given."""
        return self.lab.losses(state, self.examples if examples is None else examples)

    def addition(self) -> float:
        """Return task arithmetic's λ of the smallest multi-task loss."""
        tried = self.additions()
        return min(tried, key=lambda scale: sum(self.losses(self.state(Model("task_arithmetic", scale))).values()))

    def ranks(self) -> list[float]:
        return sorted({*self.options.ranks, USED, 1.0})

    def additions(self) -> list[float]:
        return sorted({*self.options.additions, 1 / len(self.experts)})

    def fitted(self, addition: float) -> dict[Model, State]:
        """Return the models that the plane of the paths is fitted to."""
        steps = [Model("cart", 1.0, k) for k in self.ranks()]
        steps += [Model("low_rank", addition, k) for k in self.ranks()]
        return {model: self.state(model) for model in (Model("base"), Model("average"), *steps)}

    def models(self, addition: float) -> Iterator[Model]:
        """Yield every model that is measured, those that share a direction after each other."""
        yield from (Model("base"), Model("average"), *(Model("expert", task=task) for task in self.experts))
        yield from (Model("task_arithmetic", scale) for scale in self.additions())
        for rank in (0.0, *self.ranks()):
            yield from (Model("cart", scale, rank) for scale in sorted({*self.options.scales, 1.0}))
            yield from (Model("low_rank", s, rank) for s in sorted({addition, 1 / len(self.experts), 1.0}))


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield the study's rows; `part` tells them apart.

    `models`: the validation loss of every model on every task, where the model lies on the plane of the paths (`x`,
    `y`), how far off it and how far away from the average; `chosen` marks task arithmetic with the best λ. `test`: loss
    and accuracy in % of the models of the first table (`model`). `fits`: what two components found from the models
    `found_from` explain of the variance, and what `share` of the distance from the average they show of each kind.
    `basins`: where the models lie on the plane of a task's expert, CART and task arithmetic, first seed. `grid`: the
    losses that the pictures of the first seed draw, on the plane of the paths (`plane` is "paths") and on each task's.
    """
    part = lab.first(options.tasks)
    run, first = options.experts, lab.run(options.experts).seeds[0]
    measured = part.by_run([run], partial(measure_seed, options=options))
    yield from measured
    drawn = {"seed": first}
    models = [row for row in measured if row["part"] == "models" and row["seed"] == first]
    basins = part.by_run([run], partial(draw_basins, options=options, models=models), [first], "basins_")
    paths = part.by_run([run], partial(draw_paths, options=options, models=models), [first], "paths_")
    for row in (*(row for row in basins if row["part"] == "basins"), *paths):
        yield {"part": row["part"], **drawn, **row}
    yield from ({"part": "grid", **drawn, **row} for row in basins if row["part"] == "grid")


def measure_seed(lab: Laboratory, run: str, seed: int, options: Options) -> Iterator[Row]:
    """Yield one seed's models: losses, places on the plane of the paths, distances from it and from the average."""
    site = Site(lab, run, seed, options)
    addition = site.addition()
    fitted = site.fitted(addition)
    plane, average = plane_of(fitted), fitted[Model("average")]
    lowest: tuple[float, Model] | None = None
    for model in site.models(addition):
        state = site.state(model)
        (x, y), off = plane.coordinates(state)
        away = float(distances(centred_gram({"model": state, "average": average}))[0, 1])
        measured = site.losses(state)
        if model.kind == "cart" and (lowest is None or sum(measured.values()) < lowest[0]):
            lowest = sum(measured.values()), model
        about = {"kind": model.kind, "scale": model.scale, "rank": model.rank, "off": off, "away": away}
        about |= {"x": float(x), "y": float(y), "chosen": model == Model("task_arithmetic", addition)}
        for task, loss in measured.items():
            yield {"part": "models", "seed": seed, **about, "expert": model.task, "task": task, "loss": loss}
    assert lowest
    yield from ({"part": "test", "seed": seed, **row} for row in look_at_test(site, lowest[1], addition))
    yield from ({"part": "fits", "seed": seed, **row} for row in fit_rows(site, fitted))


def plane_of(fitted: Mapping[Model, State]) -> Plane:
    return principal_plane(principal_components({str(model): state for model, state in fitted.items()}))


def fit_rows(site: Site, fitted: Mapping[Model, State]) -> Iterator[Row]:
    """Yield for each choice of fitted models what two components explain, and how much of the models they show."""
    points = {**fitted, **{Model("expert", task=task): state for task, state in site.experts.items()}}
    names = list(points)
    gram = centred_gram({str(model): state for model, state in points.items()})
    centre = names.index(Model("average"))
    away = distances(gram)[centre]
    experts = [i for i, model in enumerate(names) if model.kind in ("expert", "base", "average")]
    for title, chosen in (
        ("both paths, base, average (drawn)", list(range(len(fitted)))),
        ("experts, base, average", experts),
        ("all of these", list(range(len(names)))),
    ):
        fit = principal_coordinates(gram, chosen)
        seen = np.hypot(*(fit.places - fit.places[centre]).T)
        for kind in ("cart", "low_rank", "expert", "base"):
            share = np.mean([seen[i] / away[i] for i, model in enumerate(names) if model.kind == kind and away[i] > 0])
            yield {"found_from": title, "explained": float(fit.explained.sum()), "kind": kind, "share": float(share)}


def look_at_test(site: Site, best: Model, addition: float) -> Iterator[Row]:
    """Look once at test: losses and accuracies of the average, CART, its best point, and task arithmetic."""
    looked = {
        "base": Model("base"),
        "average": Model("average"),
        "cart": Model("cart", 1.0, USED),
        "cart, best": best,
        "task_arithmetic": Model("task_arithmetic", addition),
        "task_arithmetic, largest": Model("task_arithmetic", site.additions()[-1]),
    }
    for name, model in looked.items():
        state = site.state(model)
        accuracy = site.lab.accuracy(state, "test")
        for task, loss in site.losses(state, site.lab.examples("test")).items():
            yield {"model": name, "task": task, "loss": loss, "accuracy": 100 * accuracy[task]}


def draw_paths(lab: Laboratory, run: str, seed: int, options: Options, models: Sequence[Row]) -> Iterator[Row]:
    """Yield every task's loss on the plane of the paths, on a grid around the models of a seed but its experts."""
    site, addition = Site(lab, run, seed, options), addition_of(models)
    inside = [(row["x"], row["y"]) for row in models if in_picture(row, addition)]
    grid = Grid.around(list(dict.fromkeys(inside)), options.size, options.margin)
    yield from grid_rows("paths", grid, measure_grid(plane_of(site.fitted(addition)), grid, site.losses))


def addition_of(models: Sequence[Row]) -> float:
    return float(next(row["scale"] for row in models if row["chosen"]))


def in_picture(row: Row, addition: float) -> bool:
    """Models far outside, at scales that leave the basin, would make the rest small."""
    if row["kind"] in ("low_rank", "task_arithmetic"):
        return bool(row["scale"] <= addition)
    return bool(row["kind"] != "expert" and row["scale"] in (None, 1.0))


def draw_basins(lab: Laboratory, run: str, seed: int, options: Options, models: Sequence[Row]) -> Iterator[Row]:
    """Yield for each task its loss on the plane of its expert, CART and task arithmetic, and where models lie."""
    site = Site(lab, run, seed, options)
    cart = site.state(Model("cart", 1.0, USED))
    addition = site.state(Model("task_arithmetic", addition_of(models)))
    average = site.state(Model("average"))
    for task, expert in site.experts.items():
        projection = principal_components({"expert": expert, "cart": cart, "task_arithmetic": addition})
        places = {name: tuple(place.tolist()) for name, place in projection.coordinates.items()}
        plane = principal_plane(projection)
        grid = Grid.around(list(places.values()), options.near, options.margin)
        examples = {task: site.examples[task]}
        measured = measure_grid(plane, grid, lambda state, examples=examples: site.losses(state, examples))  # type: ignore[misc]
        further, off = projection.project({"average": average, "base": lab.base})
        places |= {name: tuple(place.tolist()) for name, place in further.items()}
        for kind, (x, y) in places.items():
            yield {"part": "basins", "task": task, "kind": kind, "x": x, "y": y, "off": off.get(kind)}
        yield from grid_rows(task, grid, measured)


def grid_rows(plane: str, grid: Grid, measured: Mapping[str, np.ndarray]) -> Iterator[Row]:
    for task, values in measured.items():
        for x, y, loss in grid.points(values):
            yield {"part": "grid", "plane": plane, "x": x, "y": y, "task": task, "loss": loss}


# What the rows are asked


def models_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each seed and model, with its multi-task loss Σ_t L_t as `total`."""
    models = select(rows, part="models")
    groups = models.groupby(["seed", "kind", "scale", "rank", "expert"], sort=False, dropna=False)
    first = groups[["x", "y", "off", "away", "chosen"]].first()
    return first.assign(total=groups.loss.sum()).reset_index()


def addition(models: pd.DataFrame) -> pd.Series:
    """Return task arithmetic's best λ by seed."""
    return select(models, chosen=True).set_index("seed").scale


def path(models: pd.DataFrame, kind: str, scale: float | pd.Series) -> pd.DataFrame:
    """Return the models of one λ, which may be each seed's own, over k."""
    of_kind = select(models, kind=kind)
    wanted = of_kind.seed.map(scale) if isinstance(scale, pd.Series) else scale
    return of_kind[of_kind.scale == wanted].sort_values(["seed", "rank"])


def wide(models: pd.DataFrame, value: str = "total") -> pd.DataFrame:
    return models.set_index(["rank", "seed"])[value].unstack("seed")


def lowest(models: pd.DataFrame) -> pd.DataFrame:
    """Return the model of the smallest multi-task loss of each seed."""
    return models.loc[models.groupby("seed").total.idxmin()].set_index("seed")


def named(models: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return one of the models that have a label, a row for each seed."""
    if name == "cart":
        return select(models, kind="cart", scale=1.0, rank=USED).set_index("seed")
    if name == "cart, best":
        return lowest(select(models, kind="cart"))
    if name == "task_arithmetic":
        return select(models, chosen=True).set_index("seed")
    if name == "task_arithmetic, largest":
        sums = select(models, kind="task_arithmetic")
        return select(sums, scale=sums.scale.max()).set_index("seed")
    return select(models, kind=name).set_index("seed")


def tasks_of(rows: pd.DataFrame) -> int:
    return int(select(rows, part="models").task.nunique())


def additions(models: pd.DataFrame, tasks: int) -> dict[str, float | pd.Series]:
    """Return the λ of the low-rank paths by name."""
    return {f"λ = 1/{tasks}": 1 / tasks, "best λ": addition(models), "λ = 1": 1.0}


def passes(rows: pd.DataFrame) -> tuple[Verdict, str]:
    models = models_of(rows)
    line, average = path(models, "cart", 1.0), named(models, "average").total
    least, used = lowest(line), named(models, "cart").total - average
    gained, away = least.total - average, wide(line, "away")
    ends = float((away.iloc[[0, -1]].max() / away.max().clip(lower=1e-30)).max())
    text = (
        f"at its ends it is {ends:.1e} of its reach away from θ_avg; Σ L_t less that at θ_avg: "
        f"{with_interval(gained, 2)} nat at the lowest point (k / full = "
        f"{', '.join(f'{rank:g}' for rank in least['rank'])} by seed), {with_interval(used, 2)} nat at "
        f"{100 * USED:g} %"
    )
    parts = {"lowest": (gained, -math.inf, -LOWER), "used": (used, -math.inf, -LOWER)}
    return all_within(parts) if ends < TOLERANCE else False, text


def round_path(rows: pd.DataFrame, kind: str) -> pd.Series:
    models = models_of(rows)
    line = path(models, kind, 1.0 if kind == "cart" else addition(models))
    return line.groupby("seed")[["x", "y"]].apply(lambda places: roundness([tuple(p) for p in places.to_numpy()]))


def over_cart(rows: pd.DataFrame) -> Samples:
    models = models_of(rows)
    ends = wide(path(models, "low_rank", addition(models))).iloc[-1]
    return {"Σ L_t at full rank, best λ, less CART's lowest at λ = 1": ends - wide(path(models, "cart", 1.0)).min()}


def full_rank(rows: pd.DataFrame) -> str:
    models = models_of(rows)
    ends = {name: wide(path(models, "low_rank", at)).iloc[-1] for name, at in additions(models, tasks_of(rows)).items()}
    return f"; at full rank: {', '.join(f'{with_interval(values, 2)} ({name})' for name, values in ends.items())}"


def leaves(rows: pd.DataFrame) -> tuple[Verdict, str]:
    models, tasks = models_of(rows), tasks_of(rows)
    mean = select(models, kind="task_arithmetic", scale=1 / tasks).set_index("seed").away
    apart = float((mean / named(models, "base").away.clip(lower=1e-30)).max())
    largest = named(models, "task_arithmetic, largest")
    risen = largest.total - named(models, "average").total
    text = (
        f"at λ = 1/{tasks} it is {apart:.1e} ‖θ0 − θ_avg‖ away from θ_avg; Σ L_t at λ = {largest.scale.iloc[0]:g} less "
        f"that at θ_avg: {with_interval(risen, 2)} nat"
    )
    return within(risen, low=0) if apart < TOLERANCE else False, text


def task_losses(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return a model's loss by seed and task."""
    losses, key = select(rows, part="models"), named(models_of(rows), name)
    losses = losses[losses.kind == key.kind.iloc[0]]
    same = losses.seed.map(key.scale).eq(losses.scale) | losses.scale.isna()
    same &= losses.seed.map(key["rank"]).eq(losses["rank"]) | losses["rank"].isna()
    return losses[same].set_index(["seed", "task"]).loss


def closer(rows: pd.DataFrame) -> Samples:
    """Return the share of the tasks whose loss is lower at CART than at task arithmetic."""
    lower = task_losses(rows, "cart") < task_losses(rows, "task_arithmetic")
    return {"tasks with a lower loss": 100 * lower.groupby("seed").mean()}


def mean_losses(rows: pd.DataFrame) -> str:
    models, tasks = models_of(rows), tasks_of(rows)
    ours, theirs = (with_interval(named(models, name).total / tasks, 2) for name in ("cart", "task_arithmetic"))
    return f"; mean L_t {ours} (CART), {theirs} (task arithmetic)"


# Claims, written before the run
# fmt: off

CLAIMS = [
    Claim("C8", "CART's path over k starts and ends at θ_avg and passes lower multi-task loss in between.",
          of=f"ends within {TOLERANCE:g} of the reach for every seed, and paired difference of Σ L_t ≤ −{LOWER} nat, "
             f"at the lowest point as at {100 * USED:g} %, which these losses did not choose", decide=passes),
    Claim("C8", "On the plane fitted to the paths the path over k is a loop, nearer to a circle than to a line out and "
          "back.", lambda rows: {"roundness on the plane of the paths": round_path(rows, "cart")},
          low=0.5, of="roundness, from a line's 0 to a circle's 1,", unit="", digits=2,
          also=lambda rows: "; roundness alone makes no loop: task arithmetic's path over k at its best λ, which does "
                            "not return to its start, closed by a line has "
                            f"{with_interval(round_path(rows, 'low_rank'), 2)}"),
    Claim("C8", "Task arithmetic's path over k ends farther from the common basin: at full rank its loss is above "
          "CART's best.", over_cart, low=0, of="paired difference", unit="nat", digits=2, also=full_rank),
    Claim("C8", "Over λ task arithmetic passes the average at λ = 1/T and leaves the common basin at large λ.",
          of=f"within {TOLERANCE:g} for every seed, and paired difference of Σ L_t ≥ 0", decide=leaves),
    Claim("C8", "CART is closer to the basins of the tasks: most tasks' loss is lower at CART than at task arithmetic.",
          closer, low=51, of="share of the tasks, more than half of them,", unit="%", digits=0, also=mean_losses),
]

# fmt: on


def model_table(rows: pd.DataFrame) -> pd.DataFrame:
    models, lines = models_of(rows), {}
    test = select(rows, part="test").groupby(["model", "seed"]).agg(loss=("loss", "sum"), accuracy=("accuracy", "mean"))
    for name, label in LABELS.items():
        model = named(models, name)
        lines[label] = [model.total, test.loss[name], test.accuracy[name], model.away, model.off]
    experts = select(models, kind="expert").groupby("seed")[["away", "off"]].mean()
    single = select(rows, part="models", kind="expert")
    single = single[single.task == single.expert].groupby("seed").loss.sum()
    lines["experts, each on its own task"] = [single, None, None, experts.away, experts.off]
    columns = ["Σ L_t, validation", "Σ L_t, test", "test accuracy, %", "‖θ − θ_avg‖", "off the plane"]
    digits = [2, 2, 1, 2, 2]
    cells = {
        label: ["" if v is None else with_interval(v, n) for v, n in zip(values, digits, strict=True)]
        for label, values in lines.items()
    }
    return pd.DataFrame(cells, index=columns).T


def fit_table(rows: pd.DataFrame) -> pd.DataFrame:
    kinds = {"cart": "CART's path", "low_rank": "low-rank path", "expert": "experts", "base": "θ0"}
    fits = select(rows, part="fits").replace({"kind": kinds}).rename(columns={"found_from": "components found from"})
    shares = fits.assign(explained=100 * fits.explained, share=100 * fits.share)
    explained = table(shares, "components found from", value="explained", digits=0)
    seen = table(shares, "components found from", "kind", value="share", digits=0)
    return explained.set_axis(["variance they explain, %"], axis=1).join(seen)


TABLES = {
    "Multi-task loss at the models themselves, and where they lie": model_table,
    "What two components show of the distance from the average, %, by the models they are found from": fit_table,
}
Places = Mapping[str, np.ndarray]
"""By the label of a path or a mark, points [n, 2] on a plane."""


def of_first(rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """Return the first seed's models, and where the marked ones lie on the plane of the paths."""
    models = select(models_of(rows), seed=rows.seed.iloc[0])
    marked = ("base", "average", "cart", "task_arithmetic")
    return models, {name: named(models, name)[["x", "y"]].to_numpy() for name in marked}


def over_ranks(models: pd.DataFrame, kind: str) -> Places:
    """Return CART's paths over k, or those of task arithmetic up to its best λ; larger ones leave the picture."""
    largest = math.inf if kind == "cart" else float(addition(models).iloc[0])
    scales = sorted(scale for scale in select(models, kind=kind).scale.unique() if scale <= largest)
    name = "CART" if kind == "cart" else "low rank"
    return {f"{name}, λ = {scale:g}": path(models, kind, scale)[["x", "y"]].to_numpy() for scale in scales}


def path_figure(rows: pd.DataFrame) -> Figure:
    """Draw the multi-task loss with the paths over k and over λ (the paper's Figure 11)."""
    models, marked = of_first(rows)
    over_scales = {
        "task arithmetic over λ": select(models, kind="task_arithmetic").sort_values("scale")[["x", "y"]].to_numpy(),
        "CART, 8 %, over λ": select(models, kind="cart", rank=USED).sort_values("scale")[["x", "y"]].to_numpy(),
    }
    grid = select(rows, part="grid", plane="paths")
    panels_of = [
        (
            "Multi-task loss, paths over k",
            grid,
            {**over_ranks(models, "cart"), **over_ranks(models, "low_rank")},
            marked,
        ),
        ("Multi-task loss, paths over λ", grid, over_scales, marked),
    ]
    return plane_panels(panels_of, 2, 4.6)


def task_figure(rows: pd.DataFrame) -> Figure:
    """Draw every task's loss on the same plane with CART's paths over k (the paper's Figure 5)."""
    models, marked = of_first(rows)
    shown = {name: marked[name] for name in ("average", "cart")}
    grids = select(rows, part="grid", plane="paths").groupby("task", sort=False)
    return plane_panels([(str(task), grid, over_ranks(models, "cart"), shown) for task, grid in grids])


def basin_figure(rows: pd.DataFrame) -> Figure:
    """Draw every task's loss on the plane of its expert, CART and task arithmetic (the paper's Figure 12)."""
    models = select(rows, part="basins", kind=["expert", "cart", "task_arithmetic"]).groupby("task", sort=False)
    return plane_panels([
        (str(task), select(rows, part="grid", plane=task), {}, {
            str(kind): place[["x", "y"]].to_numpy() for kind, place in on_plane.groupby("kind", sort=False)
        })
        for task, on_plane in models
    ])  # fmt: skip


def plane_panels(
    parts: Sequence[tuple[str, pd.DataFrame, Places, Places]], columns: int = 4, height: float = 2.75
) -> Figure:
    """Draw a panel for each title: the contours of a grid of losses, paths, and marked models."""
    figure, axes = panels(len(parts), columns, height)
    for axis, (title, grid, paths, marked) in zip(axes, parts, strict=True):
        dress(axis, title, grid="both")
        draw_contours(axis, grid)
        for number, (label, places) in enumerate(paths.items(), start=1):
            axis.plot(*places.T, label=label, **series_style(number) | {"markersize": 3})
        for name, places in marked.items():
            style = {"color": INK, "markersize": 7, "markeredgecolor": SURFACE, "linestyle": "", **MARKS[name]}
            axis.plot(*places.T, zorder=5, **style)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def rank_figure(rows: pd.DataFrame) -> Figure:
    """Draw the multi-task loss of the models themselves along the paths over k."""
    models = models_of(rows)
    lows = additions(models, tasks_of(rows))
    paths = [path(models, "low_rank", scale).assign(path=f"low rank, {name}") for name, scale in lows.items()]
    cart = select(models, kind="cart").sort_values(["scale", "rank"])
    long = pd.concat([cart.assign(path="CART, λ = " + cart.scale.map("{:g}".format)), *paths])
    how: dict[str, Any] = {"scale": "root", "ticks": (0, 0.01, 0.04, 0.16, 0.5, 1), "log_y": True}
    return curves(long, "rank", "path", "total", x_label="rank kept, share of full", y_label="Σ L_t, validation", **how)


def scale_figure(rows: pd.DataFrame) -> Figure:
    """Draw the multi-task loss of the models themselves over λ."""
    models = models_of(rows)
    sums, cart = select(models, kind="task_arithmetic"), select(models, kind="cart", rank=USED)
    long = pd.concat([sums.assign(path="task arithmetic"), cart.assign(path="CART, 8 %")])
    return curves(long, "scale", "path", "total", x_label="λ", y_label="Σ L_t, validation", log_y=True)


def draw_contours(panel: Axes, grid: pd.DataFrame) -> None:
    """Fill a panel with the contours of a loss, dense where it is low."""
    plane = grid.groupby(["y", "x"]).loss.sum().unstack("x")
    low = float(plane.min(axis=None))
    levels = low + max(float(plane.max(axis=None)) - low, 1e-6) * np.linspace(0, 1, 14) ** 2
    contours(panel, plane, levels.tolist(), "%.3g", every=3)


STUDY = Study(
    options=Options,
    runs=lambda options: [options.experts],
    splits=("validation", "test"),
    systems=("C8",),
    measure=measure,
    claims=CLAIMS,
    tables=TABLES,
    figures={
        "multi_task": path_figure,
        "tasks": task_figure,
        "basins": basin_figure,
        "ranks": rank_figure,
        "scales": scale_figure,
    },
)
