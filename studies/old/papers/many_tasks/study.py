"""Study `many_tasks` (C1, C2, C4, C6): how do the merge methods compare on 8, 14 and 20 tasks?

**Question.** One expert per task, merged by every method of the field: who leads, and who loses least as tasks are
added? Above them stand the experts and joint training, below them the base.

**Method.** Every method merges the same experts of the first 8, 14 and 20 tasks. Its scale is chosen on validation,
walking a grid from its usual value until the mean has fallen by one point; every combination of its other arguments is
tried. Larger ranks than are tried here are the study rank_curve's. Then one look at test. AdaMerging learns its
coefficients, one per task and tensor, from the entropy of unlabelled test batches, starting from task arithmetic as
chosen on validation and from CART as the paper has it, 8 % and λ = 1. Its rate is chosen on validation for each number
of tasks, on the first seed, by the rule of the study `adaptation`. Joint training sees every task's images in every
step; MIMA merges and tunes in rounds; all training has as many steps a task as the experts. Normalised accuracy is
(1/T) Σ_t merged_t / expert_t. ± is over seeds: the order of the batches.

**Source.** CART, Tables 1 and 3, Figures 4 and 9, Appendix B; the further methods as in docs/methods.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field

from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure
from mergeflow.search.candidates import grid_of
from studies.lab.adapting import CART_START, Adaptation, Direction, adapt, choose_rate
from studies.lab.inputs import Laboratory, State
from studies.lab.sweeps import ADAPTED, Scales, Sweep, ranges_of
from studies.old.ends import at_end, ends_of
from studies.old.papers.many_tasks.findings import findings
from studies.old.papers.many_tasks.results import figures, notes, tables, tidy_rows
from studies.old.pieces import ChosenScale, choose_scale, grid, kept, kept_all
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Adapting(Section):
    """AdaMerging. directions: what is scaled. counts: numbers of tasks. rates: tried on validation. steps: of Adam."""

    directions: list[Direction]
    counts: list[int]
    rates: list[float]
    steps: int = Field(ge=1)


class Together(Section):
    """Training beside the merges. label: for readers. counts: the numbers of tasks of its runs NAME_COUNT."""

    label: str
    counts: list[int] = Field(min_length=1)


class Options(Section):
    """The study's choices.

    counts: numbers of tasks. methods: name in the catalog → what is tried. together: joint and iterative runs by name.
    adapted: AdaMerging.
    """

    counts: list[int] = Field(min_length=1)
    methods: dict[str, Sweep]
    together: dict[str, Together]
    adapted: Adapting


def _runs(options: Options) -> list[str]:
    return ["experts", *(f"{name}_{count}" for name, one in options.together.items() for count in one.counts)]


DECLARED = Declaration(Options, runs=_runs, splits=("validation", "test"), systems=("C1", "C2", "C4", "C6"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/many_tasks`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    first, *others = inputs.run("experts").seeds
    rows: list[Row] = []
    for seeds in ([first], others):  # the first chooses AdaMerging's rates, which the others read
        # the longest first, so that no processor waits long at the end
        asked = [(count, seed) for count in sorted(options.counts, reverse=True) for seed in seeds]
        measures = {f"{count}_{seed}": partial(measure, inputs, options, count, seed) for count, seed in asked}
        rows += [row for one in kept_all(io, measures, "counts and seeds") for row in one["rows"]]
    rows.sort(key=lambda row: options.counts.index(row["tasks"]))
    labels = {name: one.label for name, one in options.together.items()}
    result = StudyResult(
        tables(rows, labels),
        findings(rows, labels),
        notes(rows, labels),
        tidy_rows(rows),
    )
    result.write(io, figures(rows, labels))


def measure(whole: Laboratory, options: Options, count: int, seed: int) -> Row:
    """Return as `rows` a row for each model: count, seed, model, test accuracy per task, chosen arguments.

    Args:
        whole: the study's inputs.
        options: its choices.
        count: how many tasks, the first ones.
        seed: of the experts.
    """
    inputs = whole.first(count)
    experts = inputs.run("experts").experts(seed)
    scorer = inputs.blind().scorer(experts)
    # The largest ratio that is asked for: factors beyond it need not be kept.
    scorer.renew_cache(max([0.01, *options.methods.get("cart", Sweep()).args.get("rank_ratio", [])]))
    trained = [
        name
        for name, one in options.together.items()
        if count in one.counts and seed in inputs.run(f"{name}_{count}").seeds
    ]
    measures: dict[str, Callable[[], Row]] = {
        "zero_shot": lambda: _fixed(inputs, inputs.base),
        "individual": lambda: {"test": inputs.individual(experts, "test")},
        **{name: partial(_together, inputs, f"{name}_{count}", seed) for name in trained},
        **{name: partial(_merged, inputs, scorer, name, sweep) for name, sweep in options.methods.items()},
    }
    rows = {name: kept(inputs.io, f"{count}_{seed}_{name}", one) for name, one in measures.items()}
    if count in options.adapted.counts:
        for on in options.adapted.directions:
            one = partial(_adapted, inputs, experts, _start(options.adapted, on, rows), options.adapted, count, seed)
            rows[ADAPTED[on]] = kept(inputs.io, f"{count}_{seed}_{ADAPTED[on]}", one)
    return {"rows": [{"tasks": count, "seed": seed, "model": name, **row} for name, row in rows.items()]}


def _start(adapting: Adapting, on: Direction, rows: Mapping[str, Row]) -> Adaptation:
    """Return where AdaMerging starts: task arithmetic as validation chose it, or CART as the paper has it."""
    init = rows["task_arithmetic"]["args"]["scale"] if on == "task_vectors" else CART_START
    return Adaptation(on, "layer", "test", init=init, lr=adapting.rates[0], steps=adapting.steps)


def _fixed(inputs: Laboratory, state: State) -> Row:
    return {"test": inputs.accuracy(state, "test")}


def _together(inputs: Laboratory, name: str, seed: int) -> Row:
    """Measure the one model that a joint or an iterative run ends with."""
    run = inputs.run(name)
    state = run.model(seed) if name.startswith("joint") else run.merged(seed, len(run.rounds(seed)))
    return _fixed(inputs, state)


def _merged(inputs: Laboratory, scorer: CandidateScorer, method: str, sweep: Sweep) -> Row:
    """Choose a method's arguments on validation, look at test once."""
    found = [_along(inputs, scorer, method, sweep.scale, args) for args in grid_of(method, sweep.args)]
    best = max(found, key=lambda one: mean(one.validation))
    test = inputs.accuracy(scorer.merge(configure(method, best.args)), "test")
    chosen = {"validation": best.validation, "args": best.args, "tried": sum(one.tried for one in found)}
    return {"test": test, **chosen, "ends": ends_of(best.args, ranges_of(sweep))}


def _adapted(
    inputs: Laboratory, experts: Mapping[str, State], plan: Adaptation, adapting: Adapting, count: int, seed: int
) -> Row:
    """Adapt a coefficient per task and tensor on unlabelled test images, with the rate that validation chose."""
    first = inputs.run("experts").seeds[0]
    name, every = f"{count}_rates_{plan.on}", max(adapting.steps // 4, 1)

    def choose() -> Row:
        assert seed == first, "the first seed is measured first"
        return {"rows": choose_rate(inputs, experts, plan, adapting.rates, every)}

    tried = kept(inputs.io, name, choose)["rows"]
    plan = replace(plan, lr=tried[0]["lr"], seed=seed)
    static = inputs.accuracy(inputs.scorer(experts).merge(plan.static), "test")
    ends = ["rate"] if seed == first and at_end(plan.lr, adapting.rates) else []  # one choice, for all seeds
    return {**_fixed(inputs, adapt(inputs, experts, plan).state), "start": static, "tried_rates": tried, "ends": ends}


def _along(
    inputs: Laboratory, scorer: CandidateScorer, method: str, scales: Scales | None, args: Mapping[str, Any]
) -> ChosenScale:
    if scales is None:
        return ChosenScale(dict(args), scorer.candidate(configure(method, args)), {}, 1)
    values = grid(scales.low, scales.high, scales.step)
    return choose_scale(inputs, scorer, method, values, scales.start, args, test=False)
