"""Tables, findings, notes and figures of the study `mima`, one row per run and seed."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from mergeflow.evaluation.averages import normalised
from tasks.studies.claims import judge, paired, steps_between
from tasks.studies.inputs import mean_accuracy
from tasks.studies.papers.mima.figures import accuracy_figure, gap_figure, task_figure
from tasks.studies.results import Cell, Finding, Table, with_interval
from tasks.studies.rows import Row, of

TUNED = ("average", "task_arithmetic", "ties")
FIXED = {"task_arithmetic": "task_arithmetic λ=0.4", "ties": "ties λ=1"}
MODELS = ("experts", *TUNED, *FIXED.values())
LARGEST = 2.8  # λ of TIES that is tried
MANY = 16  # from this N on the paper calls task vectors aligned
NAMES = {"average": "average", "task_arithmetic": "task arithmetic", "ties": "TIES"}


def values(rows: Sequence[Row], rounds: int, model: str) -> list[float]:
    """Return a model's mean test accuracy in %, one value per seed.

    Args:
        rows: as of `measure`.
        rounds: N.
        model: "experts", "average" or a merge method.
    """
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
    over = {
        model: {n: values(rows, n, model) for n in numbers}
        for model in ("experts", "average", FIXED["task_arithmetic"])
    }
    many, first, fixed = [n for n in numbers if n >= MANY], numbers[0], over[FIXED["task_arithmetic"]]
    spread = {n: _spread(rows, n) for n in numbers}
    return [
        judge(
            "M2",
            "The accuracy of the average rises with N.",
            steps_between(over["average"]),
            "paired difference from each N to the next ≥ −0.5 points",
            low=-0.5,
        ),
        judge(
            "M4",
            f"The single-task gap of the average shrinks to nearly zero at N ≥ {MANY}.",
            {f"N = {n}": gaps(rows, n) for n in many},
            "gap ≤ 2 points (the paper: 0.5 % of relative accuracy at N = 16, ViT-B/32)",
            high=2,
        ),
        judge(
            "M2",
            f"The methods converge: at N ≥ {MANY} averaging is nearly as effective as task arithmetic and TIES.",
            {f"best − worst, less half of that at N = {first}, N = {n}": _halved(spread, n, first) for n in many},
            "the lead of the best of the three over the worst is at most half of that at the smallest N",
            high=0,
        ),
        judge(
            "M2",
            "Task arithmetic with λ fixed at 0.4 degrades with N.",
            {f"N = {first} → {numbers[-1]}": paired(fixed[numbers[-1]], fixed[first])},
            "falls by ≥ 1 point from the smallest N to the largest",
            high=-1,
        ),
        judge(
            "M6",
            "More rounds do not significantly change the accuracy of the experts.",
            {f"N = {first} → {n}": paired(over["experts"][n], over["experts"][first]) for n in numbers[1:]},
            "paired difference ≥ −3 points (the paper's own experts go from 90.2 to 87.8 % at N = 8)",
            low=-3,
        ),
    ]


def further_findings(rows: Sequence[Row], at: Sequence[int], kept: Sequence[int]) -> list[Finding]:
    """Hold what the paper leaves open against the runs with other budgets and with the optimiser kept.

    Args:
        rows: as of `measure_briefly`.
        at: the N that are compared over the budget.
        kept: the N with a run that keeps the optimiser.
    """
    found = []
    few, most = min(at, default=0), max(at, default=0)
    drops = {
        budget: paired(_brief(rows, most, budget, "experts"), _brief(rows, few, budget, "experts"))
        for budget in _budgets(rows, at)
    }
    if len(drops) > 1:
        low, high = min(drops), max(drops)
        shared = min(len(drops[low]), len(drops[high]))
        found.append(
            judge(
                "M6",
                f"What experts lose from N = {few} to N = {most} shrinks with the budget.",
                {f"S = {low} → {high}": paired(drops[high][:shared], drops[low][:shared])},
                "the difference of the experts rises by ≥ 0.5 points from the smallest to the largest budget",
                low=0.5,
                ours=True,
                beside="".join(f"; at S = {s}: {with_interval(own)}" for s, own in drops.items()),
            )
        )
    for n in kept:
        (usual,) = {row["steps"] for row in rows if row["rounds"] == n and row["optimiser"] == "kept"}
        pairs = {
            model: paired(_brief(rows, n, usual, model, "kept"), _brief(rows, n, usual, model)[: _count(rows, n)])
            for model in ("experts", "average")
        }
        found.append(
            judge(
                "M1",
                f"Forgetting AdamW's moments at the merges costs less than a point (N = {n}).",
                {f"{model}, kept less reset": values for model, values in pairs.items()},
                "paired differences within ± 1 point",
                low=-1,
                high=1,
                ours=True,
            )
        )
    return found


def further_tables(rows: Sequence[Row], at: Sequence[int], kept: Sequence[int]) -> list[Table]:
    """Return experts and average over the budget, and by what becomes of the optimiser.

    Args:
        rows: as of `measure_briefly`.
        at: the N that are shown over the budget.
        kept: the N with a run that keeps the optimiser.
    """
    lines: list[dict[str, Cell]] = [
        {
            "S": budget,
            "N": n,
            "optimiser": kind,
            "experts": with_interval(_brief(rows, n, budget, "experts", kind)),
            "average": with_interval(_brief(rows, n, budget, "average", kind)),
        }
        for budget, n, kind in sorted({(row["steps"], row["rounds"], row["optimiser"]) for row in rows})
        if n in at or n in kept
    ]
    return [Table("Budget and optimiser: mean test accuracy, %", lines)] if lines else []


def _brief(rows: Sequence[Row], rounds: int, steps: int, model: str, optimiser: str = "reset") -> list[float]:
    own = of(rows, rounds=rounds, steps=steps, optimiser=optimiser)
    return [mean_accuracy(row[model]) for row in own]


def _budgets(rows: Sequence[Row], at: Sequence[int]) -> list[int]:
    """Return the budgets at which every N of `at` was trained."""
    budgets = sorted({row["steps"] for row in rows})
    return [s for s in budgets if at and all(_brief(rows, n, s, "experts") for n in at)]


def _count(rows: Sequence[Row], rounds: int) -> int:
    return sum(row["rounds"] == rounds and row["optimiser"] == "kept" for row in rows)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what the tables do not say by themselves."""
    beyond = sum(not 0.8 <= row["scale"]["ties"] <= 1.8 for row in rows)
    last = sum(row["scale"]["ties"] == LARGEST for row in rows)
    tasks = len(rows[0]["average"])
    return [
        "The gap closes from both sides: the merge gains, and the last experts lose what they have of their own, as "
        "far as the schedule leaves them few steps to take away from their common start (`alignment` has the lengths).",
        f"In task arithmetic λ multiplies Σ_t τ_t, so 1/T = {1 / tasks:g} is the average; λ = 0.4 lies "
        f"{0.4 * tasks:.1f} times as far.",
        f"TIES's λ multiplies the mean of the agreeing entries; of {len(rows)} choices {beyond} lie outside of the "
        f"paper's grid, 0.8 to 1.8, and {last} are the largest λ tried, {LARGEST:g}.",
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


def _spread(rows: Sequence[Row], number: int) -> list[float]:
    """Return the lead of the best of the three methods over the worst, one value per seed."""
    own = zip(*(values(rows, number, name) for name in TUNED), strict=True)
    return [max(one) - min(one) for one in own]


def _halved(spread: dict[int, list[float]], number: int, first: int) -> list[float]:
    return [one - begun / 2 for one, begun in zip(spread[number], spread[first], strict=True)]


def _absolute_and_relative(rows: Sequence[Row], number: int, model: str) -> str:
    ratios = [100 * normalised(row[model], row["experts"]) for row in rows if row["rounds"] == number]
    return f"{with_interval(values(rows, number, model))} ({fmean(ratios):.1f})"


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
