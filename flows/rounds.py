"""The rounds of the iterative regime on the task runner: the tasks of a round at once, then their merge."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner

from flows.slots import gpu_slot
from tasks.project.graph import load_graph
from tasks.project.runner import is_up_to_date, open_stage, progress_file
from tasks.project.stage import STATE, Stage
from tasks.project.worker import check_worker, running_code
from tasks.rounds import open_rounds, tune

MULTITASK = "multitask"


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="round {number}: {name}")
def tune_in_round(root: str, number: int, name: str, driver: dict[str, str]) -> None:
    """Tune one task in one round, in the scratch folder where the stage `multitask` will look for it.

    Args:
        root: the project folder.
        number: the round, from 1.
        name: the task's name.
        driver: the code and packages that the work has to be done by.
    """
    check_worker(driver, f"round {number} of {name}")
    folder = Path(root)
    found = load_graph(folder)[MULTITASK]
    io, _ = open_stage(folder, found)
    with gpu_slot(folder, found), progress_file(folder / STATE, f"{MULTITASK} {name}") as report:
        tune(replace(io, report=report), number, name)


def run_rounds(runner: TaskRunner[Any], root: Path, stage: Stage) -> None:
    """Do the rounds of a stale stage `multitask` in the iterative regime; the stage then only gathers the experts.

    Args:
        runner: Prefect's, on which the round's tasks run beside each other.
        root: the project folder.
        stage: `multitask`.

    Raises:
        MergeflowError: a task failed in a round; the round's other tasks have finished and are kept.
    """
    io, fingerprint = open_stage(root, stage)
    if io.section("finetune").regime != "iterative" or is_up_to_date(root, stage, fingerprint):
        return
    rounds = open_rounds(io)
    for number in range(1, rounds.rounds + 1):
        waiting = rounds.waiting(number)
        shared = {"root": str(root), "number": number, "driver": running_code()}
        pieces = [runner.submit(tune_in_round, {**shared, "name": name}) for name in waiting]
        for piece in pieces:
            piece.wait()
        for piece in pieces:
            piece.result()
        rounds.merge(number)
