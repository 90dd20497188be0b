"""One deployed run at a time in a project folder; one that was killed is reported by the run that takes over."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from filelock import FileLock, Timeout
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from tasks.project.stage import STATE


@contextmanager
def turn(root: Path) -> Iterator[None]:
    """Wait until no other deployed run works in the folder, and hold it while the block runs.

    From here on each run, waiting or working, holds a lock file that has its id as name. The operating system lets go
    of the lock when the process dies, and the file stays: its run is one of which the server still believes that it
    is running, because the worker that watched it died too.
    """
    runs = root / STATE / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    own = runs / f"{flow_run.id}.lock"
    with FileLock(own):
        try:
            with FileLock(root / STATE / "turn.lock"):
                for other in runs.glob("*.lock"):
                    if other != own and _is_left(other):
                        _report_crashed(other.stem)
                        other.unlink(missing_ok=True)
                yield
        finally:
            own.unlink(missing_ok=True)


def _is_left(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0):
            return True
    except Timeout:
        return False


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
