"""The task vectors after every epoch of the study `gradients`: how near they are to the whole one, and to −∇L(θ0)."""

from collections.abc import Mapping, Sequence
from math import hypot
from statistics import fmean

from torch import Tensor

from studies.old.claims import judge, paired
from studies.old.results import Cell, Finding, Table, with_interval
from studies.old.rows import Row, by_seed
from studies.theory.gradients import cosines_to_first

STEP = "step"  # the kind of the rows that have the cosines of task vectors
HIGH = 0.8  # of a cosine; the paper's own number for gradients, and ours for task vectors, of which it prints none
COSINES = {"whole": "with the whole one", "descent": "with the negative gradient at θ0"}


def vector_cosines(
    base: Mapping[str, Tensor], states: Sequence[Mapping[str, Tensor]], gradient: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Return cosines of τ_k = θ^(k) − θ0 for every epoch k.

    Args:
        base: θ0.
        states: θ^(k), for k = 1, … K.
        gradient: ∇L(θ0) over the task's images.

    Returns:
        `whole`: cos(τ_k, τ_K). `descent`: cos(τ_k, −∇L(θ0)).
    """
    vectors = [{name: state[name] - tensor for name, tensor in base.items()} for state in states]
    downhill = {name: -value for name, value in gradient.items()}
    return {
        "whole": cosines_to_first([vectors[-1], *vectors])[1:],
        "descent": cosines_to_first([downhill, *({name: one[name] for name in downhill} for one in vectors)])[1:],
    }


def vector_table(rows: Sequence[Row]) -> Table:
    """Return both cosines over the epochs, the mean over tasks with its interval over seeds."""
    lines: list[dict[str, Cell]] = []
    for run in dict.fromkeys(row["run"] for row in rows if row["kind"] == STEP):
        for what, words in COSINES.items():
            line: dict[str, Cell] = {"run": run, "cosine": words}
            for index in range(len(_steps(rows, run)[0][what])):
                line[f"epoch {index + 1}"] = with_interval(over_tasks(_steps(rows, run), what, index), 2)
            lines.append(line)
    return Table("The task vector after each epoch: mean over tasks", lines)


def vector_findings(rows: Sequence[Row], run: str, ours: bool) -> list[Finding]:
    """Hold what the paper says of first-epoch task vectors against one run.

    Args:
        rows: of the study.
        run: as readers call it.
        ours: whether the run is an addition of ours.
    """
    own = _steps(rows, run)
    first, last = (over_tasks(own, "descent", index) for index in (0, -1))
    aligned, by_chance = over_tasks(own, "whole", 0), by_seed(own, lambda few: fmean(_unrelated(row) for row in few))
    return [
        judge(
            "G6",
            f"Fully trained and first-epoch task vectors are aligned: run {run}.",
            {"cosine": aligned},
            f"cosine ≥ {HIGH}, mean over tasks (the paper's own number for gradients)",
            low=HIGH,
            unit="",
            digits=2,
            ours=ours,
        ),
        judge(
            "G6",
            f"They are more aligned than they would be if every later epoch had gone off at right angles: run {run}.",
            {"cosine less that of orthogonal epochs": paired(aligned, by_chance)},
            "paired difference ≥ 0, mean over tasks; epochs of the same lengths",
            low=0,
            unit="",
            digits=3,
            ours=True,
            beside=f"; orthogonal epochs give {with_interval(by_chance, 3)}",
        ),
        judge(
            "G6",
            f"First-epoch task vectors are closer to the task's gradient than fully trained ones: run {run}.",
            {"cosine with −∇L(θ0), first less last": paired(first, last)},
            "paired difference ≥ 0, mean over tasks",
            low=0,
            unit="",
            digits=3,
            ours=ours,
        ),
    ]


def _unrelated(row: Row) -> float:
    """Return cos(τ_1, τ_K) of epochs as long as these and orthogonal to each other: ‖δ_1‖ / √Σ_k ‖δ_k‖²."""
    return float(row["share"][0] / hypot(*row["share"]))


def _steps(rows: Sequence[Row], run: str) -> list[Row]:
    return [row for row in rows if (row["run"], row["kind"]) == (run, STEP)]


def over_tasks(rows: Sequence[Row], what: str, epoch: int) -> list[float]:
    """Return the mean over tasks of one epoch's entry of a curve: one value per seed.

    Args:
        rows: of one run.
        what: the curve, such as `descent` or `whole`.
        epoch: index of the entry, from 0; negative from the end.
    """
    return by_seed(list(rows), lambda own: fmean(row[what][epoch] for row in own))
