"""Study `adaptation` (C4): do coefficients learned without labels beat the static merge that they start from?

**Question.** AdaMerging learns how much of every expert a merge takes, by making the merged model sure of its
predictions on images without labels. Does it help, on task vectors and on CART's directions, with one coefficient per
expert or one per expert and layer? Must the images be those of the test set? What does a step cost with more experts?

**Method.** θ^l = anchor^l + Σ_t λ_t^l d_t^l with d_t = τ_t on θ0, or d_t = SVD_k(θ_t − θ̄) on the mean θ̄ (k = 8 % of
the smaller side; equation 8 of CART). λ is learned by Adam on

    L(λ) = Σ_t mean_x H(p_t(x; θ)),    H(p) = − Σ_c p_c log p_c,    ∂L/∂λ_t^l = ⟨∂L/∂θ^l, d_t^l⟩,

over a batch of every task a step; tensors that CART does not treat have no direction there. *Start*: task arithmetic
with the scale that is best on validation, and CART as its paper has it, k = 8 % and λ = 1; the result is held against
CART of that rank with λ from validation too, which is what the paper's table has as CART. *Images*: those of the test
set, as the papers do (their labels are not used), or those of validation alone, which leaves the test set unseen.
*Rate*: every rate is tried on validation images for all steps, on the first seed alone; the one with the highest
accuracy on validation is taken, where labels choose and do not adapt, and test cannot be read. `many_tasks` has the
same rule and the same starts. Layer-wise means one λ per tensor. ± is over seeds: the order of the batches, of experts
and of images.

**Source.** AdaMerging (Yang et al., ICLR 2024); CART, Section 4.3, equation 8, Algorithms 1 and 2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, get_args

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.evaluation.adamerging import entropies, write_learned
from mergeflow.evaluation.averages import mean
from mergeflow.merging import make_recipe
from mergeflow.merging.learned import Learned
from mergeflow.modalities.classification import Classification, Subset
from mergeflow.modality import Examples
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows, choose_scale, grid
from studies.lab.claims import Samples, Verdict
from studies.lab.inputs import State
from studies.lab.methods import (
    CART_START,
    FURTHER,
    IMPROVES,
    NOT_WORSE,
    Adaptation,
    Direction,
    Granularity,
    Split,
    adapt,
    at_end,
    choose_rate,
    ends_note,
    learn_on,
)
from studies.lab.plots import curves, dots, side_by_side
from studies.lab.rows import samples, select
from studies.theory.peak_memory import peak_tensor_bytes
from tasks.plotting.drawing import FULL_WIDTH, dress, panels
from tasks.plotting.panels import colour_bar, heat_map

SCALES = grid(0.05, 1.0, 0.05)  # of task arithmetic
CART_SCALES = grid(0.2, 3.0, 0.2)
NAMES = {"task_vectors": "task arithmetic", "cart": "CART"}
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
IMAGES: tuple[Split, ...] = get_args(Split)
KINDS = (  # weights of open_clip's blocks, and of BERT's
    *("attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
    *("query.weight", "key.weight", "value.weight", "output.dense.weight", "intermediate.dense.weight"),
)


class Options(Section):
    run: str = "experts"  # whose experts are merged
    tasks: int = Field(ge=1)  # the first so many
    counts: list[int]  # numbers of tasks whose memory and time are measured
    steps: int = Field(ge=1)  # steps, batch_size: of Adam, images per task
    batch_size: int = Field(ge=1)
    rates: list[float] = Field(min_length=1)  # learning rates tried
    rank_ratio: float = Field(gt=0, le=1)  # of CART
    every: int = Field(ge=1)  # steps between two looks at the course
    images: int = Field(ge=1)  # test images per task of such a look
    factors: list[float]  # of the static scale, where entropy and accuracy are compared


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield the study's rows, and write the recipe of each variant of the first seed; `part` tells rows apart.

    `merges` and `experts`: by seed and task, accuracy on test in % and entropy in nats. `coefficients`: every λ of what
    was adapted. `course`: of the first seed, mean accuracy of the first test images over the steps. `rates`: mean
    accuracy on validation over the steps of every rate, and whether the rate was chosen. `levels`: a λ for all experts.
    `labels`: with the labels as they are and moved, the coefficients, the loss of every step and the accuracy.
    `memory`: bytes of tensors by the number of tasks.
    """
    weighed = list(product(options.counts, DIRECTIONS))  # before anything else is in memory
    first = lab.run(options.run).seeds[0]
    memory = [
        lab.first(n).by_run([options.run], partial(weigh, options=options, on=on), [first], f"memory_{n}_{on}_")
        for n, on in weighed
    ]
    part = lab.first(options.tasks)
    starts = part.by_run([options.run], partial(measure_start, options=options), name="start_")
    yield from starts
    scales = {(row["seed"], row["on"]): row["scale"] for row in starts if "on" in row}
    tried = rates_of(part, options, {on: scales[first, on] for on in DIRECTIONS}, first)
    yield from measure_variants(part, options, scales, {variant: rows[0]["lr"] for variant, rows in tried.items()})
    for (on, how), trials in tried.items():
        about = {"part": "rates", "seed": first, "on": on, "granularity": how, "images": "validation"}
        for run in trials:
            chosen = {"lr": run["lr"], "chosen": run["lr"] == trials[0]["lr"]}
            yield from ({**about, **chosen, "step": int(n), "accuracy": value} for n, value in run["course"].items())
    yield from part.by_run([options.run], partial(compare_levels, options=options, scales=scales), [first], "levels_")
    moved = partial(move_labels, options=options, scale=scales[first, "cart"])
    yield from part.by_run([options.run], moved, [first], "labels_")
    for rows in memory:
        yield from rows


def expert_paths(lab: Laboratory, run: str, seed: int) -> dict[str, str]:
    runs = f"{layout.study_run(run)}/seed_{seed}/experts"
    return {task: f"{runs}/{task}/{layout.MODEL_FILE}" for task in lab.tasks}


def lazy_experts(lab: Laboratory, run: str, seed: int) -> dict[str, LazyStateDict]:
    return {task: open_checkpoint(lab.io.dep(path)) for task, path in expert_paths(lab, run, seed).items()}


def plan_of(
    options: Options, on: Direction, granularity: Granularity, images: Split, init: float, rate: float, seed: int
) -> Adaptation:
    settings = {name: getattr(options, name) for name in ("steps", "batch_size", "rank_ratio")}
    return Adaptation(on, granularity, images, init, rate, seed=seed, **settings)


def with_entropy(lab: Laboratory, state: State, **about: Any) -> list[Row]:
    """Return accuracy and entropy of a model on the test images of each task."""
    entropy = entropies(lab.model, lab.examples("test"), state)
    return [row | {"entropy": entropy[row["task"]]} for row in lab.accuracy_rows(state, "test", **about)]


def measure_start(lab: Laboratory, run: str, seed: int, options: Options) -> Iterator[Row]:
    """Yield both static merges where adapting starts, and `cart_tuned`, CART with its scale from validation."""
    experts = lab.run(run).experts(seed)
    scorer = lab.blind().scorer(experts)
    about = {"part": "merges", "seed": seed, "granularity": "static", "images": ""}
    best = choose_scale(lab, scorer, "task_arithmetic", SCALES, 0.3, test=False).args["scale"]
    for on, scale in zip(DIRECTIONS, (best, CART_START), strict=True):
        state = scorer.merge(plan_of(options, on, "task", "test", scale, 1.0, seed).static)
        yield from with_entropy(lab, state, **about, on=on, scale=scale)
    tuned = choose_scale(lab, scorer, "cart", CART_SCALES, CART_START, {"rank_ratio": options.rank_ratio})
    yield from accuracy_rows(tuned.test, **about, on="cart_tuned", scale=tuned.args["scale"])
    yield from accuracy_rows(lab.individual(experts, "test"), part="experts", seed=seed)


def rates_of(
    lab: Laboratory, options: Options, scales: Mapping[str, float], seed: int
) -> dict[tuple[Direction, Granularity], list[Row]]:
    """Return the course of every rate on validation, by direction and granularity, the best first."""
    variants = list(product(DIRECTIONS, GRANULARITIES))
    pieces = {
        f"rates_{on}_{how}_{options.run}_{seed}": lab.of_run(
            options.run, seed, partial(try_rates, options=options, on=on, how=how, scale=scales[on])
        )
        for on, how in variants
    }
    rows = lab.cached(pieces, "rates")
    return {(on, how): [row for row in rows if (row["on"], row["granularity"]) == (on, how)] for on, how in variants}


def try_rates(
    lab: Laboratory, run: str, seed: int, options: Options, on: Direction, how: Granularity, scale: float
) -> list[Row]:
    plan = plan_of(options, on, how, "validation", scale, 1.0, seed)
    tried = choose_rate(lab, lazy_experts(lab, run, seed), plan, options.rates, options.every)
    return [{**row, "on": on, "granularity": how} for row in tried]


def measure_variants(
    lab: Laboratory,
    options: Options,
    scales: Mapping[tuple[int, str], float],
    rates: Mapping[tuple[Direction, Granularity], float],
) -> list[Row]:
    """Return the rows of every variant and seed, and write the recipes of the first seed."""
    seeds = lab.run(options.run).seeds
    plans = [
        plan_of(options, on, how, images, scales[seed, on], rates[on, how], seed)
        for on, how, images, seed in product(DIRECTIONS, GRANULARITIES, IMAGES, seeds)
    ]
    pieces = {
        f"{plan.on}_{plan.granularity}_{plan.images}_{plan.lr:g}_{options.run}_{plan.seed}": lab.of_run(
            options.run, plan.seed, partial(measure_adapted, options=options, plan=plan)
        )
        for plan in plans
    }
    rows = lab.cached(pieces, "adaptations")
    for plan in plans:
        if plan.seed == seeds[0]:
            write_recipe(lab, options.run, plan, rows)
    return rows


def measure_adapted(lab: Laboratory, run: str, seed: int, options: Options, plan: Adaptation) -> Iterator[Row]:
    """Yield one adaptation: the merged model's accuracy and entropy, its coefficients, and the first seed's course."""
    course = dict[int, float]()
    few = {task: Subset.first(examples, options.images) for task, examples in lab.examples("test").items()}

    def watch(step: int, state: Mapping[str, Any]) -> None:
        if seed == lab.seeds[0] and step % options.every == 0:
            course[step] = 100 * mean(lab.scorer({}).state(state, few))

    made = adapt(lab, lazy_experts(lab, run, seed), plan, watch)
    watch(options.every * -(-options.steps // options.every), made.state)
    about = {name: getattr(plan, name) for name in ("seed", "on", "granularity", "images", "lr")}
    yield from with_entropy(lab, made.state, part="merges", **about)
    yield from ({"part": "coefficients", **about, **row} for row in by_tensor(made.learned))
    yield from ({"part": "course", **about, "step": step, "accuracy": value} for step, value in course.items())


def by_tensor(learned: Learned) -> Iterator[Row]:
    for task, tensors in learned.coefficients.items():
        for tensor, value in tensors.items():
            yield {"task": task, "tensor": tensor, "coefficient": value}


def weigh(lab: Laboratory, run: str, seed: int, options: Options, on: Direction) -> Iterator[Row]:
    """Yield the most bytes of tensors alive while two steps are learned with the laboratory's tasks, images apart."""
    experts = lazy_experts(lab, run, seed)
    lab.examples("test")  # they are there before
    plan = replace(plan_of(options, on, "layer", "test", 0.1, 0.01, 0), steps=2)
    peak = peak_tensor_bytes(lambda: learn_on(lab, experts, plan))
    size = sum(tensor.nbytes for tensor in lab.base.values())
    yield {"part": "memory", "tasks": len(lab.tasks), "on": on, "peak": peak, "model": size}


def compare_levels(
    lab: Laboratory, run: str, seed: int, options: Options, scales: Mapping[tuple[int, str], float]
) -> Iterator[Row]:
    """Yield accuracy and entropy on validation of the static merges around the chosen scale."""
    for on in DIRECTIONS:
        scorer = lab.blind().scorer(lab.run(run).experts(seed))
        for factor in options.factors:
            scale = factor * scales[seed, on]
            state = scorer.merge(plan_of(options, on, "task", "validation", scale, 1.0, 0).static)
            accuracy = mean(scorer.state(state))
            entropy = mean(entropies(lab.model, lab.examples("validation"), state))
            about = {"part": "levels", "seed": seed, "images": "validation", "on": on, "scale": scale}
            yield {**about, "accuracy": 100 * accuracy, "entropy": entropy}


class OtherLabels(Laboratory):
    """A laboratory on the model and device of another one, with every label moved to another example."""

    def __init__(self, lab: Laboratory) -> None:
        vars(self).update(vars(lab.with_heads(lab.heads)))

    def examples(self, split: str) -> dict[str, Examples]:
        given = {task: data for task, data in super().examples(split).items() if isinstance(data, Classification)}
        return {task: replace(data, labels=data.labels.roll(1)) for task, data in given.items()}


def move_labels(lab: Laboratory, run: str, seed: int, options: Options, scale: float) -> Iterator[Row]:
    """Yield the coefficients learned with the true labels and with others, and the first's accuracy against either."""
    plan = replace(plan_of(options, "cart", "layer", "test", scale, 0.1, 0), steps=3)
    worlds = {"true": lab, "moved": OtherLabels(lab)}
    made = {labels: adapt(world, lazy_experts(world, run, seed), plan) for labels, world in worlds.items()}
    for labels, world in worlds.items():
        about = {"part": "labels", "seed": seed, "labels": labels}
        yield from accuracy_rows(world.accuracy(made["true"].state, "test"), **about)
        yield from ({**about, "step": step, "loss": loss} for step, loss in enumerate(made[labels].learned.losses))
        yield from ({**about, **row} for row in by_tensor(made[labels].learned))


def write_recipe(lab: Laboratory, run: str, plan: Adaptation, rows: list[Row]) -> None:
    """Write `recipes/<variant>/recipe.yaml` with its coefficients, for `mergeflow merge` in the project folder."""
    coefficients: dict[str, dict[str, float]] = {}
    about = {name: getattr(plan, name) for name in ("seed", "on", "granularity", "images")}
    for row in rows:
        if row["part"] == "coefficients" and about.items() <= row.items():
            coefficients.setdefault(row["task"], {})[row["tensor"]] = row["coefficient"]
    args = {name: value for name, value in plan.call.args.items() if name != "scale"}
    models = {"base": layout.BASE_MODEL, "experts": expert_paths(lab, run, plan.seed)}
    recipe = make_recipe({"method": "adamerging", "args": args, **models})
    folder = layout.study(lab.io.stage.name)
    place = f"recipes/{plan.on}_{plan.granularity}_{plan.images}"
    write_learned(Learned(coefficients), recipe, lab.io.out(folder) / place, plan.images, f"{folder}/{place}")


# What the rows are asked


def static(rows: pd.DataFrame, on: str) -> pd.Series:
    """Return the mean test accuracy of a static merge in %, by seed."""
    return samples(rows, part="merges", granularity="static", on=on)


def adapted(rows: pd.DataFrame, on: str, granularity: str, images: str) -> pd.Series:
    """Return the mean test accuracy of a variant in %, by seed."""
    return samples(rows, part="merges", on=on, granularity=granularity, images=images)


def gains(on: str, granularity: str, rival: str, rows: pd.DataFrame) -> Samples:
    return {f"{images} images": adapted(rows, on, granularity, images) - static(rows, rival) for images in IMAGES}


def further(granularity: str, rows: pd.DataFrame) -> Samples:
    """Return the gain of CART by adapting on test images, over CART with λ from validation."""
    return {"8 tasks": gains("cart", granularity, "cart_tuned", rows)["test images"]}


def layer_less_task(rows: pd.DataFrame) -> Samples:
    return {
        f"{NAMES[on]} on {images} images": adapted(rows, on, "layer", images) - adapted(rows, on, "task", images)
        for on, images in product(DIRECTIONS, IMAGES)
    }


def cart_less_vectors(rows: pd.DataFrame) -> Samples:
    return {
        f"per {how}, {images} images": adapted(rows, "cart", how, images) - adapted(rows, "task_vectors", how, images)
        for how, images in product(GRANULARITIES, IMAGES)
    }


def static_less_adapted(rows: pd.DataFrame) -> Samples:
    return {"CART less AdaMerging + TA": static(rows, "cart_tuned") - adapted(rows, "task_vectors", "layer", "test")}


def same_labels(rows: pd.DataFrame) -> tuple[Verdict, str]:
    runs = {labels: select(rows, part="labels", labels=labels) for labels in ("true", "moved")}
    learned = [list(group.coefficient.dropna()) + list(group.loss.dropna()) for group in runs.values()]
    true, moved = (group.accuracy.mean() for group in runs.values())
    same = learned[0] == learned[1]
    return same, f"the same: {same}; accuracy {true:.1f} % against the true labels, {moved:.1f} % against the others"


def memory_growth(rows: pd.DataFrame) -> tuple[Verdict, str]:
    memory = select(rows, part="memory").astype({"tasks": int}).sort_values("tasks").groupby("on")
    growth = (memory.peak.last() - memory.peak.first()) / memory.model.first()
    growths = "; ".join(f"{NAMES[on]} {growth[on]:+.2f} models" for on in DIRECTIONS)
    few, most = memory.tasks.first().min(), memory.tasks.last().max()
    return bool(growth.max() < 0.5), f"peak of {most} tasks − peak of {few} tasks: {growths}"


# Claims, written before the run
# fmt: off

CLAIMS = [
    *(Claim("C4", "An adapted merge is at least as good as its static start.", partial(gains, on, how, on),
            low=NOT_WORSE, of="paired difference", setting=f"per {how} on {NAMES[on]}")
      for on, how in product(NAMES, GRANULARITIES)),
    *(Claim("C4", IMPROVES, partial(further, how), setting=f"per {how}", **FURTHER, ours=how != "layer")
      for how in GRANULARITIES),
    Claim("C4", "Layer-wise coefficients are at least as good as task-wise ones.", layer_less_task,
          low=NOT_WORSE, of="paired difference"),
    Claim("C4", "AdaMerging on CART's directions is better than on task vectors.", cart_less_vectors,
          low=0, of="paired difference"),
    Claim("C4", "CART without adaptation, λ from validation, is better than task vectors adapted per layer on test "
          "images.", static_less_adapted, low=0, of="paired difference"),
    Claim("C4", "Labels have no part: with every label moved to another image the coefficients are the same, bit for "
          "bit.", of="equal bits; one seed decides it", decide=same_labels),
    Claim("C4", "Memory while learning does not depend on the number of tasks.", decide=memory_growth, ours=True,
          of="growth below half a model; counted in bytes, the same for every seed"),
]

# fmt: on


def accuracy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return start and adapted accuracy of every variant, with the entropy, λ or the rate of learning it."""
    merges = select(rows, part="merges")
    named = merges.assign(directions=merges.on.map({**NAMES, "cart_tuned": "CART, λ from validation"}))
    columns = {"accuracy": "test accuracy, %", "entropy": "entropy, nats", "scale": "λ", "lr": "learning rate"}
    digits = {"entropy": 3, "scale": 2, "lr": 3}
    made = side_by_side(named, ["directions", "granularity", "images"], columns, digits)
    return made.replace("nan.*", "", regex=True)


def rate_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return validation accuracy over the steps at every learning rate, and which was chosen."""
    part = select(rows, part="rates")
    part = part.assign(
        on=part.on.map(NAMES), step=part.step.astype(int), chosen=part.chosen.map({True: "×", False: ""})
    )
    keys = ["on", "granularity", "lr", "chosen"]
    wide = part.pivot_table(index=keys, columns="step", values="accuracy", sort=False)
    return wide.round(1).rename_axis(["directions", "coefficients per", "learning rate", "chosen"])


TABLES = {
    "Test accuracy of static merges and of what is adapted from them": accuracy_table,
    "Validation accuracy over the steps, %, by learning rate, adapted on validation images, first seed": rate_table,
    "One λ for all experts: accuracy and entropy on validation, first seed": lambda rows: side_by_side(
        select(rows, part="levels"), ["on", "scale"], {"accuracy": "accuracy, %", "entropy": "nats"}, {"entropy": 3}
    ),
}


def accuracy_figure(rows: pd.DataFrame) -> Figure:
    """Draw the accuracy of every variant beside its static start."""
    return dots(
        select(rows, part="merges", on=list(NAMES)),
        {"static": {"granularity": "static"}, **{f"per {how}": {"granularity": how} for how in GRANULARITIES}},
        {"static start": {"images": ""}, **{f"adapted on {images} images": {"images": images} for images in IMAGES}},
        panel="on", labels=NAMES, y_label="mean test accuracy, %", sharey=True,
        level=lambda group: samples(group, granularity="static").mean(),
    )  # fmt: skip


def coefficient_figure(rows: pd.DataFrame) -> Figure:
    """Draw the learned coefficients as heat maps, task × matrix from first to last layer, mean over seeds."""
    coefficients = select(rows, part="coefficients", granularity="layer", images="test")
    coefficients = coefficients[coefficients.tensor.str.endswith(KINDS)]
    figure, axes = panels(len(NAMES), 1, 3.2)
    figure.set_size_inches(FULL_WIDTH, 3.2 * len(NAMES))
    for axis, (on, name) in zip(axes, NAMES.items(), strict=True):
        wide = select(coefficients, on=on).pivot_table("coefficient", "task", "tensor", sort=False)
        dress(axis, f"λ, {name}", "matrix, first block to last", grid="x")
        drawn = heat_map(axis, range(len(wide.columns)), range(len(wide)), wide.to_numpy())
        axis.set_yticks(range(len(wide)), labels=wide.index)
        colour_bar([axis], drawn, "")
    return figure


def course_figure(rows: pd.DataFrame) -> Figure:
    """Draw test accuracy over the steps, a line per variant of the first seed."""
    course = select(rows, part="course")
    variants = course.assign(variant="per " + course.granularity + ", " + course.images + " images")
    return curves(variants, "step", "variant", panel="on", labels=NAMES, x_label="steps", y_label="test accuracy, %")


def rates_at_ends(rows: pd.DataFrame) -> Iterator[str]:
    """Yield the chosen learning rates at an end of those tried."""
    rates = select(rows, part="rates")
    for row in select(rates, chosen=True).drop_duplicates(["on", "granularity"]).itertuples():
        if at_end(row.lr, rates.lr):
            yield f"learning rate {row.lr:g} ({NAMES[row.on]}, per {row.granularity})"


STUDY = Study(
    options=Options,
    runs=lambda options: [options.run],
    splits=("validation", "test"),
    systems=("C4",),
    measure=measure,
    claims=CLAIMS,
    tables=TABLES,
    figures={
        "accuracy": accuracy_figure,
        "coefficients": coefficient_figure,
        "course": course_figure,
    },
    notes=lambda rows, options: ends_note(rates_at_ends(rows)),
)
