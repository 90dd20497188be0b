"""Study `mima` (M1, M2, M4, M6): does merging while tuning, at the same budget, bring the merged model to its experts?

**Question.** S steps of fine-tuning per task are spent in N rounds of {every task tunes K = S/N steps from the average;
average}. N = 1 is ordinary fine-tuning. What does N do to the merged model, to the experts, and to the choice of the
merge method?

**Method.** θ_t^(i) = FineTune(θ̄^(i−1), D_t, K) with θ̄^(i) = (1/T) Σ_t θ_t^(i) and θ̄^(0) = θ0; AdamW, warm-up and cosine
over the whole budget, frozen text head. The experts of the last round are merged from θ0: uniform average,

    θ0 + λ Σ_t τ_t (task arithmetic),    θ0 + λ · TIES(τ_1 … τ_T, keep 20 %),

with λ from validation (0 … 1 and 0.8 … 1.8 in steps of 0.05) and, without validation, λ = 0.4 and λ = 1. The grid is
walked from the usual value both ways until validation accuracy has fallen by 1 point. Relative accuracy is
(1/T) Σ_t merged_t / expert_t; the gap is expert_t − merged_t in points.

**Source.** MIMA, Sections 4 and 5, Tables 1–3, Figures 4, 6, 8 and 9.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from mergeflow import layout
from mergeflow.evaluation.statistics import normalised
from mergeflow.merging import configure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.inputs import StudyInputs, mean_accuracy
from tasks.studies.papers.mima.figures import accuracy_figure, gap_figure, task_figure
from tasks.studies.pieces import Row, choose_scale, grid, kept
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval

STUDY = "mima"
TUNED = ("average", "task_arithmetic", "ties")
FIXED = {"task_arithmetic": "task_arithmetic λ=0.4", "ties": "ties λ=1"}
NAMES = {"average": "average", "task_arithmetic": "task arithmetic", "ties": "TIES"}


class Options(Section):
    """The study's choices. `rounds`: the N whose runs `mima_N` are read. `keep`: TIES's share of entries."""

    rounds: list[int]
    keep: float


DECLARED = Declaration(
    Options,
    runs=lambda options: [f"mima_{n}" for n in options.rounds],
    splits=("validation", "test"),
    systems=("M1", "M2", "M4", "M6"),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/mima`."""
    inputs = StudyInputs(io)
    options = Options.model_validate(inputs.options(STUDY))
    base = kept(io, "base", lambda: inputs.accuracy(inputs.base, "test"))
    pieces = [(rounds, seed) for rounds in options.rounds for seed in inputs.seeds]
    rows = []
    for done, (rounds, seed) in enumerate(pieces):
        io.report("merges", done, len(pieces))
        rows.append(kept(io, f"{rounds}_{seed}", partial(measure, inputs, rounds, seed, options.keep)))
    result = StudyResult(tables(rows, base), findings(rows), notes(rows))
    result.write(io.out(layout.study(STUDY)), figures(rows, base))


def measure(inputs: StudyInputs, rounds: int, seed: int, keep: float) -> Row:
    """Return test accuracy per task of one run's experts and of all its merges, and the chosen λ."""
    experts = inputs.run(f"mima_{rounds}").experts(seed)
    scorer = inputs.scorer(experts)
    ties = {"keep": keep}
    addition = choose_scale(inputs, scorer, "task_arithmetic", grid(0, 1, 0.05), 0.2)
    elected = choose_scale(inputs, scorer, "ties", grid(0.8, 1.8, 0.05), 1.0, ties)

    def fixed(method: str, args: dict[str, Any]) -> dict[str, float]:
        return inputs.accuracy(scorer.merge(configure(method, args)), "test")

    return {
        "rounds": rounds,
        "seed": seed,
        "experts": inputs.individual(experts, "test"),
        "average": fixed("average", {}),
        "task_arithmetic": addition.test,
        "ties": elected.test,
        FIXED["task_arithmetic"]: fixed("task_arithmetic", {"scale": 0.4}),
        FIXED["ties"]: fixed("ties", {"scale": 1.0, **ties}),
        "scale": {"task_arithmetic": addition.args["scale"], "ties": elected.args["scale"]},
    }


def values(rows: Sequence[Row], rounds: int, model: str) -> list[float]:
    """Return a model's mean test accuracy in %, one value per seed."""
    return [mean_accuracy(row[model]) for row in rows if row["rounds"] == rounds]


def gaps(rows: Sequence[Row], rounds: int) -> list[float]:
    """Return the mean over tasks of expert − average in points, one value per seed."""
    pairs = zip(values(rows, rounds, "experts"), values(rows, rounds, "average"), strict=True)
    return [expert - merged for expert, merged in pairs]


def tables(rows: Sequence[Row], base: dict[str, float]) -> list[Table]:
    """Return the paper's Tables 1 to 3, and accuracy per task."""
    return [
        Table(
            f"Test accuracy over N, % (zero-shot {mean_accuracy(base):.1f}); relative to the experts in brackets",
            [
                {
                    "N": number,
                    "experts": with_interval(values(rows, number, "experts")),
                    **{NAMES[name]: _absolute_and_relative(rows, number, name) for name in TUNED},
                    "gap of the average": with_interval(gaps(rows, number)),
                }
                for number in _rounds(rows)
            ],
        ),
        Table(
            "Without validation: test accuracy, %",
            [
                {
                    "N": number,
                    "average": with_interval(values(rows, number, "average")),
                    **{name: with_interval(values(rows, number, name)) for name in FIXED.values()},
                }
                for number in _rounds(rows)
            ],
        ),
        Table(
            "λ chosen on validation, one value per seed",
            [{"N": number, **{NAMES[name]: _scales(rows, number, name) for name in FIXED}} for number in _rounds(rows)],
        ),
        _per_task("Single-task accuracy of the experts, %", rows, "experts", base),
        _per_task("Accuracy of the average per task, %", rows, "average", base),
    ]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the rows."""
    numbers = _rounds(rows)
    merged = [_mean(values(rows, number, "average")) for number in numbers]
    gap = [_mean(gaps(rows, number)) for number in numbers]
    spread = [_spread(rows, number) for number in numbers]
    fixed = [_mean(values(rows, number, FIXED["task_arithmetic"])) for number in numbers]
    experts = [_mean(values(rows, number, "experts")) for number in numbers]
    many = [index for index, number in enumerate(numbers) if number >= 16]
    return [
        Finding(
            "M2",
            "The accuracy of the average rises with N.",
            _over(numbers, merged),
            all(later > earlier - 0.5 for earlier, later in pairwise(merged)) and merged[-1] > merged[0] + 1,
        ),
        Finding(
            "M4",
            "The single-task gap of the average shrinks to at most 2 points at N ≥ 16.",
            _over(numbers, gap),
            bool(many) and all(gap[index] <= 2 for index in many),
        ),
        Finding(
            "M2",
            "The methods converge: the best of average, task arithmetic and TIES leads the worst by less at N ≥ 16.",
            f"best − worst {_over(numbers, spread)}",
            bool(many) and all(spread[index] < spread[0] / 2 for index in many),
        ),
        Finding(
            "M2",
            "Task arithmetic with λ fixed at 0.4 degrades with N.",
            _over(numbers, fixed),
            fixed[-1] < fixed[0] - 1,
        ),
        Finding(
            "M6",
            "Experts hardly change with N: their mean accuracy stays within 3 points.",
            _over(numbers, experts),
            max(experts) - min(experts) <= 3,
        ),
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what the tables do not say by themselves."""
    ends = {end: sum(row["scale"]["ties"] == end for row in rows) for end in (0.8, 1.8)}
    return [
        "The gap closes from both sides: the merge gains, and the last experts lose what they have of their own: the "
        "schedule leaves them hardly any step to take away from their common start (`alignment` has the lengths). "
        "What N really buys is the accuracy of the merge; `cost` sets it beside joint training.",
        "In task arithmetic λ multiplies Σ_t τ_t, so 1/T = 0.125 is the average; λ = 0.4 lies 3.2 times as far, "
        "which only nearly orthogonal task vectors put up with.",
        f"TIES's λ multiplies the mean of the agreeing entries of the largest fifth; of {len(rows)} choices "
        f"{ends[0.8]} stood at the lower and {ends[1.8]} at the upper end of the paper's grid.",
    ]


def figures(rows: Sequence[Row], base: dict[str, float]) -> dict[str, Any]:
    numbers = _rounds(rows)
    curves = {
        name: {number: values(rows, number, name) for number in numbers}
        for name in ("experts", *TUNED, *FIXED.values())
    }
    per_task = {
        name: {task: {n: [100 * r[name][task] for r in rows if r["rounds"] == n] for n in numbers} for task in base}
        for name in ("experts", "average")
    }
    return {
        "accuracy": accuracy_figure(curves, mean_accuracy(base)),
        "gap": gap_figure({number: gaps(rows, number) for number in numbers}, _gap_per_task(per_task)),
        "tasks": task_figure(per_task, {task: 100 * value for task, value in base.items()}),
    }


def _gap_per_task(per_task: dict[str, dict[str, dict[int, list[float]]]]) -> dict[str, dict[int, list[float]]]:
    return {
        task: {n: [a - b for a, b in zip(own, per_task["average"][task][n], strict=True)] for n, own in over.items()}
        for task, over in per_task["experts"].items()
    }


def _rounds(rows: Sequence[Row]) -> list[int]:
    return sorted({row["rounds"] for row in rows})


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _spread(rows: Sequence[Row], number: int) -> float:
    means = [_mean(values(rows, number, name)) for name in TUNED]
    return max(means) - min(means)


def _over(numbers: Sequence[int], measured: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f} (N = {number})" for number, value in zip(numbers, measured, strict=True))


def _absolute_and_relative(rows: Sequence[Row], number: int, model: str) -> str:
    ratios = [100 * normalised(row[model], row["experts"]) for row in rows if row["rounds"] == number]
    return f"{with_interval(values(rows, number, model))} ({_mean(ratios):.1f})"


def _scales(rows: Sequence[Row], number: int, method: str) -> str:
    return ", ".join(f"{row['scale'][method]:g}" for row in rows if row["rounds"] == number)


def _per_task(title: str, rows: Sequence[Row], model: str, base: dict[str, float]) -> Table:
    def line(task: str, zero: float) -> dict[str, Cell]:
        cells: dict[str, Cell] = {"task": task, "zero-shot": f"{100 * zero:.1f}"}
        for number in _rounds(rows):
            own = [100 * row[model][task] for row in rows if row["rounds"] == number]
            cells[f"N = {number}"] = with_interval(own)
        return cells

    return Table(title, [line(task, zero) for task, zero in base.items()])
