"""Study `subset_scaling` (C7): what does one more task cost each merge method?

**Question.** Normalised accuracy over the number N of merged tasks, as a mean over subsets of the twenty tasks: which
method loses least from few tasks to many?

**Method.** For each N, subsets are drawn without repetition, each equally likely. *How many.* The paper's rule is
m = ⌈(1.96 σ/ε)²⌉ with Popoviciu's bound σ = (b − a)/2 of the standard deviation of a value in [a, b]; a is the mean of
the N lowest zero-shot accuracies, b that of the N highest individual ones (on validation, so that test plays no part in
the plan). With an ε that means something that bound asks for hundreds of subsets, because it knows the ends alone. So
m is found in two stages (Stein 1945): the first `pilot` subsets give s, the largest standard deviation of mean
validation accuracy of any method, and m = ⌈(t s/ε)²⌉ with t of pilot − 1 degrees, at least `pilot`, at most `most` and
at most the number C(20, N) of subsets, which are then all measured. Both m are in the table, and whether the interval
of the mean then is as narrow as ε is measured on test. All methods merge the same subsets:

    average,    θ0 + λ Σ_t τ_t (task arithmetic),    TIES (λ = 1, share kept),    CART (λ = 1, rank ratio),

each with its argument chosen per subset by mean accuracy on the first validation images of the subset's own tasks, and
then one look at its first test images. The paper's λ of task arithmetic end at 0.3, less than the average's 1/N at N =
2, so the same choice is also made with larger ones ("wider λ"). Normalised accuracy is (1/N) Σ_t merged_t /
individual_t. Of two tasks CART is the average, whatever k and λ: the centred task vectors are ± (θ_1 − θ_2)/2, and
their low-rank parts cancel. The grids are the paper's; how often a choice stands at an end of one is told below the
findings. The interval is t_{m−1} s/√m √(1 − m/M) with M = C(20, N): zero where all
subsets were measured. Methods are compared subset by subset, and the same subsets are merged for the experts of every
seed. *±*: tables have the interval over subsets of the first seed's experts; verdicts are over seeds, of means over
subsets.

**Source.** CART, Section 5.3 ("Scalability on number of tasks"), Figure 7 and Appendix D.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, comb
from statistics import stdev
from typing import Any

from pydantic import Field
from scipy import stats

from mergeflow.evaluation.averages import accuracy_range, draw_subsets, mean, popoviciu_bound, sample_size
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure
from mergeflow.modalities.subset import Subset
from mergeflow.modality import Examples
from mergeflow.search.candidates import grid_of
from studies.lab.inputs import Accuracy, Laboratory, State
from studies.old.ends import ends_of
from studies.old.papers.subset_scaling.findings import findings
from studies.old.papers.subset_scaling.results import figures, notes, tables, tidy_rows
from studies.old.papers.subset_scaling.samples import WIDER
from studies.old.pieces import kept, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    experts: the run whose experts are merged. sizes: the N. starts: those from which the loss up to the largest N is
    told. margin: ε, a share. pilot, most: subsets of one N, in the first stage and at most. draw: seed of the draw.
    validation, test: images per task.
    grids: method → argument → values. wider: method → further scales, with which the choice is made once more.
    """

    experts: str
    sizes: list[int] = Field(min_length=2)
    starts: list[int] = Field(min_length=1)
    margin: float = Field(gt=0, le=0.03)
    pilot: int = Field(ge=3)
    most: int = Field(ge=3)
    draw: int = 0
    validation: int = Field(ge=1)
    test: int = Field(ge=1)
    grids: dict[str, dict[str, list[float]]]
    wider: dict[str, list[float]]


Split = Mapping[str, Examples]


DECLARED = Declaration(Options, runs=lambda options: [options.experts], splits=("validation", "test"), systems=("C7",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/subset_scaling`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    first, *others = inputs.run(options.experts).seeds
    io.report("seeds", 0, 1 + len(others))
    found = [kept(io, f"seed_{first}", partial(_of_seed, inputs, options, None, first))]
    samples = found[0]["samples"]  # the first seed decides which subsets all merge
    found += kept_by_seed(io, others, partial(_of_seed, inputs, options, samples))
    rows = [row for one in found for row in one["rows"]]
    tests = {seed: one["known"]["test"] for seed, one in zip([first, *others], found, strict=True)}
    told = rows, samples, tests
    result = StudyResult(tables(*told, options.starts), findings(*told, options.starts), notes(*told), tidy_rows(*told))
    result.write(io, figures(*told))


def _of_seed(inputs: Laboratory, options: Options, samples: list[Row] | None, seed: int) -> Row:
    """Return `rows`, one for each subset, what is `known` of the experts, and the `samples`, decided if not given."""
    splits = [
        {task: Subset.first(data, count) for task, data in opened.items()}
        for opened, count in (
            (inputs.blind().examples("validation"), options.validation),
            (inputs.examples("test"), options.test),
        )
    ]
    experts = inputs.run(options.experts).experts(seed)
    known = kept(inputs.io, f"known_{seed}", partial(references, inputs, experts, splits))
    work = partial(_one, inputs, options, splits, experts, seed)
    if samples is None:
        samples = [_sample(inputs.tasks, known["validation"], options, size, work) for size in options.sizes]
    pieces = [(sample["size"], number, subset) for sample in samples for number, subset in enumerate(sample["subsets"])]
    return {"rows": [{"seed": seed, **work(*piece)} for piece in pieces], "known": known, "samples": samples}


def _one(
    inputs: Laboratory,
    options: Options,
    splits: Sequence[Split],
    experts: Mapping[str, State],
    seed: int,
    size: int,
    number: int,
    subset: Sequence[str],
) -> Row:
    work = partial(measure, inputs, options, splits, experts, subset)
    return kept(inputs.io, f"{seed}_{size}_{number}", work)


def _sample(
    tasks: Sequence[str], known: Mapping[str, Accuracy], options: Options, size: int, work: Callable[..., Row]
) -> Row:
    """Return which subsets of one N are merged: those of the pilot, and as many more as its spread asks for."""
    planned = plan(tasks, known, options, size)
    pilot = draw_subsets(tasks, size, options.pilot, options.draw)
    found = [work(size, number, subset) for number, subset in enumerate(pilot)]
    spread = (
        max(stdev(row["methods"][m]["validation"] for row in found) for m in options.grids) if len(pilot) > 1 else 0
    )
    wanted = two_stage_size(spread, options.margin, max(len(pilot), 2))
    count = min(max(wanted, len(pilot)), options.most)
    return {**planned, "spread": spread, "asked": wanted, "subsets": draw_subsets(tasks, size, count, options.draw)}


def two_stage_size(deviation: float, margin: float, pilot: int) -> int:
    """Return m = ⌈(t s/ε)²⌉ with t of pilot − 1 degrees of freedom, at least the pilot.

    Args:
        deviation: s of the pilot.
        margin: ε, in the units of s.
        pilot: how many subsets the pilot has, at least 2.

    Example:
        >>> two_stage_size(0.03, 0.02, 10)
        12

    Source: Stein 1945, A two-sample test for a linear hypothesis whose power is independent of the variance.
    """
    quantile = float(stats.t.ppf(0.975, pilot - 1))
    return max(ceil((quantile * deviation / margin) ** 2), pilot)


def references(inputs: Laboratory, experts: Mapping[str, State], splits: Sequence[Split]) -> Row:
    """Return zero-shot and individual accuracy per task on the images that the study uses of each split.

    Args:
        inputs: the study's inputs.
        experts: their weights by task.
        splits: the examples of validation and of test, by task.
    """
    scorer = inputs.scorer({})
    return {
        name: {
            "zero_shot": scorer.state(inputs.base, split),
            "individual": {task: scorer.state(experts[task], {task: split[task]})[task] for task in split},
        }
        for name, split in zip(("validation", "test"), splits, strict=True)
    }


def plan(tasks: Sequence[str], known: Mapping[str, Accuracy], options: Options, size: int) -> Row:
    """Return the numbers that the paper's rule comes from, and its m.

    Args:
        tasks: all of them, in order.
        known: `zero_shot` and `individual` accuracy per task.
        options: margin.
        size: N.
    """
    low, high = accuracy_range(known["zero_shot"], known["individual"], size)
    high = max(low, high)  # experts that are no better than the base
    wanted = sample_size(popoviciu_bound(low, high), options.margin)
    population = comb(len(tasks), size)
    return {"size": size, "range": [low, high], "population": population, "wanted": wanted, "margin": options.margin}


def measure(
    inputs: Laboratory,
    options: Options,
    splits: Sequence[Split],
    experts: Mapping[str, State],
    subset: Sequence[str],
) -> Row:
    """Return of one subset each method's choice on validation, and its test accuracy per task.

    Args:
        inputs: the study's inputs.
        options: its choices.
        splits: the examples of validation and of test, by task.
        experts: their weights by task.
        subset: the tasks that are merged.
    """
    validation, test = ({task: split[task] for task in subset} for split in splits)
    scorer = inputs.blind().scorer({task: experts[task] for task in subset})
    scorer.renew_cache(max(options.grids.get("cart", {}).get("rank_ratio", [1.0])))
    chosen = choose(scorer, options, validation)
    return {"size": len(subset), "tasks": list(subset), "methods": _look(scorer, chosen, test)}


def choose(scorer: CandidateScorer, options: Options, validation: Split) -> dict[str, Row]:
    """Return by method its best candidate on validation, of equals the first, without a look at test.

    `ends` names the arguments of which the smallest or the largest value was taken.

    Args:
        scorer: of the subset's experts.
        options: grids, and the wider scales with which a method's choice is made once more.
        validation: the subset's examples by task.
    """
    found = {}
    for method, grid in options.grids.items():
        tried = grid_of(method, grid)
        scored = _score(scorer, validation, method, tried)
        found[method] = _best(scored)
        if method in options.wider:
            further = [{**args, "scale": scale} for args in tried for scale in options.wider[method]]
            found[method + WIDER] = _best([*scored, *_score(scorer, validation, method, further)])
    return found


def _score(
    scorer: CandidateScorer, examples: Split, method: str, tried: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], float]]:
    """Return each candidate's arguments and mean accuracy on validation."""
    return [(args, mean(scorer.state(scorer.merge(configure(method, args)), examples))) for args in tried]


def _best(scored: Sequence[tuple[dict[str, Any], float]]) -> Row:
    args, validation = max(scored, key=lambda one: one[1])
    ends = ends_of(args, {name: [one[name] for one, _ in scored] for name in args})
    return {"args": args, "ends": ends, "validation": validation}


def _look(scorer: CandidateScorer, chosen: Mapping[str, Row], test: Split) -> dict[str, Row]:
    """Return the choices with their test accuracy per task; a wider choice that is the same is not looked at again."""
    found: dict[str, Row] = {}
    for name, row in chosen.items():
        method = name.removesuffix(WIDER)
        known = found.get(method)
        if known and known["args"] == row["args"]:
            seen = known["test"]
        else:
            seen = scorer.state(scorer.merge(configure(method, row["args"])), test)
        found[name] = {**row, "test": seen}
    return found
