"""Study `many_tasks` (C1, C6): how do the merge methods compare on 8, 14 and 20 tasks?

**Question.** One expert per task, merged by every method of the field: who leads, and who loses least as tasks are
added? Above them stand the experts and joint training, below them the base.

**Method.** Every method merges the same experts of the first 8, 14 and 20 tasks. Its scale is chosen on validation,
walking a grid from its usual value until the mean has fallen by one point; every combination of its other arguments is
tried. CART's grid is the paper's: λ = 1, 1.2 … 3 and rank ratios of 4, 8, 16 and 32 %. Then one look at test.
AdaMerging learns its coefficients, one per task and tensor, from the entropy of unlabelled test batches, starting
from task arithmetic and from CART as chosen on validation; 80 steps of 0.01 let a coefficient go about as far as the
500 steps of 0.001 of its paper (the study `adaptation` varies rate, images and granularity). Joint training sees every
task's images in every step; `mima` merges and tunes in rounds. Normalised accuracy is (1/T) Σ_t merged_t / expert_t.

**Source.** CART, Tables 1 and 3, Figures 4 and 9, Appendix B; the further methods as in docs/methods.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field

from mergeflow import layout
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.evaluation.statistics import mean
from mergeflow.merging import configure
from mergeflow.search.grid import grid_of
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.adapting import Adaptation, Direction, adapt
from tasks.studies.inputs import State, StudyInputs
from tasks.studies.papers.many_tasks.results import figures, findings, notes, tables
from tasks.studies.pieces import ChosenScale, Row, choose_scale, grid, kept
from tasks.studies.results import StudyResult

STUDY = "many_tasks"
ADAPTED = {"task_vectors": ("adamerging_ta", "task_arithmetic"), "cart": ("adamerging_cart", "cart")}


class Scales(Section):
    """A grid of scales, walked from `start`."""

    low: float
    high: float
    step: float = Field(gt=0)
    start: float


class Sweep(Section):
    """What is tried of one method. `args`: every other argument's values."""

    scale: Scales | None = None
    args: dict[str, list[Any]] = Field(default_factory=dict)


class Descent(Section):
    """Adam on the coefficients."""

    lr: float = Field(gt=0)
    steps: int = Field(ge=1)


class Options(Section):
    """The study's choices.

    counts: numbers of tasks. methods: name in the catalog → what is tried. together: runs `NAME_COUNT` of training
    beside the merges, `joint` or `mima`. adapted: AdaMerging's directions, and how they descend.
    """

    counts: list[int] = Field(min_length=1)
    methods: dict[str, Sweep]
    together: list[str]
    adapted: dict[Direction, Descent]


def _runs(options: Options) -> list[str]:
    return ["experts", *(f"{name}_{count}" for name in options.together for count in options.counts)]


DECLARED = Declaration(Options, runs=_runs, splits=("validation", "test"), systems=("C1", "C6"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/many_tasks`."""
    whole = StudyInputs(io)
    options = Options.model_validate(whole.options(STUDY))
    pieces = [(count, seed) for count in options.counts for seed in whole.seeds]
    rows: list[Row] = []
    for done, (count, seed) in enumerate(pieces):
        io.report("counts and seeds", done, len(pieces))
        rows += measure(whole.first(count), options, count, seed)
    result = StudyResult(tables(rows), findings(rows), notes(rows))
    result.write(io.out(layout.study(STUDY)), figures(rows))


def measure(inputs: StudyInputs, options: Options, count: int, seed: int) -> list[Row]:
    """Return a row for each model: count, seed, model, test accuracy per task, chosen arguments."""
    experts = inputs.run("experts").experts(seed)
    scorer = inputs.scorer(experts)
    # The largest ratio that is asked for: factors beyond it need not be kept.
    scorer.renew_cache(max([0.01, *options.methods.get("cart", Sweep()).args.get("rank_ratio", [])]))
    measures: dict[str, Callable[[], Row]] = {
        "zero_shot": lambda: _fixed(inputs, inputs.base),
        "individual": lambda: {"test": inputs.individual(experts, "test")},
        **{name: partial(_together, inputs, f"{name}_{count}", seed) for name in options.together},
        **{name: partial(_merged, inputs, scorer, name, sweep) for name, sweep in options.methods.items()},
    }
    rows = {name: kept(inputs.io, f"{count}_{seed}_{name}", one) for name, one in measures.items()}
    for on, descent in options.adapted.items():
        name, static = ADAPTED[on]
        one = partial(_adapted, inputs, experts, on, descent, rows[static]["args"])
        rows[name] = kept(inputs.io, f"{count}_{seed}_{name}", one)
    return [{"tasks": count, "seed": seed, "model": name, **row} for name, row in rows.items()]


def _fixed(inputs: StudyInputs, state: State) -> Row:
    return {"test": inputs.accuracy(state, "test")}


def _together(inputs: StudyInputs, name: str, seed: int) -> Row:
    """Measure the one model that a joint or an iterative run ends with."""
    run = inputs.run(name)
    state = run.model(seed) if name.startswith("joint") else run.merged(seed, len(run.rounds(seed)))
    return _fixed(inputs, state)


def _merged(inputs: StudyInputs, scorer: CandidateScorer, method: str, sweep: Sweep) -> Row:
    """Choose a method's arguments on validation, look at test once."""
    found = [_along(inputs, scorer, method, sweep.scale, args) for args in grid_of(method, sweep.args)]
    best = max(found, key=lambda one: mean(one.validation))
    test = inputs.accuracy(scorer.merge(configure(method, best.args)), "test")
    edge = sweep.scale is not None and best.args["scale"] in (sweep.scale.low, sweep.scale.high)
    return {"test": test, "args": best.args, "tried": sum(one.tried for one in found), "edge": edge}


def _adapted(
    inputs: StudyInputs, experts: Mapping[str, State], on: Direction, descent: Descent, static: Mapping[str, Any]
) -> Row:
    """Adapt a coefficient per task and tensor on unlabelled test images, from where a static merge stands."""
    plan = Adaptation(on, "layer", "test", init=static["scale"], lr=descent.lr, steps=descent.steps)
    if on == "cart":
        plan = replace(plan, rank_ratio=static["rank_ratio"])
    return _fixed(inputs, adapt(inputs, experts, plan).state)


def _along(
    inputs: StudyInputs, scorer: CandidateScorer, method: str, scales: Scales | None, args: Mapping[str, Any]
) -> ChosenScale:
    if scales is None:
        return ChosenScale(dict(args), scorer.candidate(configure(method, args)), {}, 1)
    values = grid(scales.low, scales.high, scales.step)
    return choose_scale(inputs, scorer, method, values, scales.start, args, test=False)
