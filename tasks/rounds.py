"""The regime `iterative`: rounds of tuning and merging.

It depends on every merge method, so only code that trains in this regime imports it: in the other
regimes a new method trains nothing again.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import read_state
from mergeflow.training import Cost, IterativeRun
from tasks.project.files import file_lock
from tasks.project.stage import StageIO
from tasks.training import Report, Workbench, write_expert


def train_in_rounds(io: StageIO, folder: Path) -> Cost:
    """Do what is left of the stage's rounds, and write every task's last expert below `folder`; return the cost."""
    rounds = open_rounds(io)
    for number in range(1, rounds.rounds + 1):
        for task in rounds.waiting(number):
            tune(io, number, task)
        rounds.merge(number)
    return write_last_round(Workbench.open(io), rounds, folder)


def open_rounds(io: StageIO) -> IterativeRun:
    """Return the stage's iterative run, begun or not."""
    tasks, settings = tuple(io.section("tasks")), io.section("finetune")
    return IterativeRun(io.scratch / "rounds", io.dep(layout.BASE_MODEL), tasks, settings, io.section("seed"))


def tune(io: StageIO, number: int, task: str) -> None:
    """Tune one task of one round, unless it is done; two callers never do the same piece at once."""
    rounds = open_rounds(io)
    with file_lock(rounds.folder / f"{task}.lock", f"the task {task} of round {number}"), ExitStack() as held:
        if task in rounds.waiting(number):
            bench = Workbench.open(replace(io, holds=held))  # a device for this piece alone
            tune_round(bench, rounds, number, task, lambda done, total: io.report(f"round {number}", done, total))


def tune_round(bench: Workbench, run: IterativeRun, number: int, task: str, report: Report) -> None:
    model, validate = bench.model(), bench.validation([task])
    run.tune(number, model, bench.examples(task), lambda: validate(model), report)


def write_last_round(bench: Workbench, run: IterativeRun, folder: Path) -> Cost:
    """Write every task's last expert below `folder`, its trajectory that of all rounds; return the whole cost."""
    total = Cost()
    for task in run.tasks:
        target = folder / task
        target.mkdir(parents=True)
        records = [run.record(number, task) for number in range(1, run.rounds + 1)]
        rows = [{**row, "round": record["round"]} for record in records for row in record["epochs"]]
        tensors = read_state(run.expert(run.rounds, task))
        run.load_head(run.rounds, bench.examples(task))
        write_expert(bench, target, [task], tensors, run.settings, run.seed, rows)
        total = sum((_cost(record["cost"]) for record in records), total)
    return total


def _cost(record: dict[str, Any]) -> Cost:
    return Cost(**{name: value for name, value in record.items() if name != "examples_per_second"})
