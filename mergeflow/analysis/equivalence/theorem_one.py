"""Theorem 1 measured: one epoch is exact, more epochs leave a second-order gap. Each function returns table rows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mergeflow.analysis.equivalence.gradient_descent import gradient, merge
from mergeflow.analysis.equivalence.problems import Problem
from mergeflow.analysis.equivalence.second_order import log_log_slope, measure_gap

Row = dict[str, Any]
LEFT = ("gap", "after_derived", "after_printed", "after_halved")


def one_epoch_rows(problem: Problem, step: float) -> Iterator[Row]:
    """Yield per task how far τ_t^(1), a difference of trained weights, is from −η ∇L_t(θ0) (Remark 1)."""
    for number, (task, loss) in enumerate(zip(problem.tasks, problem.losses, strict=True)):
        vector = problem.expert(number, step, 1) - problem.start
        error = (vector + step * gradient(loss, problem.start)).abs().max()
        yield {
            "model": problem.name,
            "task": task,
            "step": step,
            "norm": float(vector.norm()),
            "largest": float(vector.abs().max()),
            "error": float(error),
        }


def joint_rows(problem: Problem, step: float, scales: Sequence[float], epochs: int) -> Iterator[Row]:
    """Yield per scale how far merged experts are from the joint run of step αη, after one epoch and after `epochs`.

    Args:
        problem: the tasks and their common start.
        step: η > 0 of the experts.
        scales: α, each with a joint run of step α η.
        epochs: k, compared with one epoch.
    """
    for count in (1, epochs):
        experts = [problem.expert(number, step, count) for number in range(len(problem.tasks))]
        for scale in scales:
            merged = problem.start + merge([expert - problem.start for expert in experts], scale)
            joint = problem.joint(scale * step, count)
            yield {
                "model": problem.name,
                "epochs": count,
                "scale": scale,
                "step": step,
                "moved": float((joint - problem.start).abs().max()),
                "error": float((merged - joint).abs().max()),
            }


def gap_rows(problem: Problem, scale: float, steps: Sequence[float], epochs: int) -> Iterator[Row]:
    """Yield the gap at every step size, and what the derived, the printed and the halved term leave of it.

    Args:
        problem: the tasks and their common start.
        scale: α of task arithmetic.
        steps: η, ascending.
        epochs: k ≥ 2.
    """
    for step in steps:
        found = measure_gap(problem.losses, problem.start, scale, step, epochs)
        switched = problem.switched_units(scale, step, epochs)
        yield {"model": problem.name, "scale": scale, **asdict(found), "switched": switched}


def slope_row(rows: Sequence[Row]) -> Row:
    """Return the log–log slopes over η of rows of one model that have the same k and α.

    Steps at which a ReLU switches side are left out: the gradient jumps there.
    """
    kept = [row for row in rows if not row["switched"]]
    steps = [row["step"] for row in kept]
    first = kept[0]
    slopes = {name: log_log_slope(steps, [row[name] for row in kept]) for name in LEFT}
    same = {key: first[key] for key in ("model", "epochs", "scale")}
    return {**same, "from": steps[0], "to": steps[-1], "steps": len(steps), **slopes}


def coefficient_rows(problem: Problem, scales: Sequence[float], step: float, epochs: int) -> Iterator[Row]:
    """Yield per scale the coefficient c of gap = c η² C as measured, beside the three that are claimed.

    Args:
        problem: the tasks and their common start.
        scales: α.
        step: η > 0.
        epochs: k ≥ 2.
    """
    for scale in scales:
        found = measure_gap(problem.losses, problem.start, scale, step, epochs)
        yield {
            "model": problem.name,
            "epochs": epochs,
            "step": step,
            "scale": scale,
            "measured": found.coefficient,
            "aligned": found.aligned,
            "derived": -scale,
            "halved": -scale / 2,
            "printed": 1.0,
        }


def epoch_rows(problem: Problem, scale: float, step: float, epochs: Sequence[int]) -> Iterator[Row]:
    """Yield how the gap grows with k: k(k−1)/2 times that of k = 2, since each term of the sum is the same to O(η).

    Args:
        problem: the tasks and their common start.
        scale: α of task arithmetic.
        step: η > 0.
        epochs: k ≥ 2, each.
    """
    first = measure_gap(problem.losses, problem.start, scale, step, 2).gap
    for count in epochs:
        gap = measure_gap(problem.losses, problem.start, scale, step, count).gap
        yield {
            "model": problem.name,
            "epochs": count,
            "step": step,
            "gap": gap,
            "ratio": gap / first,
            "derived": count * (count - 1) / 2,
        }
