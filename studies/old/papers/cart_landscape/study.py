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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from mergeflow.evaluation import CandidateScorer, losses
from mergeflow.merging import configure
from mergeflow.modalities.subset import Subset
from mergeflow.modality import Examples
from studies.lab.inputs import Laboratory, State
from studies.old.papers.cart_landscape.results import figures, findings, notes, tables
from studies.old.papers.cart_landscape.rows import tidy_rows
from studies.old.papers.cart_landscape.seed import SHOWN
from studies.old.pieces import kept
from studies.old.results import StudyResult
from studies.old.rows import Row
from studies.theory.landscape import (
    Grid,
    Plane,
    centred_gram,
    distances,
    measure_grid,
    principal_components,
    principal_coordinates,
    principal_plane,
)
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    experts: the run whose experts are merged. tasks: the first so many. images: validation images per task. ranks: the
    k of the paths beside 0.08 and 1, shares of the full rank. scales: CART's λ beside 1.
    additions: λ of task arithmetic beside 1/T, the largest the one that leaves the basin. size: points along each side
    of the paths' grid; near: of the tasks' grids. margin: room around the models, as a share of their box.
    """

    experts: str
    tasks: int = Field(ge=2)
    images: int = Field(ge=1)
    ranks: list[float] = Field(min_length=3)
    scales: list[float] = Field(min_length=1)
    additions: list[float] = Field(min_length=2)
    size: int = Field(ge=3)
    near: int = Field(ge=3)
    margin: float = Field(ge=0)


@dataclass(frozen=True)
class Model:
    """A model by how it is made: `cart`, `low_rank` and `task_arithmetic` have λ and, but for the last, a rank k."""

    kind: str
    scale: float | None = None
    rank: float | None = None
    task: str | None = None


class Site:
    """One seed's experts, and all that is made of them."""

    def __init__(self, inputs: Laboratory, options: Options, seed: int) -> None:
        self.inputs, self.options = inputs, options
        self.experts = inputs.run(options.experts).experts(seed)
        self.scorer: CandidateScorer = inputs.scorer(self.experts)
        self.examples = {
            task: Subset.first(data, options.images) for task, data in inputs.examples("validation").items()
        }

    def state(self, model: Model) -> State:
        """Return the weights; k = 0 is the anchor, for `low_rank` without what its other tensors add at k > 0."""
        if model.kind == "expert":
            assert model.task
            return self.experts[model.task]
        if model.kind == "base" or (model.kind == "low_rank" and model.rank == 0):
            return self.inputs.base
        if model.kind == "average" or (model.kind == "cart" and model.rank == 0):
            return self.scorer.merge(configure("average"))
        rank = {} if model.rank is None else {"rank_ratio": model.rank}
        return self.scorer.merge(configure(model.kind, {**rank, "scale": model.scale}))

    def losses(self, state: Mapping[str, Any], examples: Mapping[str, Examples] | None = None) -> dict[str, float]:
        """Return L_t of every task, or on the examples given."""
        self.inputs.model.load(state)
        batch_size = self.inputs.io.section("evaluation").batch_size
        return losses(self.inputs.model, self.examples if examples is None else examples, batch_size)

    def addition(self) -> float:
        """Return task arithmetic's λ of the smallest multi-task loss."""
        tried = self.additions()
        return min(tried, key=lambda scale: sum(self.losses(self.state(Model("task_arithmetic", scale))).values()))

    def ranks(self) -> list[float]:
        return sorted({*self.options.ranks, SHOWN, 1.0})

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


DECLARED = Declaration(Options, runs=lambda options: [options.experts], splits=("validation", "test"), systems=("C8",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/cart_landscape`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    part = inputs.first(options.tasks)
    rows = []
    seeds = inputs.run(options.experts).seeds
    for done, seed in enumerate(seeds):
        io.report("seeds", done, len(seeds) + 2)
        rows.append(kept(io, f"seed_{seed}", partial(measure, part, options, seed)))
    io.report("planes", len(rows), len(rows) + 2)
    paths = kept(io, "paths", partial(draw_paths, part, options, rows[0]))
    basins = kept(io, "basins", partial(draw_basins, part, options, rows[0]))
    result = StudyResult(tables(rows), findings(rows), notes(rows, basins), tidy_rows(rows, paths, basins))
    result.write(io, figures(rows, paths, basins))


def measure(inputs: Laboratory, options: Options, seed: int) -> Row:
    """Return one seed's models: losses, places on the plane of the paths, distances from it and from the average.

    Args:
        inputs: the study's inputs.
        options: its choices.
        seed: of the experts.
    """
    site = Site(inputs, options, seed)
    addition = site.addition()
    fitted = site.fitted(addition)
    plane = _plane(fitted)
    average = fitted[Model("average")]
    models = []
    for model in site.models(addition):
        state = site.state(model)
        place, off = plane.coordinates(state)
        away = float(distances(centred_gram({"model": state, "average": average}))[0, 1])
        models.append({**vars(model), "losses": site.losses(state), "place": place, "off": off, "away": away})
    row = {"seed": seed, "tasks": inputs.tasks, "addition": addition, "models": models}
    return {**row, "fits": _fits(site, fitted), "test": _test(site, models, addition)}


def _plane(fitted: Mapping[Model, State]) -> Plane:
    return principal_plane(principal_components({str(model): state for model, state in fitted.items()}))


def _fits(site: Site, fitted: Mapping[Model, State]) -> dict[str, dict[str, Any]]:
    """Return for each choice of fitted models what two components explain, and how much of the models they show."""
    points = {**fitted, **{Model("expert", task=task): state for task, state in site.experts.items()}}
    names = list(points)
    gram = centred_gram({str(model): state for model, state in points.items()})
    centre = names.index(Model("average"))
    away = distances(gram)[centre]
    experts = [i for i, model in enumerate(names) if model.kind in ("expert", "base", "average")]
    found = {}
    for title, chosen in (
        ("both paths, base, average (drawn)", list(range(len(fitted)))),
        ("experts, base, average", experts),
        ("all of these", list(range(len(names)))),
    ):
        fit = principal_coordinates(gram, chosen)
        seen = np.hypot(*(fit.places - fit.places[centre]).T)
        shares = {
            kind: float(np.mean([seen[i] / away[i] for i, m in enumerate(names) if m.kind == kind and away[i] > 0]))
            for kind in ("cart", "low_rank", "expert", "base")
        }
        found[title] = {"explained": float(fit.explained.sum()), "shares": shares}
    return found


def _test(site: Site, models: list[Row], addition: float) -> dict[str, dict[str, dict[str, float]]]:
    """Look once at test: losses and accuracies of the average, CART, its best point, and task arithmetic."""
    best = min((one for one in models if one["kind"] == "cart"), key=lambda one: sum(one["losses"].values()))
    looked = {
        "base": Model("base"),
        "average": Model("average"),
        "cart": Model("cart", 1.0, SHOWN),
        "cart, best": Model("cart", best["scale"], best["rank"]),
        "task_arithmetic": Model("task_arithmetic", addition),
        "task_arithmetic, largest": Model("task_arithmetic", site.additions()[-1]),
    }
    found = {}
    for name, model in looked.items():
        state = site.state(model)
        losses = site.losses(state, site.inputs.examples("test"))
        found[name] = {"losses": losses, "accuracy": site.inputs.accuracy(state, "test")}
    return found


def draw_paths(inputs: Laboratory, options: Options, row: Row) -> Row:
    """Return every task's loss on the plane of the paths, on a grid around the models of a seed but its experts.

    Args:
        inputs: the study's inputs.
        options: its choices.
        row: as of `measure`, of one seed.
    """
    site = Site(inputs, options, row["seed"])
    plane = _plane(site.fitted(row["addition"]))
    inside = [one["place"] for one in row["models"] if _in_picture(one, row)]
    grid = Grid.around(inside, options.size, options.margin)
    losses = measure_grid(plane, grid, site.losses)
    return _drawn(grid, losses)


def _in_picture(one: Row, row: Row) -> bool:
    """Models far outside, at scales that leave the basin, would make the rest small."""
    if one["kind"] in ("low_rank", "task_arithmetic"):
        return bool(one["scale"] <= row["addition"])
    return bool(one["kind"] != "expert" and one["scale"] in (None, 1.0))


def draw_basins(inputs: Laboratory, options: Options, row: Row) -> Row:
    """Return for each task its loss on the plane of its expert, CART and task arithmetic.

    Args:
        inputs: the study's inputs.
        options: its choices.
        row: as of `measure`, of one seed.
    """
    site = Site(inputs, options, row["seed"])
    cart = site.state(Model("cart", 1.0, SHOWN))
    addition = site.state(Model("task_arithmetic", row["addition"]))
    average = site.state(Model("average"))
    found = {}
    for task, expert in site.experts.items():
        projection = principal_components({"expert": expert, "cart": cart, "task_arithmetic": addition})
        places = {name: tuple(place.tolist()) for name, place in projection.coordinates.items()}
        plane = principal_plane(projection)
        grid = Grid.around(list(places.values()), options.near, options.margin)
        own = {task: site.examples[task]}
        losses = measure_grid(plane, grid, lambda state, own=own: site.losses(state, own))  # type: ignore[misc]
        beside, off = projection.project({"average": average, "base": inputs.base})
        places |= {name: tuple(place.tolist()) for name, place in beside.items()}
        found[task] = {**_drawn(grid, losses), "places": places, "off": off}
    return found


def _drawn(grid: Grid, losses: Mapping[str, np.ndarray]) -> Row:
    return {
        "xs": grid.xs.tolist(),
        "ys": grid.ys.tolist(),
        "losses": {task: values.tolist() for task, values in losses.items()},
    }
