"""One deployed run at a time in a project folder; one that was killed is reported by the run that takes over."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from filelock import FileLock
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from tasks.runner import STATE


@contextmanager
def turn(root: Path) -> Iterator[None]:
    """Wait until no other deployed run works in the folder, and hold it while the block runs.

    Whoever holds the folder leaves its run's id there. The lock falls when its holder dies, the id stays: then that run
    is one of which the server still believes that it runs, because its worker died too.
    """
    note = root / STATE / "turn"
    (root / STATE).mkdir(exist_ok=True)
    with FileLock(root / STATE / "turn.lock"):
        if note.exists():
            _report_crashed(note.read_text())
        note.write_text(flow_run.id or "")
        try:
            yield
        finally:
            note.unlink()


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
