"""Tables, notes and figures of the study `mima`, one row per run and seed."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from mergeflow.evaluation.averages import normalised
from studies.lab.inputs import mean_accuracy
from studies.old.papers.mima.figures import accuracy_figure, gap_figure, task_figure
from studies.old.results import Cell, Table, with_interval
from studies.old.rows import Row, accuracy_rows, of, tidy

TUNED = ("average", "task_arithmetic", "ties")
FIXED = {"task_arithmetic": "task_arithmetic λ=0.4", "ties": "ties λ=1"}
MODELS = ("experts", *TUNED, *FIXED.values())
LARGEST = 2.8  # λ of TIES that is tried
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


def relative(rows: Sequence[Row], rounds: int, model: str) -> list[float]:
    """Return (1/T) Σ_t merged_t / expert_t in %, one value per seed.

    Args:
        rows: as of `measure`.
        rounds: N.
        model: "average" or a merge method.
    """
    return [100 * normalised(row[model], row["experts"]) for row in rows if row["rounds"] == rounds]


def task_values(rows: Sequence[Row], model: str) -> dict[str, dict[int, list[float]]]:
    """Return task → N → a model's test accuracy in %, one value per seed."""
    return {
        task: {n: [100 * row[model][task] for row in rows if row["rounds"] == n] for n in rounds_of(rows)}
        for task in rows[0][model]
    }


def trained(rows: Sequence[Row], rounds: int, steps: int, model: str, optimiser: str = "reset") -> list[float]:
    """Return a model's mean test accuracy in %, one value per seed, of the runs trained in one way.

    Args:
        rows: as of `measure_briefly`.
        rounds: N.
        steps: S, the budget.
        model: "experts" or "average".
        optimiser: what becomes of its state at a merge.
    """
    own = of(rows, rounds=rounds, steps=steps, optimiser=optimiser)
    return [mean_accuracy(row[model]) for row in own]


def budgets(rows: Sequence[Row], at: Sequence[int]) -> list[int]:
    """Return the budgets at which every N of `at` was trained."""
    known = sorted({row["steps"] for row in rows})
    return [s for s in known if at and all(trained(rows, n, s, "experts") for n in at)]


def rounds_of(rows: Sequence[Row]) -> list[int]:
    """Return every N, the smallest first."""
    return sorted({row["rounds"] for row in rows})


def tidy_rows(rows: Sequence[Row], base: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return one row for each seed, run, model and task, with its λ where one was chosen, and the base's, of no seed.

    Args:
        rows: of `measure` and `measure_briefly`.
        base: task → zero-shot test accuracy, a fraction.
    """
    measured = [
        {**one, "scale": row.get("scale", {}).get(one["model"])}
        for row in rows
        for one in accuracy_rows([row], ("seed", "rounds", "steps", "optimiser"), MODELS)
    ]
    return tidy([*measured, *accuracy_rows([{"zero_shot": base}], (), ("zero_shot",))])


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
                for number in rounds_of(rows)
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
                for number in rounds_of(rows)
            ],
        ),
        Table(
            "λ chosen on validation, one value per seed",
            [
                {"N": number, **{NAMES[name]: _scales(rows, number, name) for name in FIXED}}
                for number in rounds_of(rows)
            ],
        ),
        _per_task("Single-task accuracy of the experts, %", rows, "experts", base),
        _per_task("Accuracy of the average per task, %", rows, "average", base),
    ]


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
            "experts": with_interval(trained(rows, n, budget, "experts", kind)),
            "average": with_interval(trained(rows, n, budget, "average", kind)),
        }
        for budget, n, kind in sorted({(row["steps"], row["rounds"], row["optimiser"]) for row in rows})
        if n in at or n in kept
    ]
    return [Table("Budget and optimiser: mean test accuracy, %", lines)] if lines else []


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what the tables do not say by themselves."""
    beyond = sum(not 0.8 <= row["scale"]["ties"] <= 1.8 for row in rows)
    last = sum(row["scale"]["ties"] == LARGEST for row in rows)
    tasks = len(rows[0]["average"])
    return [
        "The gap closes from both sides: the merge gains, and the last experts lose. Their last round has S/N steps at "
        "the end of the schedule (`alignment` has the lengths).",
        f"In task arithmetic λ multiplies Σ_t τ_t, so 1/T = {1 / tasks:g} is the average; λ = 0.4 lies "
        f"{0.4 * tasks:.1f} times as far.",
        f"TIES's λ multiplies the mean of the agreeing entries; of {len(rows)} choices {beyond} lie outside of the "
        f"paper's grid, 0.8 to 1.8, and {last} are the largest λ tried, {LARGEST:g}.",
    ]


def figures(rows: Sequence[Row], base: dict[str, float]) -> dict[str, Any]:
    numbers = rounds_of(rows)
    curves = {
        name: {number: values(rows, number, name) for number in numbers}
        for name in ("experts", *TUNED, *FIXED.values())
    }
    per_task = {name: task_values(rows, name) for name in ("experts", "average")}
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


def _absolute_and_relative(rows: Sequence[Row], number: int, model: str) -> str:
    return f"{with_interval(values(rows, number, model))} ({fmean(relative(rows, number, model)):.1f})"


def _scales(rows: Sequence[Row], number: int, method: str) -> str:
    return ", ".join(f"{row['scale'][method]:g}" for row in rows if row["rounds"] == number)


def _per_task(title: str, rows: Sequence[Row], model: str, base: dict[str, float]) -> Table:
    def line(task: str, zero: float) -> dict[str, Cell]:
        cells: dict[str, Cell] = {"task": task, "zero-shot": f"{100 * zero:.1f}"}
        for number in rounds_of(rows):
            own = [100 * row[model][task] for row in rows if row["rounds"] == number]
            cells[f"N = {number}"] = with_interval(own)
        return cells

    return Table(title, [line(task, zero) for task, zero in base.items()])
