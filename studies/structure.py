"""Studies `structure`, `structure_suite`: how much of a task vector is needed to add, unlearn and reach a third task?

**Question.** In the theory a task vector has rank 1, and the small rows of its MLP can be left out. Is a task vector of
a real network as empty? The paper measures neither: its low-rank task vectors are tuned as LoRA, and it prunes none.

**Method.** Task vectors are taken whole; with every matrix at its best approximation of a rank (other tensors whole);
tuned as LoRA on all matrices; and with a share of their MLPs' matrices: the largest rows, the smallest rows as a
control, the largest entries as TIES trims them, and random entries, rescaled, as DARE thins them; everything outside of
the MLPs stays whole there.

`structure`: the coloured digits and the small vision transformer of coloured_digits, 120 steps of tuning, experts for
r_o = 0.95, 0.5, 0.9, 0.05, 0.85. Each variant does three things, with λ chosen on validation (of equally good ones the
lowest) and one look at test:

- addition: λ from −1 to 2 by 0.25 in Ψ^(0) + ΔΨ_1 + λ ΔΨ_2, by the sum of both accuracies, with T2 irrelevant, aligned
  or contradictory; the score is the mean accuracy;
- unlearning: λ by the difference of both accuracies, with T2 irrelevant or contradictory; the score is how many points
  T1 stays above T2;
- a third task (r_o = 0.9) from r_o = 0.85 and 0.05, λ_1 and λ_2 from −1 to 2 by 0.5; the score is its accuracy.

`structure_suite`: all tasks of the project's suite with a small CLIP; experts of the shared training runs, tuned in two
ways with as many steps: all weights, and LoRA. For each variant λ in θ0 + λ Σ τ_t is chosen on validation by mean
accuracy, and with this λ test is looked at once, for each task f in turn:

- addition: T1 is the mean of the other tasks and T2 is f, in the sum of all; the score is the mean over all tasks;
- unlearning: the same with −λ for τ_f; the score is how many points the others stay above f;
- a third task: f where its vector is left out (out of domain).

Storage counts factors, kept rows with an index, kept entries with a bit for each place, of DARE the entries alone,
whose places a seed tells, and on the suite LoRA's adapters alone. The learning rate of LoRA was chosen by two experts'
validation accuracies with a seed that is not among these. The paper's LoRA has rank 32, and its large rows are Θ(m), a
constant share that it does not name; rank 8 and 50 % are our choices. Rules were written before the first run.

**Source.** Li et al. 2025, Corollaries 1 and 2, Section 4; Hu et al. 2022 (LoRA); Yadav et al. 2023 (TIES); Yu et al.
2024 (DARE).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field, field_validator

from mergeflow import layout
from mergeflow.checkpoints import read_state
from mergeflow.evaluation.averages import mean
from mergeflow.modalities.classification import Subset
from mergeflow.training import LoraModel
from mergeflow.training.settings import LoraSettings
from studies.coloured import CASES, FIRST, ONTO, TARGET
from studies.lab import Claim, Laboratory, Row, Section, Study, grid, table
from studies.lab.claims import Samples
from studies.lab.digits import (
    Coloured,
    ColouredWorld,
    Digits,
    Pretrained,
    coloured,
    name_of,
    open_digits,
    pretrained,
    small_transformer,
    tuned,
)
from studies.lab.inputs import Lazy, State, over_seeds
from studies.lab.plots import curves, side_by_side
from studies.lab.rows import samples, select
from studies.lab.tuning import best_scale, combined, task_vector, trained
from studies.theory.reduced import Reduced, Vector, bimodality, low_rank, row_pruned, thinned, trimmed

# Ways to put less into task vectors


FULL, LORA, SVD = "full", "LoRA", "SVD"
ROWS, CONTROL, TIES, DARE = "largest rows", "smallest rows", "TIES", "DARE"
PRUNED = (ROWS, CONTROL, TIES, DARE)


@dataclass(frozen=True)
class Variant:
    """The task vectors of all experts, reduced in one way.

    Attributes:
        kind: The way.
        amount: The rank, or the share that is kept; None of whole vectors.
        stored: Bytes, as a share of the whole vectors'.
    """

    kind: str
    amount: float | None
    vectors: dict[str, Vector]
    stored: float

    @property
    def name(self) -> str:
        """The way and its amount.

        Example:
            >>> Variant("SVD", 4, {}, 0.1).name
            'SVD 4'
        """
        return self.kind if self.amount is None else f"{self.kind} {self.amount:g}"


def variants(
    vectors: Mapping[str, Vector], ranks: Sequence[int], keeps: Sequence[float], seed: int
) -> Iterator[Variant]:
    """Yield the whole task vectors and each way of reducing them.

    Args:
        keeps: shares of the rows or entries of MLP matrices.
        seed: of the entries that DARE drops; each task has its own.
    """
    whole = sum(4 * value.numel() for vector in vectors.values() for value in vector.values())

    def variant(kind: str, amount: float, reduced: Mapping[str, Reduced]) -> Variant:
        stored = sum(vector.bytes for vector in reduced.values()) / whole
        return Variant(kind, amount, {task: reduction.vector for task, reduction in reduced.items()}, stored)

    yield Variant(FULL, None, dict(vectors), 1.0)
    for rank in ranks:
        yield variant(SVD, rank, {task: low_rank(vector, rank) for task, vector in vectors.items()})
    for keep in keeps:
        yield variant(ROWS, keep, {task: row_pruned(vector, keep) for task, vector in vectors.items()})
        yield variant(CONTROL, keep, {task: row_pruned(vector, keep, True) for task, vector in vectors.items()})
        yield variant(TIES, keep, {task: trimmed(vector, keep) for task, vector in vectors.items()})
        seeds = {task: 1000 * seed + number for number, task in enumerate(vectors)}
        yield variant(DARE, keep, {task: thinned(vector, keep, seeds[task]) for task, vector in vectors.items()})


COLOURS = tuple(dict.fromkeys((FIRST, *CASES.values(), *ONTO)))
SCALES, ONTO_SCALES = grid(-1, 2, 0.25), grid(-1, 2, 0.5)
ADAPTED = ["self_attention", "0", "3", "head"]  # attention, the two layers of an MLP, and the head
SCORES = ("addition", "unlearning", "a third task")
HALF, LOST, VITAL, UNIFORM = 0.5, 1.0, 5.0, 5 / 9


class Options(Section):
    """The choices of `structure`."""

    seeds: list[int] = Field(min_length=1)  # of the net, the orders and what is dropped
    world: ColouredWorld  # digits, net and training
    steps: int = Field(120, ge=1)  # of tuning
    ranks: list[int] = Field([1, 2, 4, 8], min_length=1)  # of the reduced matrices
    lora: list[int] = Field([2, 8], min_length=1)  # ranks of the adapters
    lora_rate: float = Field(gt=0)  # their learning rate
    # shares of the MLPs' rows and entries; 0.5 is judged
    keeps: list[float] = Field([0.05, 0.1, 0.2, HALF, 0.8], min_length=1)

    @field_validator("world")
    @classmethod
    def _has_rows_and_adapters(cls, world: ColouredWorld) -> ColouredWorld:
        if world.clip is not None:
            raise ValueError("this study prunes and adapts the transformer; leave `clip` out")
        return world


class SuiteOptions(Section):
    """The choices of `structure_suite`."""

    whole: str  # whole, lora: the runs with experts of all weights and of adapters
    lora: str
    ranks: list[int] = Field([1, 4, 8], min_length=1)  # of the reduced matrices
    keeps: list[float] = Field([0.1, HALF], min_length=1)  # shares of the MLPs' rows and entries; 0.5 is judged
    scales: list[float] = Field([0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8], min_length=1)  # the λ
    validation: int = Field(60, ge=8)  # validation, test: images of each task for the choice and for the look
    test: int = Field(100, ge=8)
    edited: int = Field(50, ge=8)  # test images of each task where one is unlearned or left out


# Measurement: coloured digits


def measure_seed(options: Options, digits: Lazy[dict[str, Digits]], seed: int) -> Iterator[Row]:
    """Yield the effect of each variant of the task vectors."""
    splits = digits()
    base = pretrained(options.world, splits, seed)
    experts = tuned(options.world, base, splits["train"], COLOURS, options.steps, seed)
    vectors = {task: task_vector(state, base.start) for task, state in experts.items()}
    lora = [lora_variant(options, base, splits["train"], rank, seed) for rank in options.lora]
    for row in bimodality_rows(vectors):
        yield {"seed": seed, **row}
    for variant in (*variants(vectors, options.ranks, options.keeps, seed), *lora):
        reduced = Coloured(base, splits, variant.vectors)
        for row in (*case_rows(reduced), *target_rows(reduced)):
            yield {"seed": seed, **row, **of_variant(variant)}


def bimodality_rows(vectors: Mapping[str, State]) -> Iterator[Row]:
    for task, vector in vectors.items():
        yield {"part": "rows", "task": task, "bimodality": bimodality(vector)}


def of_variant(variant: Variant) -> Row:
    return {"kind": variant.kind, "amount": variant.amount, "stored": 100 * variant.stored}


def lora_variant(options: Options, base: Pretrained, digits: Digits, rank: int, seed: int) -> Variant:
    """Return the task vectors of experts tuned with adapters, and the share of the numbers that is trained."""
    tune = options.world.tune.model_copy(update={"steps": options.steps, "learning_rate": options.lora_rate})
    settings = LoraSettings(rank=rank, alpha=2 * rank, targets=ADAPTED)
    model = LoraModel.of(small_transformer(options.world, 2, seed), settings, seed)
    vectors = {
        name_of(colour): task_vector(
            trained(model, base.start, coloured(digits, colour, name_of(colour)), tune, seed), base.start
        )
        for colour in COLOURS
    }
    numbers: int = sum(value.numel() for value in (*model.module.down, *model.module.up))
    return Variant(LORA, rank, dict(vectors), numbers / sum(value.numel() for value in base.start.values()))


def case_rows(reduced: Coloured) -> Iterator[Row]:
    """Yield test accuracies of T1 and T2 where λ was chosen on validation, for addition and for unlearning T2."""
    for case, second in CASES.items():

        def judged(scale: float, split: str, second: float = second) -> list[float]:
            return reduced.accuracies({FIRST: 1.0, second: scale}, (FIRST, second), split)

        scores = {scale: judged(scale, "validation") for scale in SCALES}
        sums = {scale: first + second for scale, (first, second) in scores.items()}
        differences = {scale: first - second for scale, (first, second) in scores.items()}
        for way, goal in (("addition", sums), ("unlearning", differences)):
            scale = max(goal, key=goal.__getitem__)
            first, second = judged(scale, "test")
            yield {"part": "case", "case": case, "way": way, "scale": scale, "test_1": first, "test_2": second}


def target_rows(reduced: Coloured) -> Iterator[Row]:
    """Yield test accuracy on the third task where λ_1 and λ_2 were chosen on validation."""

    def judged(point: tuple[float, float], split: str) -> float:
        return reduced.accuracies(dict(zip(ONTO, point, strict=True)), [TARGET], split)[0]

    best = max(product(ONTO_SCALES, ONTO_SCALES), key=lambda point: judged(point, "validation"))
    at = {"scale_1": best[0], "scale": best[1]}
    yield {"part": "target", "way": "a third task", **at, "test_1": judged(best, "test")}


# Measurement: a suite


def measure_suite(lab: Laboratory, options: SuiteOptions) -> list[Row]:
    """Return the effect of each variant of the task vectors on the suite, for the seeds that both runs have."""
    seeds = [seed for seed in lab.run(options.whole).seeds if seed in lab.run(options.lora).seeds]
    return lab.by_run([options.whole], partial(measure_suite_seed, options=options), seeds)


def measure_suite_seed(lab: Laboratory, run: str, seed: int, options: SuiteOptions) -> Iterator[Row]:
    vectors = vectors_of(lab, run, seed)
    for row in bimodality_rows(vectors):
        yield {"seed": seed, **row}
    for variant in (*variants(vectors, options.ranks, options.keeps, seed), adapted(lab, options.lora, seed)):
        for row in suite_rows(lab, options, variant):
            yield {"seed": seed, **row, **of_variant(variant)}


def vectors_of(lab: Laboratory, run: str, seed: int) -> dict[str, State]:
    return {task: task_vector(state, lab.base) for task, state in lab.run(run).experts(seed).items()}


def adapted(lab: Laboratory, run: str, seed: int) -> Variant:
    """Return the task vectors of experts tuned as LoRA, which take no more than their adapters."""
    folder = f"{layout.study_run(run)}/seed_{seed}/experts/{{}}/adapter/adapter_model.safetensors"
    adapters = [read_state(lab.io.dep(folder.format(task))) for task in lab.tasks]
    numbers, whole = (sum(v.numel() for value in states for v in value.values()) for states in (adapters, [lab.base]))
    rank = lab.run(run).settings(seed)["lora"]["rank"]
    return Variant(LORA, rank, dict(vectors_of(lab, run, seed)), numbers / (len(adapters) * whole))


def suite_rows(lab: Laboratory, options: SuiteOptions, variant: Variant) -> Iterator[Row]:
    """Yield test accuracies of the sum with λ by validation, and with one task negated or left out."""
    tasks, scorer = lab.tasks, lab.scorer({})
    opened = {"validation": lab.blind().examples("validation"), "test": lab.examples("test")}

    def judged(scales: Mapping[str, float], split: str, count: int, asked: Sequence[str] = tasks) -> dict[str, float]:
        data = {task: Subset.first(opened[split][task], count) for task in asked}
        scores = scorer.state(combined(lab.base, variant.vectors, scales), data)
        return {task: 100 * value for task, value in scores.items()}

    best = best_scale(
        options.scales, lambda scale: mean(judged(dict.fromkeys(tasks, scale), "validation", options.validation))
    )
    every = dict.fromkeys(tasks, best)
    summed = judged(every, "test", options.test)
    for forget in tasks:
        negated = judged(every | {forget: -best}, "test", options.edited)
        left_out = judged(every | {forget: 0.0}, "test", options.edited, [forget])
        for way, scores in (("addition", summed), ("unlearning", negated)):
            others = mean({task: value for task, value in scores.items() if task != forget})
            about = {"part": "case", "case": "irrelevant", "way": way, "scale": best, "task": forget}
            yield {**about, "test_1": others, "test_2": scores[forget]}
        yield {"part": "target", "way": "a third task", "scale": best, "task": forget, "test_1": left_out[forget]}


# What the rows are asked


def scored(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of what was done, with their score; an aligned task cannot be unlearned and does not count."""
    scored_rows = select(rows, part=["case", "target"])
    scored_rows = scored_rows[(scored_rows.way != "unlearning") | (scored_rows.case != "aligned")]
    scores = {
        "addition": (scored_rows.test_1 + scored_rows.test_2) / 2,
        "unlearning": scored_rows.test_1 - scored_rows.test_2,
    }
    return scored_rows.assign(score=scores["addition"].where(scored_rows.way == "addition", scores["unlearning"]).where(
        scored_rows.way != "a third task", scored_rows.test_1))  # fmt: skip


def score(rows: pd.DataFrame, kind: str, amount: float | None, way: str) -> pd.Series:
    return samples(scored(rows), "score", kind=kind, amount=amount, way=way)


def lost(kind: str, amount: float, rows: pd.DataFrame) -> Samples:
    """Return the loss of a variant against whole task vectors, by score."""
    return {way: score(rows, FULL, None, way) - score(rows, kind, amount, way) for way in SCORES}


def lora_rank(rows: pd.DataFrame) -> float:
    return float(select(rows, part="case", kind=LORA).amount.max())


def gained(other: str, keep: float, rows: pd.DataFrame) -> Samples:
    return {way: score(rows, ROWS, keep, way) - score(rows, other, keep, way) for way in SCORES}


# Claims, written before the run
# fmt: off

def claims(options: Options | SuiteOptions) -> list[Claim]:
    """Hold Corollaries 1 and 2 against the rows."""
    half, low, high, share = f"{100 * HALF:g} %", min(options.ranks), max(options.ranks), min(options.keeps)
    of_each = "loss in each of addition (mean accuracy), unlearning (T1 less T2, none aligned) and a third task"
    one_bit = "where experts read one bit, such as a colour, rank 1 cannot fail; the paper's LoRA has rank 32"
    return [
        Claim("P16", f"Task vectors of rank {low} do what whole ones do.", partial(lost, SVD, low), high=LOST,
              of=of_each, caveat=one_bit),
        Claim("P16", f"Task vectors of rank {high} do what whole ones do.", partial(lost, SVD, high), high=LOST,
              of=of_each, ours=True),
        Claim("P16", lambda rows: f"Task vectors tuned as LoRA of rank {lora_rank(rows):g} do what whole ones do.",
              lambda rows: lost(LORA, lora_rank(rows), rows), high=LOST, of=of_each,
              caveat=one_bit),
        Claim("P17", "The rows of the MLPs' task vectors fall into large and small ones.",
              lambda rows: {"coefficient": samples(rows, "bimodality", part="rows")}, low=UNIFORM, unit="", digits=2,
              ours=True, of="Sarle's coefficient, of a uniform distribution 5/9,"),
        Claim("P17", f"The {half} smallest rows can be left out.", partial(lost, ROWS, HALF), high=LOST,
              of=of_each, ours=True),
        Claim("P17", f"The {half} largest rows cannot be left out.",
              lambda rows: {"addition": lost(CONTROL, HALF, rows)["addition"]}, low=VITAL, of="loss in addition",
              ours=True),
        *(Claim("P17", f"Of {100 * share:g} % of the MLPs' numbers, whole rows keep no less than the entries that "
                       f"{other} keeps.", partial(gained, other, share), low=0, ours=True,
                of="paired difference in each")
          for other in (TIES, DARE)),
    ]


def score_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the share of each score that every variant keeps, and its storage."""
    keys = ["task vectors", "rank, or share kept"]
    scores = scored(rows).rename(columns={"kind": keys[0], "amount": keys[1]})
    return side_by_side(scores, keys, {"stored": "stored, %"}).join(table(scores, keys, "way", value="score"))


TABLES = {
    "Test accuracy of addition, T1 above T2 in unlearning, and accuracy on a third task, %": score_table,
}
# fmt: on


def scores_figure(kinds: Sequence[str], label: str, rows: pd.DataFrame) -> Figure:
    """Draw each score over the amount that is kept, a curve with intervals for each kind, a level for the whole."""
    scores = select(scored(rows), kind=list(kinds))
    return curves(
        scores, "amount", "kind", "score", "way", x_label=label, y_label="points", columns=3, height=2.8,
        scale="log", ticks=sorted(scores.amount.unique()),
        levels=lambda way: {"whole": score(rows, FULL, None, way).mean()},
        labels={way: way.capitalize() for way in SCORES},
    )  # fmt: skip


FIGURES = {
    "rank": partial(scores_figure, (SVD, LORA), "rank"),
    "pruned": partial(scores_figure, PRUNED, "share of the MLPs' numbers kept"),
}
corollaries = partial(Study, systems=("P16", "P17"), claims=claims, tables=TABLES, figures=FIGURES)
STUDIES = {
    "structure": corollaries(options=Options, measure=over_seeds(open_digits, measure_seed)),
    "structure_suite": corollaries(
        options=SuiteOptions,
        runs=lambda options: [options.whole, options.lora],
        splits=("validation", "test"),
        measure=measure_suite,
    ),
}
