"""The pipeline as a Prefect flow: the stages of dvc.yaml that are stale, placed on the configured task runner."""

import errno
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, wait
from prefect.states import State
from prefect.task_runners import TaskRunner

from flows.runners import task_runner
from flows.staleness import push_outputs, record_outputs, stale_stages
from mergeflow.errors import MergeflowError
from tasks.graph import Stage, downstream_closure, find_stage, load_graph, upstream
from tasks.parameters import load_params
from tasks.runner import run_stage

REGISTER = "register"
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
def stage(root: str, address: str, force: bool = False) -> bool:
    """Run one stage; return whether it had anything to do."""
    name, _, item = address.partition("@")
    return run_stage(Path(root), find_stage(load_graph(Path(root)), name, item or None), force)


@flow(name="pipeline", validate_parameters=False)
def pipeline(root: str, force_register: bool = False, push: bool = False) -> list[str]:
    """Run every stale stage and what depends on it; then record the outputs in DVC, as its only writer.

    Args:
        root: the project folder.
        force_register: register again although the files are up to date (the registry has lost or never seen them).
        push: send the outputs to DVC's remote at the end.

    Returns:
        The addresses of the stages that were submitted.

    Raises:
        MergeflowError: a stage failed; stages that do not depend on it have finished and are kept.
    """
    folder = Path(root)
    stages = load_graph(folder)
    stale = stale_stages(folder, stages) | ({"register"} if force_register else set())
    todo = downstream_closure(stale, stages)
    run = load_params(folder / "params.yaml").run
    with task_runner(run.runner, run.workers) as runner:
        # The registry is told DVC's hashes, so the files are recorded before it is asked.
        for group in ([a for a in todo if a != REGISTER], [a for a in todo if a == REGISTER]):
            _run_group(folder, runner, group, stages, force_register)
    if push:
        push_outputs(folder)
    return todo


def _run_group(
    root: Path, runner: TaskRunner[Any], group: list[str], stages: dict[str, Stage], force_register: bool
) -> None:
    """Run stages as soon as what they read is there, record the finished ones, then raise what went wrong."""
    futures: dict[str, PrefectFuture[bool]] = {}
    for address in group:
        above = [futures[up] for up in upstream(stages[address], stages) if up in futures]
        arguments = {"root": str(root), "address": address, "force": force_register and address == REGISTER}
        futures[address] = runner.submit(stage, arguments, wait_for=above)
    wait(list(futures.values()))
    record_outputs(root, [address for address, future in futures.items() if future.state.is_completed()])
    _raise_first({address: future.state for address, future in futures.items() if future.state.is_failed()})


def _raise_first(failures: dict[str, State[Any]]) -> None:
    """Raise what went wrong: people's errors together in one message, a fault of ours as it is."""
    messages = []
    for address, state in failures.items():
        try:
            state.result()
        except MergeflowError as error:
            messages.append(f"{address}: {error}")
    if messages:
        raise MergeflowError("\n".join(messages))
