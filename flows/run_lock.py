"""One deployed run at a time in a project folder; a run that was killed is reported by the next one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from tasks.project.files import file_lock, is_free
from tasks.project.stage import STATE


@contextmanager
def exclusive_run(root: Path) -> Iterator[None]:
    """Wait until no other deployed run works in the folder, and hold it while the block runs."""
    with _signed_in(root) as this_run, file_lock(root / STATE / "turn.lock", "the other run in this folder"):
        _report_killed(this_run)
        yield


@contextmanager
def tracked_run(root: Path) -> Iterator[None]:
    """Do what `exclusive_run` does without waiting, for a run that a person started and watches."""
    with _signed_in(root) as this_run:
        _report_killed(this_run)
        yield


@contextmanager
def _signed_in(root: Path) -> Iterator[Path]:
    """Hold a lock file that has the run's id as name while the block runs, waiting or working.

    The operating system lets go of the lock when the process dies, and the file stays: so the next run finds it, and
    tells the server that this run is over.
    """
    lock = root / STATE / "runs" / f"{flow_run.id}.lock"
    with file_lock(lock, f"the run {lock.stem}"):
        try:
            yield lock
        finally:
            lock.unlink(missing_ok=True)


def _report_killed(this_run: Path) -> None:
    for other in this_run.parent.glob("*.lock"):
        if other != this_run and is_free(other):
            _report_crashed(other.stem)
            other.unlink(missing_ok=True)


def _report_crashed(run_id: str) -> None:
    """Tell the server that a run is over, unless it knows."""
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(UUID(run_id))
            if run.state is None or not run.state.is_final():
                client.set_flow_run_state(run.id, Crashed(message="Its process was killed."), force=True)
                get_run_logger().warning("run '%s' was killed; this one continues its work", run.name)
    except (ObjectNotFound, ValueError):  # a run of another server
        return
