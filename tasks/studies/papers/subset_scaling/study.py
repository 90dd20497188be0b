"""Study `subset_scaling` (C7): what does one more task cost each merge method?

**Question.** Normalised accuracy over the number N of merged tasks, as a mean over subsets of the twenty tasks: which
method loses least from few tasks to many?

**Method.** For each N, m = ⌈(1.96 σ/ε)²⌉ subsets are drawn without repetition, each equally likely. σ = (b − a)/2 is
Popoviciu's bound of the standard deviation of a value in [a, b]; a is the mean of the N lowest zero-shot accuracies, b
that of the N highest individual ones (on validation, so that test plays no part in the plan). m is at most `most`, and
at most the number C(20, N) of subsets, which are then all measured. All methods merge the same subsets:

    average,    θ0 + λ Σ_t τ_t (task arithmetic),    TIES (λ = 1, share kept),    CART (λ = 1, rank ratio),

each with its argument chosen per subset by mean accuracy on the first validation images of the subset's own tasks, and
then one look at its first test images. The paper's λ of task arithmetic end at 0.3, less than the average's 1/N at
N = 2, so the same choice is also made with larger ones ("wider λ"). Normalised accuracy is (1/N) Σ_t merged_t /
individual_t. Of two tasks CART is the average, whatever k and λ: the centred task vectors are ± (θ_1 − θ_2)/2, and
their low-rank parts cancel. The interval is t_{m−1} s/√m √(1 − m/M) with M = C(20, N): zero where all subsets were
measured. Methods are compared subset by subset. The repetitions are the subsets: the experts are those of the first
seed alone, and the intervals say nothing about others.

**Source.** CART, Section 5.3 ("Scalability on number of tasks"), Figure 7 and Appendix D.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import comb
from typing import Any

from pydantic import Field

from mergeflow import layout
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.evaluation.statistics import mean
from mergeflow.evaluation.subsets import accuracy_range, draw_subsets, popoviciu_bound, sample_size
from mergeflow.merging import configure
from mergeflow.modalities.subset import Subset
from mergeflow.modality import Examples
from mergeflow.search.grid import grid_of
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.inputs import Accuracy, State, StudyInputs
from tasks.studies.papers.subset_scaling.results import figures, findings, notes, tables
from tasks.studies.papers.subset_scaling.samples import WIDER
from tasks.studies.pieces import Row, kept
from tasks.studies.results import StudyResult

STUDY = "subset_scaling"


class Options(Section):
    """The study's choices.

    experts: the run whose experts are merged. sizes: the N. starts: those from which the loss up to the largest N is
    told. margin: ε, a share. most: subsets of one N at most. draw: seed of the draw. validation, test: images per task.
    grids: method → argument → values. wider: method → further scales, with which the choice is made once more.
    """

    experts: str
    sizes: list[int] = Field(min_length=2)
    starts: list[int] = Field(min_length=1)
    margin: float = Field(gt=0, lt=1)
    most: int = Field(ge=2)
    draw: int = 0
    validation: int = Field(ge=1)
    test: int = Field(ge=1)
    grids: dict[str, dict[str, list[float]]]
    wider: dict[str, list[float]]


Split = Mapping[str, Examples]


DECLARED = Declaration(Options, runs=lambda options: [options.experts], splits=("validation", "test"), systems=("C7",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/subset_scaling`."""
    inputs = StudyInputs(io)
    options = Options.model_validate(inputs.options(STUDY))
    experts = inputs.run(options.experts).experts(inputs.seeds[0])
    splits = [
        {task: Subset.first(data, count) for task, data in inputs.examples(split).items()}
        for split, count in (("validation", options.validation), ("test", options.test))
    ]
    known = kept(io, "known", lambda: references(inputs, experts, splits))
    samples = plan(inputs.tasks, known["validation"], options)
    pieces = [(sample["size"], number, subset) for sample in samples for number, subset in enumerate(sample["subsets"])]
    rows: list[Row] = []
    total = sum(size for size, _, _ in pieces)
    for size, number, subset in pieces:
        io.report("tasks merged", sum(row["size"] for row in rows), total)
        rows.append(kept(io, f"{size}_{number}", partial(measure, inputs, options, splits, experts, subset)))
    told = rows, samples, known["test"]
    result = StudyResult(tables(*told, options.starts), findings(*told, options.starts), notes(*told))
    result.write(io.out(layout.study(STUDY)), figures(*told))


def references(inputs: StudyInputs, experts: Mapping[str, State], splits: Sequence[Split]) -> Row:
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


def plan(tasks: Sequence[str], known: Mapping[str, Accuracy], options: Options) -> list[Row]:
    """Return for each N which subsets are merged, and the numbers that the rule comes from.

    Args:
        tasks: all of them, in order.
        known: `zero_shot` and `individual` accuracy per task.
        options: sizes, margin, most and draw.
    """
    samples = []
    for size in options.sizes:
        low, high = accuracy_range(known["zero_shot"], known["individual"], size)
        high = max(low, high)  # experts that are no better than the base
        wanted = sample_size(popoviciu_bound(low, high), options.margin)
        samples.append(
            {
                "size": size,
                "range": [low, high],
                "population": comb(len(tasks), size),
                "wanted": wanted,
                "subsets": draw_subsets(tasks, size, min(wanted, options.most), options.draw),
            }
        )
    return samples


def measure(
    inputs: StudyInputs,
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
    scorer = inputs.scorer({task: experts[task] for task in subset})
    scorer.renew_cache(max(options.grids.get("cart", {}).get("rank_ratio", [1.0])))
    validation, test = ({task: split[task] for task in subset} for split in splits)
    found = {}
    for method, grid in options.grids.items():
        scored = _score(scorer, validation, method, grid_of(method, grid))
        found[method] = _choose(scorer, test, method, scored)
        if method in options.wider:
            further = _score(
                scorer,
                validation,
                method,
                [{**args, "scale": scale} for args in grid_of(method, grid) for scale in options.wider[method]],
            )
            best = _choose(scorer, test, method, [*scored, *further], found[method])
            found[method + WIDER] = best
    return {"size": len(subset), "tasks": list(subset), "methods": found}


def _score(
    scorer: CandidateScorer, examples: Split, method: str, tried: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], float]]:
    """Return each candidate's arguments and mean accuracy; a single candidate needs no choice, so no score."""
    if len(tried) == 1:
        return [(tried[0], 0.0)]
    return [(args, mean(scorer.state(scorer.merge(configure(method, args)), examples))) for args in tried]


def _choose(
    scorer: CandidateScorer,
    examples: Split,
    method: str,
    scored: Sequence[tuple[dict[str, Any], float]],
    known: Row | None = None,
) -> Row:
    """Return the best candidate (of equals the first) and its accuracy on test, unless that is known already."""
    args = max(scored, key=lambda one: one[1])[0]
    if known is not None and known["args"] == args:
        return known
    return {"args": args, "test": scorer.state(scorer.merge(configure(method, args)), examples)}
