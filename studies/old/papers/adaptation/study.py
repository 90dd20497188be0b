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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, get_args

from pydantic import Field

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.evaluation.adamerging import entropies, write_learned
from mergeflow.evaluation.averages import mean
from mergeflow.merging import make_recipe
from mergeflow.merging.learned.adamerging import Learned
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.subset import Subset
from mergeflow.modality import Examples
from studies.lab.adapting import (
    CART_START,
    Adaptation,
    Direction,
    Granularity,
    adapt,
    choose_rate,
    learn_on,
)
from studies.lab.inputs import Laboratory, State
from studies.old.papers.adaptation.results import figures, result
from studies.old.papers.adaptation.rows import write_csv
from studies.old.papers.adaptation.tables import time_tables
from studies.old.papers.adaptation.variants import Variant
from studies.old.pieces import choose_scale, grid, kept
from studies.old.results import keep_times
from studies.old.rows import Row
from studies.theory.peak_memory import peak_tensor_bytes
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

RUN = "experts"
SCALES = grid(0.05, 1.0, 0.05)  # of task arithmetic
CART_SCALES = grid(0.2, 3.0, 0.2)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


class Options(Section):
    """The study's choices.

    tasks: the first so many are merged. counts: numbers of tasks whose memory and time are measured. steps, batch_size:
    of Adam, images per task. rates: learning rates tried. rank_ratio: of CART. every: steps between two looks at the
    course. images: test images per task of such a look. factors: of the static scale, where entropy and accuracy are
    compared.
    """

    tasks: int = Field(ge=1)
    counts: list[int]
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    rates: list[float] = Field(min_length=1)
    rank_ratio: float = Field(gt=0, le=1)
    every: int = Field(ge=1)
    images: int = Field(ge=1)
    factors: list[float]


DECLARED = Declaration(Options, runs=lambda options: [RUN], splits=("validation", "test"), systems=("C4",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/adaptation`: the result, `coefficients.csv`, and a recipe for each variant."""
    everything = Laboratory(io)
    options = DECLARED.chosen(io)
    inputs = everything.first(options.tasks)
    memory = []
    for done, (count, on) in enumerate(product(options.counts, get_args(Direction))):
        io.report("memory", done, 2 * len(options.counts))
        memory.append(kept(io, f"memory_{count}_{on}", partial(weigh, everything.first(count), options, on)))
    seeds = inputs.run(RUN).seeds
    starts = [kept(io, f"start_{seed}", partial(start, inputs, options, seed)) for seed in seeds]
    tried, rates = choose_rates(inputs, options, starts[0])
    pieces = list(product(Variant.all(), starts))
    rows = []
    for done, (variant, found) in enumerate(pieces):
        io.report("adaptation", done, len(pieces))
        rows.append(measure(inputs, options, variant, found, rates[variant.on, variant.granularity]))
    levels = kept(io, "levels", lambda: {"rows": compare_levels(inputs, options, starts[0])})["rows"]
    blind = kept(io, "labels", partial(permute_labels, inputs, options, starts[0]))
    keep_times(io, time_tables(rows, memory))
    folder = result(rows, starts, tried, memory, levels, blind).write(io, figures(rows, starts, memory))
    write_csv(folder / "coefficients.csv", rows)
    write_recipes(inputs, options, folder, [row for row in rows if row["seed"] == inputs.seeds[0]])


def lazy_experts(inputs: Laboratory, seed: int) -> dict[str, LazyStateDict]:
    """Return the experts, left on disk."""
    return {task: open_checkpoint(inputs.io.dep(path)) for task, path in expert_paths(inputs, seed).items()}


def expert_paths(inputs: Laboratory, seed: int) -> dict[str, str]:
    """Return where the experts are, from the project folder."""
    runs = f"{layout.study_run(RUN)}/seed_{seed}/experts"
    return {task: f"{runs}/{task}/{layout.MODEL_FILE}" for task in inputs.tasks}


def start(inputs: Laboratory, options: Options, seed: int) -> Row:
    """Return both static merges where adapting starts, and `cart_tuned`, CART with its scale from validation.

    Args:
        inputs: the study's inputs.
        options: its choices.
        seed: of the experts.
    """
    experts, found = inputs.run(RUN).experts(seed), Row()
    scorer = inputs.blind().scorer(experts)
    best = choose_scale(inputs, scorer, "task_arithmetic", SCALES, 0.3, test=False).args["scale"]
    for on, scale in (("task_vectors", best), ("cart", CART_START)):
        plan = _plan(options, Variant(on, "task", "test"), scale, 1.0, seed)  # type: ignore[arg-type]
        state = scorer.merge(plan.static)
        entropy = _entropy(inputs, state, "test")
        found[on] = {"scale": scale, "test": inputs.accuracy(state, "test"), "entropy": entropy}
    tuned = choose_scale(inputs, scorer, "cart", CART_SCALES, CART_START, {"rank_ratio": options.rank_ratio})
    found["cart_tuned"] = {"scale": tuned.args["scale"], "test": tuned.test}
    return {"seed": seed, **found, "experts": inputs.individual(experts, "test")}


def choose_rates(inputs: Laboratory, options: Options, found: Row) -> tuple[list[Row], dict[tuple[str, str], float]]:
    """Return the runs on validation images with every learning rate, and the rate that is best there.

    Args:
        inputs: the study's inputs.
        options: its choices.
        found: the start of one seed, as of `start`.
    """
    tried: list[Row] = []
    rates: dict[tuple[str, str], float] = {}
    pairs = list(product(DIRECTIONS, get_args(Granularity)))
    for done, (on, granularity) in enumerate(pairs):
        inputs.io.report("learning rates", done, len(pairs))
        plan = _plan(options, Variant(on, granularity, "validation"), found[on]["scale"], 1.0, found["seed"])
        work = partial(_rates, inputs, options, plan)
        own = kept(inputs.io, f"rates_{on}_{granularity}", work)["rows"]
        rates[on, granularity] = own[0]["lr"]
        tried += [{"on": on, "granularity": granularity, **row} for row in own]
    return tried, rates


def _rates(inputs: Laboratory, options: Options, plan: Adaptation) -> Row:
    experts = lazy_experts(inputs, plan.seed)
    return {"rows": choose_rate(inputs, experts, plan, options.rates, options.every)}


def measure(inputs: Laboratory, options: Options, variant: Variant, found: Row, rate: float) -> Row:
    """Return one adaptation: coefficients, course, and the merged model's accuracy and entropy.

    Args:
        inputs: the study's inputs.
        options: its choices.
        variant: what is adapted, how finely, and on which images.
        found: the start of the seed, as of `start`.
        rate: Adam's learning rate.
    """
    name = f"{variant.on}_{variant.granularity}_{variant.images}_{rate:g}_{found['seed']}"
    return kept(inputs.io, name, partial(_measure, inputs, options, variant, found, rate))


def _measure(inputs: Laboratory, options: Options, variant: Variant, found: Row, rate: float) -> Row:
    seed, course = found["seed"], []
    few = {task: Subset.first(examples, options.images) for task, examples in inputs.examples("test").items()}

    def watch(step: int, state: Mapping[str, Any]) -> None:
        if seed == inputs.seeds[0] and step % options.every == 0:
            accuracy = inputs.scorer({}).state(state, few)
            course.append({"step": step, "accuracy": 100 * mean(accuracy)})

    plan = _plan(options, variant, found[variant.on]["scale"], rate, seed)
    made = adapt(inputs, lazy_experts(inputs, seed), plan, watch)
    watch(options.every * -(-options.steps // options.every), made.state)
    return {
        "on": variant.on,
        "granularity": variant.granularity,
        "images": variant.images,
        "seed": seed,
        "lr": rate,
        "init": plan.init,
        "test": inputs.accuracy(made.state, "test"),
        "entropy": {"test": _entropy(inputs, made.state, "test")},
        "coefficients": made.learned.coefficients,
        "losses": made.learned.losses,
        "course": course,
        "seconds": made.seconds,
    }


def _plan(options: Options, variant: Variant, init: float, rate: float, seed: int) -> Adaptation:
    return Adaptation(
        on=variant.on,
        granularity=variant.granularity,
        images=variant.images,
        init=init,
        lr=rate,
        steps=options.steps,
        batch_size=options.batch_size,
        rank_ratio=options.rank_ratio,
        seed=seed,
    )


def _entropy(inputs: Laboratory, state: State, split: str) -> dict[str, float]:
    return entropies(inputs.model, inputs.examples(split), state)


def weigh(inputs: Laboratory, options: Options, on: Direction) -> Row:
    """Return the time of a step, and the most bytes of tensors alive while two steps are learned, images apart.

    Args:
        inputs: the study's inputs, with as many tasks as are weighed.
        options: its choices.
        on: which directions the coefficients multiply.
    """
    experts, size = lazy_experts(inputs, inputs.seeds[0]), sum(tensor.nbytes for tensor in inputs.base.values())
    inputs.examples("test")  # they are there before
    plan = replace(_plan(options, Variant(on, "layer", "test"), 0.1, 0.01, 0), steps=2)
    peak = peak_tensor_bytes(lambda: learn_on(inputs, experts, plan))
    _, seconds = learn_on(inputs, experts, replace(plan, steps=4))
    return {"tasks": len(inputs.tasks), "on": on, "model": size, "peak": peak, "seconds": seconds}


def compare_levels(inputs: Laboratory, options: Options, found: Row) -> list[Row]:
    """Return accuracy and entropy on validation of the static merges around the chosen scale.

    Args:
        inputs: the study's inputs.
        options: its choices; `factors` of the chosen scale are tried.
        found: the start of one seed, as of `start`.
    """
    rows = []
    for on in DIRECTIONS:
        scorer = inputs.blind().scorer(inputs.run(RUN).experts(found["seed"]))
        for factor in options.factors:
            scale = factor * found[on]["scale"]
            state = scorer.merge(_plan(options, Variant(on, "task", "validation"), scale, 1.0, 0).static)
            accuracy, entropy = mean(scorer.state(state)), mean(_entropy(inputs, state, "validation"))
            rows.append({"on": on, "scale": scale, "accuracy": 100 * accuracy, "entropy": entropy})
    return rows


class _OtherLabels(Laboratory):
    """The same examples with every label moved to another example."""

    def examples(self, split: str) -> dict[str, Examples]:
        found = {task: one for task, one in super().examples(split).items() if isinstance(one, Classification)}
        return {task: replace(one, labels=one.labels.roll(1)) for task, one in found.items()}


def permute_labels(inputs: Laboratory, options: Options, found: Row) -> Row:
    """Return what is learned with the true labels and with others, and the first's accuracy against either.

    Args:
        inputs: the study's inputs.
        options: its choices.
        found: the start of one seed, as of `start`.
    """
    others = _OtherLabels(inputs.io).first(len(inputs.tasks))
    plan = replace(_plan(options, Variant("cart", "layer", "test"), found["cart"]["scale"], 0.1, 0), steps=3)
    true, moved = (adapt(each, lazy_experts(each, found["seed"]), plan) for each in (inputs, others))
    runs = {
        labels: {
            "coefficients": made.learned.coefficients,
            "losses": made.learned.losses,
            "accuracy": each.accuracy(true.state, "test"),
        }
        for labels, made, each in (("true", true, inputs), ("moved", moved, others))
    }
    return {"seed": found["seed"], "runs": runs}


def write_recipes(inputs: Laboratory, options: Options, folder: Any, rows: Sequence[Row]) -> None:
    """Write `recipes/<variant>/recipe.yaml` with its coefficients, for `mergeflow merge` in the project folder.

    Args:
        inputs: the study's inputs.
        options: its choices.
        folder: where `recipes/` is made.
        rows: adaptations, as of `measure`, each variant at most once.
    """
    for row in rows:
        variant = Variant(row["on"], row["granularity"], row["images"])
        plan = _plan(options, variant, row["init"], row["lr"], row["seed"])
        recipe = make_recipe(
            {
                "method": "adamerging",
                "args": {name: value for name, value in plan.call.args.items() if name != "scale"},
                "base": layout.BASE_MODEL,
                "experts": expert_paths(inputs, row["seed"]),
            }
        )
        place = f"recipes/{variant.folder}"
        called = f"{layout.study(inputs.io.stage.name)}/{place}"
        write_learned(Learned(row["coefficients"]), recipe, folder / place, variant.images, called)
