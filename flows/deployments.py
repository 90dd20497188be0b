"""The flows that prefect.yaml deploys, on a schedule or on demand, and the pages that they publish.

Each works in a project folder, one run after the other: `root` is that folder or lies in it; by default the folder
that prefect.yaml's pull step goes to. Prefect shows beside each parameter what `Args` says of it.
"""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from flows.pipeline import publish_decision, run_project
from flows.run_lock import exclusive_run
from flows.status import outcome, outcome_of, reported
from mergeflow.application import find_project
from mergeflow.errors import MergeflowError
from tasks.project.parameters import load_params


@flow(name="nightly")
def nightly(
    root: str = ".", push: bool = False, targets: list[str] | None = None, metrics: str | None = None
) -> list[str]:
    """Bring the project up to date: stages with changed data, parameters or code run again, then the gates decide.

    Args:
        metrics: a file for Prometheus about the run, from the project folder; None: none is written.

    Returns:
        The addresses of the stages that were submitted.
    """
    folder = project_folder(root)
    cancel_missed_runs()
    with exclusive_run(folder), reported(folder, None, folder / metrics if metrics else None) as ran:
        ran += run_project(folder, push, targets)
        return named(outcome(folder, ran), ran)


@flow(name="add-task")
def add_task(
    source: str, name: str | None = None, promote: bool = True, full_sweep: bool = False, root: str = "."
) -> dict[str, Any]:
    """Add a task to the champion: one expert, a new merge, the gates, promotion; nothing else is touched.

    Args:
        source: a folder of images or Parquet files, or KIND:ADDRESS as in params.yaml.
        name: of the task; None takes the last part of the source.
        promote: make the result champion if the gates let it.
        full_sweep: try every candidate of params.yaml, as a run does.

    Returns:
        What was registered, and the gates' decision.
    """
    from flows.rebuild import add_task as adding
    from registry.store import connect

    folder, logger = project_folder(root), get_run_logger()
    with exclusive_run(folder):
        task, place = adding.read_address(folder, source, name)
        store = connect(project_root=folder)
        done = adding.add_task(folder, store, task, place, promote=promote, full_sweep=full_sweep, report=logger.info)
        publish_decision(store, done.model, done.version, done.champion, done.decision)
    refused = done.decision is not None and not done.decision.promote
    return named(outcome_of(done.champion == done.version, refused), asdict(done))


@flow(name="gate")
def gate(version: str | int = "candidate", model: str | None = None, root: str = ".") -> dict[str, Any]:
    """Ask the gates of params.yaml about a registered version, and make it champion if they let it.

    Args:
        version: its number or an alias.
        model: the registered model; None for params.yaml's.

    Returns:
        The version, the champion now, whether it changed; a refused version is not an error.
    """
    from registry.promotion import promote
    from registry.store import connect
    from registry.versions import find_version

    folder = project_folder(root)
    settings = load_params(folder / "params.yaml").registry
    store, asked = connect(project_root=folder), model or settings.model
    number = find_version(store, asked, str(version)).version
    done = promote(store, asked, number, settings)
    publish_decision(store, asked, number, done.champion, done.decision)
    answer = {"model": asked, "version": number, "champion": done.champion, "changed": done.changed}
    return named(outcome_of(done.changed, done.decision is not None), answer)


def cancel_missed_runs() -> None:
    """Cancel the runs that the schedule has planned until now with this run's parameters: nights without a worker.

    One run brings the project up to date however many were missed. (A limit of the deployment would not do: a worker
    that takes one run after the other starts each of them in its turn.)
    """
    with get_client(sync_client=True) as client:
        this_run = client.read_flow_run(UUID(str(flow_run.id)))
        if this_run.deployment_id is None:
            return
        missed = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[this_run.deployment_id]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
                expected_start_time=FlowRunFilterExpectedStartTime.model_validate({"before_": datetime.now(UTC)}),
            )
        )
        for run in missed:
            if run.auto_scheduled and run.parameters == this_run.parameters:
                reason = f"The run '{this_run.name}' does this run's work, which no worker has taken in time."
                client.set_flow_run_state(run.id, Cancelled(name="Missed", message=reason))


def named(name: str, result: Any) -> Any:
    """Complete a flow in a state with a name, which Prefect's page shows and automations react to."""
    return Completed(name=name, data=result)


def project_folder(root: str) -> Path:
    """Return the project folder that is `root` or holds it."""
    start = Path(root).resolve()
    folder = find_project(start)
    if folder is None:
        raise MergeflowError(
            f"{start} is not in a project folder (dvc.yaml and params.yaml): start the worker with "
            "MERGEFLOW_PROJECT set to the project folder, or give the flow's parameter root."
        )
    return folder
