"""The pipeline as a Prefect flow: the stages of dvc.yaml that are stale, placed on the configured task runner."""

import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture, as_completed
from prefect.states import State
from prefect.task_runners import TaskRunner

from flows.dvc_commands import (
    REGISTER,
    are_results_wanted,
    plan_run,
    push_outputs,
    record_outputs,
    registration_lost,
)
from flows.ephemeral_server import is_server_chosen
from flows.fleet import Fleet, fleet
from flows.run_lock import tracked_run
from flows.runners import task_runner
from flows.signals import started
from flows.status import keep_traceback, publish_report
from mergeflow import layout
from mergeflow.documents import Registration, Test, read_document
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph, upstream
from tasks.project.parameters import load_params
from tasks.project.stage import STATE, STUDIES, Stage
from tasks.rounds import open_rounds, tune
from tasks.running.runner import HOST, check_worker, is_up_to_date, open_stage, progress_file, run_stage, running_code
from tasks.travel.store import bring

if TYPE_CHECKING:
    from registry.store import Store

LIMIT = "gpu"
LEASE_SECONDS = 60  # the slot of a holder that was killed is free again after this long


@contextmanager
def gpu_slot(root: Path, stage: Stage) -> Iterator[None]:
    """Hold a slot while the block runs, if the stage uses a CUDA device and a person chose the Prefect server."""
    if not is_server_chosen() or not _uses_cuda(root, stage):
        yield
        return
    limit = _gpu_limit()
    try:
        # A renewal that fails must not end hours of training: the device's file lock still keeps others off.
        with concurrency(limit, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False):
            yield
    except ConcurrencySlotAcquisitionError as error:
        raise MergeflowError(
            f"stage {stage.address} uses a GPU and the Prefect server refuses a slot of the limit '{limit}' ({error}): "
            f"create it once with `prefect global-concurrency-limit create {limit} --limit 1`."
        ) from error


def _gpu_limit() -> str:
    """Return the limit of this machine where the server has one, else that of all machines without."""
    own_limit = f"{LIMIT}@{running_code()[HOST]}"
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        return client.read_global_concurrency_limit_by_name(own_limit).name
    return LIMIT


def _uses_cuda(root: Path, stage: Stage) -> bool:
    if "model" not in stage.params:  # it computes no features
        return False
    from tasks.running.devices import device_names  # torch comes with it

    return device_names(load_params(root / "params.yaml").run.device) != ["cpu"]


MULTITASK = "multitask"


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="round {number}: {name}")
def tune_in_round(root: str, number: int, name: str, driver: dict[str, str]) -> None:
    """Tune one task in one round, in the scratch folder where the stage `multitask` will look for it."""
    check_worker(driver, f"round {number} of {name}")
    folder = Path(root)
    multitask = load_graph(folder)[MULTITASK]
    io, _ = open_stage(folder, multitask)
    with gpu_slot(folder, multitask), progress_file(folder / STATE, f"{MULTITASK} {name}") as report:
        tune(replace(io, report=report), number, name)


def run_rounds(runner: TaskRunner[Any], root: Path, stage: Stage) -> None:
    """Do the rounds of a stale stage `multitask` in the iterative regime; the stage then only gathers the experts.

    Where a task fails, the others of its round are finished and kept.
    """
    io, fingerprint = open_stage(root, stage)
    if io.section("finetune").regime != "iterative" or is_up_to_date(root, stage, fingerprint):
        return
    bring(root, stage.deps)
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


PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET}


def is_passing_fault(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Check whether a failure may go away by itself (a network or file-system hiccup); bad input never does."""
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
def stage(
    root: str,
    address: str,
    force: bool = False,
    driver: dict[str, str] | None = None,
    machines: Fleet | None = None,
) -> bool:
    """Run one stage; return whether it had anything to do.

    Args:
        driver: the code and packages that the stage has to run by; None: any.
        machines: to which the stage may travel; None: it runs in this process.
    """
    folder = Path(root)
    try:
        check_worker(driver or {}, address)
        chosen = load_graph(folder, studies=address.startswith(STUDIES))[address]
        if machines is not None and machines.takes(chosen):
            ran = run_stage(folder, chosen, force, machines.work)
        else:
            with gpu_slot(folder, chosen):
                ran = run_stage(folder, chosen, force)
    except Exception as error:
        keep_traceback(error)
        raise
    get_run_logger().info("%s %s", address, "has run" if ran else "is up to date")
    return ran


def submit(
    runner: TaskRunner[Any],
    root: Path,
    address: str,
    above: Iterable[PrefectFuture[Any]] = (),
    force: bool = False,
    machines: Fleet | None = None,
) -> PrefectFuture[bool]:
    """Place one stage on the runner.

    Args:
        above: stages it comes after, for the run's picture; finished ones, since a worker that waits runs nothing else.
    """
    arguments = {"root": str(root), "address": address, "force": force, "driver": running_code(), "machines": machines}
    placed: PrefectFuture[bool] = runner.submit(stage, arguments, wait_for=list(above))
    return placed


@flow(name="pipeline", validate_parameters=False)
def pipeline(root: str, push: bool = False, targets: list[str] | None = None) -> list[str]:
    """Run every stale stage and what depends on it; then record the outputs in DVC, as its only writer.

    Where a stage fails, those that do not depend on it are finished and kept.
    """
    with tracked_run(Path(root)):
        return run_project(Path(root), push, targets)


def run_project(root: Path, push: bool, targets: list[str] | None) -> list[str]:
    """Run the pipeline within the flow run that calls it, and publish report and results.

    Where only other stages are asked for, such as a study, no results are published: those on disk are of another run,
    and what the registry has of it stays as it is.

    """
    done = _run_stages(root, push, targets)
    if are_results_wanted(targets, load_graph(root, studies=True)):
        publish_report(root)
        publish_results(root)
    return done


def _run_stages(root: Path, push: bool, targets: list[str] | None) -> list[str]:
    params, stages, todo = plan_run(root, push, targets, get_run_logger().info, get_run_logger().warning)
    with (
        fleet(root, params.run) as machines,
        started(task_runner("threads" if machines else params.run.runner, params.run.workers)) as runner,
    ):
        # The registry is told DVC's hashes, so the files are recorded before it is asked.
        workers = params.run.workers
        _run_group(root, runner, [address for address in todo if address != REGISTER], stages, machines, workers)
        if REGISTER in todo:  # it may be stale for DVC alone, while the registry has lost what it registered
            _run_group(root, runner, [REGISTER], stages, machines, workers, force=registration_lost(root))
    if push:
        push_outputs(root)
    return todo


def _run_group(
    root: Path,
    runner: TaskRunner[Any],
    group: list[str],
    stages: dict[str, Stage],
    machines: Fleet | None,
    workers: int,
    force: bool = False,
) -> None:
    """Run stages as soon as what they read is there, record the finished ones, then raise what went wrong.

    A stage is handed to the runner only when it can start: on Ray each waiting one would hold a process, and a running
    cluster has a number of workers of its own.
    """
    above = {address: [up for up in upstream(stages[address], stages) if up in group] for address in group}
    futures: dict[str, PrefectFuture[bool]] = {}
    states: dict[str, State[Any]] = {}
    try:
        while True:
            ready = [a for a in group if a not in futures and all(_is_done(states.get(up)) for up in above[a])]
            ready = ready[: workers - (len(futures) - len(states))]
            if MULTITASK in ready and machines is None:  # else the stage does its rounds itself, on one machine
                run_rounds(runner, root, stages[MULTITASK])
            for address in ready:
                after = [futures[up] for up in above[address]]
                futures[address] = submit(runner, root, address, after, force, machines)
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
    message = "\n".join(messages)
    if faults and message:
        print(message, file=sys.stderr)
    if faults:
        raise faults[0]
    if message:
        raise MergeflowError(message)


def publish_results(root: Path) -> None:
    """Publish result table, gates' decision, links to the report and to MLflow's run, as far as there are any."""
    test, registration = root / layout.TEST, root / layout.REGISTRATION
    if test.exists():
        create_markdown_artifact(results_table(read_document(test, Test)), "results", "Test accuracy in %")
    report = root / layout.REPORT
    if report.exists():
        create_link_artifact(report.resolve().as_uri(), "report.html", "report", f"On the worker, {report.resolve()}")
    if registration.exists() and not registration_lost(root):
        from registry.store import connect

        facts = read_document(registration, Registration)
        decision = SimpleNamespace(**facts["decision"]) if facts["decision"] else None
        publish_decision(connect(project_root=root), facts["model"], facts["version"], facts["champion"], decision)


def publish_decision(store: "Store", model: str, version: str, champion: str | None, decision: Any) -> None:
    """Publish the gates' decision on a version, with a link to its run.

    Args:
        decision: its `promote` and `reasons`; None for a version that was champion already.
    """
    from registry.versions import find_version

    promote, reasons = (decision.promote, decision.reasons) if decision else (None, [])
    answer = {True: "passed the gates", False: "refused", None: "was champion already"}[promote]
    lines = [f"**{model} version {version}: {answer}.**", "", *(f"- {reason}" for reason in reasons)]
    lines += ["", f"Champion: version {champion}" if champion else "No champion."]
    create_markdown_artifact("\n".join(lines), "decision", f"{model} version {version}: {answer}")
    get_run_logger().info("%s version %s %s; champion is version %s", model, version, answer, champion)
    run_id = find_version(store, model, version).run_id
    if run_id and store.uri.startswith("http"):
        page = f"{store.uri.rstrip('/')}/#/experiments/{store.experiment_id}/runs/{run_id}"
        create_link_artifact(page, "the run in MLflow", "mlflow-run")


def results_table(test: Test) -> str:
    """Return the table task × method on the locked test set as Markdown: accuracy in percent, the winner in bold."""
    rows = test["rows"]
    names = [f"**{row['name']}**" if row["name"] == test["winner"] else row["name"] for row in rows]
    lines = [["task", *names], ["---", *("---:" for _ in rows)]]
    lines += [[task, *(f"{100 * row['accuracy'][task]:.1f}" for row in rows)] for task in test["tasks"]]
    lines += [[key, *(f"{100 * row[key]:.1f}" for row in rows)] for key in ("mean", "normalised")]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
