"""The pipeline as a Prefect flow: the stages of dvc.yaml that are stale, placed on the configured task runner."""

import errno
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed
from prefect.states import State
from prefect.task_runners import TaskRunner

from flows.artifacts import publish_results
from flows.choices import read_choices
from flows.dvc_process import wait_for_dvc
from flows.faults import keep_traceback
from flows.orphans import remove_orphans
from flows.plan import REGISTER, are_results_wanted, stages_to_run
from flows.report import publish_report
from flows.rounds import MULTITASK, run_rounds
from flows.runners import task_runner
from flows.slots import gpu_slot
from flows.staleness import push_outputs, record_outputs
from flows.stopping import started
from flows.turns import presence
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph, upstream
from tasks.project.runner import run_stage
from tasks.project.stage import STUDIES, Stage
from tasks.project.worker import check_worker, running_code

PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET}


def is_passing_fault(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Whether a failure may go away by itself (a network or file-system hiccup); bad input never does."""
    try:
        state.result()
    except OSError as error:
        return error.errno in PASSING
    except Exception:
        return False
    return False


@task(
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_condition_fn=is_passing_fault,
    task_run_name="{address}",
)
def stage(root: str, address: str, force: bool = False, driver: dict[str, str] | None = None) -> bool:
    """Run one stage; return whether it had anything to do.

    Args:
        root: the project folder.
        address: the stage's name, with `@item` where it is repeated.
        force: run even if nothing changed.
        driver: the code and packages that the stage has to run by; None: any.
    """
    folder = Path(root)
    try:
        check_worker(driver or {}, address)
        found = load_graph(folder, studies=address.startswith(STUDIES))[address]
        with gpu_slot(folder, found):
            ran = run_stage(folder, found, force)
    except Exception as error:
        keep_traceback(error)
        raise
    get_run_logger().info("%s %s", address, "has run" if ran else "is up to date")
    return ran


def submit(
    runner: TaskRunner[Any], root: Path, address: str, above: Iterable[PrefectFuture[Any]] = (), force: bool = False
) -> PrefectFuture[bool]:
    """Place one stage on the runner.

    Args:
        runner: a started task runner.
        root: the project folder.
        address: which stage.
        above: stages it comes after, for the run's picture; finished ones, since a worker that waits runs nothing else.
        force: run it even if it is up to date.
    """
    arguments = {"root": str(root), "address": address, "force": force, "driver": running_code()}
    placed: PrefectFuture[bool] = runner.submit(stage, arguments, wait_for=list(above))
    return placed


@flow(name="pipeline", validate_parameters=False)
def pipeline(
    root: str, force_register: bool = False, push: bool = False, targets: list[str] | None = None
) -> list[str]:
    """Run every stale stage and what depends on it; then record the outputs in DVC, as its only writer.

    Args:
        root: the project folder.
        force_register: register again although the files are up to date (the registry has lost or never seen them).
        push: send the outputs to DVC's remote at the end.
        targets: only these stages and what they need, by address or name, studies too; None for all of dvc.yaml.

    Returns:
        The addresses of the stages that were submitted.

    Raises:
        MergeflowError: a stage failed; stages that do not depend on it have finished and are kept.
    """
    with presence(Path(root)):
        return run_project(Path(root), force_register, push, targets)


def run_project(root: Path, force_register: bool, push: bool, targets: list[str] | None) -> list[str]:
    """Do what `pipeline` does, within the flow run that calls it, and publish report and results.

    Where only other stages are asked for, such as a study, no results are published: those on disk are of another run,
    and what the registry has of it stays as it is.

    Args: As of `pipeline`.
    """
    done = _run_stages(root, force_register, push, targets)
    if are_results_wanted(targets, load_graph(root, studies=True)):
        publish_report(root)
        publish_results(root)
    return done


def _run_stages(root: Path, force_register: bool, push: bool, targets: list[str] | None) -> list[str]:
    run = read_choices(root).run  # first: a task whose name is mistyped takes the outputs of the right one away
    wait_for_dvc(root, get_run_logger().warning)
    remove_orphans(root, get_run_logger().info)
    stages = load_graph(root, studies=targets is not None)
    always = {REGISTER} if force_register else set[str]()
    todo = stages_to_run(root, stages, targets, always)
    with started(task_runner(run.runner, run.workers)) as runner:
        # The registry is told DVC's hashes, so the files are recorded before it is asked.
        for group in ([a for a in todo if a != REGISTER], [a for a in todo if a == REGISTER]):
            _run_group(root, runner, group, stages, always)
    if push:
        push_outputs(root)
    return todo


def _run_group(
    root: Path, runner: TaskRunner[Any], group: list[str], stages: dict[str, Stage], always: set[str]
) -> None:
    """Run stages as soon as what they read is there, record the finished ones, then raise what went wrong.

    A stage is handed to the runner only when it can start: on Ray each waiting one would hold a process.
    """
    above = {address: [up for up in upstream(stages[address], stages) if up in group] for address in group}
    futures: dict[str, PrefectFuture[bool]] = {}
    states: dict[str, State[Any]] = {}
    try:
        while True:
            ready = [a for a in group if a not in futures and all(_is_done(states.get(up)) for up in above[a])]
            if MULTITASK in ready:
                run_rounds(runner, root, stages[MULTITASK])
            for address in ready:
                futures[address] = submit(
                    runner, root, address, [futures[up] for up in above[address]], address in always
                )
            running = {future: address for address, future in futures.items() if address not in states}
            if not running:
                break
            finished = next(as_completed(list(running)))
            finished.wait()
            states[running[finished]] = finished.state
    finally:
        # In running order, as `dvc repro` records them: in which order they finished must not show in dvc.lock.
        failed = {address: state for address, state in states.items() if not state.is_completed()}
        try:
            record_outputs(root, [address for address in group if _is_done(states.get(address))])
        except MergeflowError as error:
            if not failed:
                raise
            print(error, file=sys.stderr)  # what made the stages fail may be behind it too
    _raise_first(failed)


def _is_done(state: State[Any] | None) -> bool:
    return state is not None and state.is_completed()


def _raise_first(failures: dict[str, State[Any]]) -> None:
    """Raise what went wrong: errors of bad input together in one message.

    A fault of ours is raised as it is, after what the user can mend was printed.
    """
    messages: list[str] = []
    faults: list[Exception] = []
    for address, state in failures.items():
        try:
            state.result()
        except MergeflowError as error:
            messages.append(f"{address}: {error}")
        except Exception as error:
            faults.append(error)
    told = "\n".join(messages)
    if faults and told:
        print(told, file=sys.stderr)
    if faults:
        raise faults[0]
    if told:
        raise MergeflowError(told)
