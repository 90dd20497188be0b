"""Study `structure_suite`: how much of a task vector is needed on a suite of image tasks with a small CLIP?

**Question.** The study structure asks it of two colourings of digits. Here all tasks of the project's suite are added,
each of them is unlearned, and each is left out and met as a task that nobody trained.

**Method.** Experts of the shared training runs, tuned in two ways with as many steps: all weights, and LoRA. Task
vectors are reduced as in the study structure. For each variant λ in θ0 + λ Σ τ_t is chosen on validation by mean
accuracy, and with this λ test is looked at once, for each task f in turn:

- addition: T1 is the mean of the other tasks and T2 is f, in the sum of all; the score is the mean over all tasks;
- unlearning: the same with −λ for τ_f; the score is how many points the others stay above f;
- a third task: f where its vector is left out (out of domain).

What LoRA stores are its adapters. The paper's LoRA has rank 32, and its large rows are Θ(m), a constant share that it
does not name; rank 8 and 50 % are our choices. Rules are those of the study structure, written before the first run.

**Source.** Li et al. 2025, Corollaries 1 and 2; Hu et al. 2022 (LoRA); Yadav et al. 2023 (TIES); Yu et al. 2024 (DARE).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from pydantic import Field

from mergeflow import layout
from mergeflow.checkpoints import read_state
from mergeflow.evaluation.averages import mean
from mergeflow.modalities.subset import Subset
from studies.lab.inputs import Laboratory, State
from studies.lab.reductions import LORA, Variant, variants
from studies.lab.scales import best_scale, combined, task_vector
from studies.old.papers.structure.figures import figures
from studies.old.papers.structure.results import HALF, findings, tables
from studies.old.pieces import kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row, tidy
from studies.theory.reduced import bimodality
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    whole, lora: the runs with experts of all weights and of adapters. ranks: of the reduced matrices. keeps: shares of
    the MLPs' rows and entries; 0.5 is judged. scales: the λ. validation, test: images of each task for the choice and
    for the look; edited: test images of each task where one is unlearned or left out.
    """

    whole: str
    lora: str
    ranks: list[int] = Field([1, 4, 8], min_length=1)
    keeps: list[float] = Field([0.1, HALF], min_length=1)
    scales: list[float] = Field([0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8], min_length=1)
    validation: int = Field(60, ge=8)
    test: int = Field(100, ge=8)
    edited: int = Field(50, ge=8)


DECLARED = Declaration(
    Options,
    lambda options: [options.whole, options.lora],
    splits=("validation", "test"),
    systems=("P16", "P17"),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/structure_suite`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    seeds = [seed for seed in inputs.run(options.whole).seeds if seed in inputs.run(options.lora).seeds]
    measured = kept_by_seed(io, seeds, partial(_measured, inputs, options))
    rows: list[Row] = [{"seed": seed, **row} for seed, one in zip(seeds, measured, strict=True) for row in one["rows"]]
    StudyResult(tables(rows), findings(rows), [], tidy(rows)).write(io, figures(rows))


def _measured(inputs: Laboratory, options: Options, seed: int) -> Row:
    vectors = _vectors(inputs, options.whole, seed)
    rows: list[Row] = [{"part": "rows", "task": task, "bimodality": bimodality(one)} for task, one in vectors.items()]
    for variant in (*variants(vectors, options.ranks, options.keeps, seed), adapted(inputs, options.lora, seed)):
        told = {"kind": variant.kind, "amount": variant.amount, "stored": 100 * variant.stored}
        rows += [row | told for row in _variant_rows(inputs, options, variant)]
    return {"rows": rows}


def _vectors(inputs: Laboratory, run: str, seed: int) -> dict[str, State]:
    return {task: task_vector(state, inputs.base) for task, state in inputs.run(run).experts(seed).items()}


def adapted(inputs: Laboratory, run: str, seed: int) -> Variant:
    """Return the task vectors of experts tuned as LoRA, which take no more than their adapters.

    Args:
        inputs: the study's inputs.
        run: the training run.
        seed: of the run.
    """
    folder = f"{layout.study_run(run)}/seed_{seed}/experts/{{}}/adapter/adapter_model.safetensors"
    adapters = [read_state(inputs.io.dep(folder.format(task))) for task in inputs.tasks]
    numbers, whole = (sum(v.numel() for one in states for v in one.values()) for states in (adapters, [inputs.base]))
    rank = inputs.run(run).settings(seed)["lora"]["rank"]
    return Variant(LORA, rank, dict(_vectors(inputs, run, seed)), numbers / (len(adapters) * whole))


def _variant_rows(inputs: Laboratory, options: Options, variant: Variant) -> Iterator[Row]:
    """Yield test accuracies of the sum with λ by validation, and with one task negated or left out."""
    tasks, scorer = inputs.tasks, inputs.scorer({})
    opened = {"validation": inputs.blind().examples("validation"), "test": inputs.examples("test")}

    def judged(scales: Mapping[str, float], split: str, count: int, asked: Sequence[str] = tasks) -> dict[str, float]:
        data = {task: Subset.first(opened[split][task], count) for task in asked}
        found = scorer.state(combined(inputs.base, variant.vectors, scales), data)
        return {task: 100 * value for task, value in found.items()}

    best = best_scale(
        options.scales, lambda scale: mean(judged(dict.fromkeys(tasks, scale), "validation", options.validation))
    )
    every = dict.fromkeys(tasks, best)
    summed = judged(every, "test", options.test)
    for forget in tasks:
        negated = judged(every | {forget: -best}, "test", options.edited)
        left_out = judged(every | {forget: 0.0}, "test", options.edited, [forget])
        for way, found in (("addition", summed), ("unlearning", negated)):
            others = mean({task: value for task, value in found.items() if task != forget})
            told = {"part": "case", "case": "irrelevant", "way": way, "scale": best, "task": forget}
            yield {**told, "test_1": others, "test_2": found[forget]}
        yield {"part": "target", "way": "a third task", "scale": best, "task": forget, "test_1": left_out[forget]}
