"""Run a Prefect server inside this process for a run without one; it ends with the run."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_HOME

from mergeflow.errors import MergeflowError
from tasks.running.runner import check_disk

if TYPE_CHECKING:
    import uvicorn


ADDRESS = "MERGEFLOW_EMBEDDED_PREFECT"  # marks the server as ours for the stages' processes
STOP_SECONDS = 10.0  # for what is still under way; then the server ends with the process


@contextmanager
def embedded_server(home: Path) -> Iterator[None]:
    """Serve Prefect's API on a free local port while the block runs, unless Prefect is configured to use a server.

    Prefect's own temporary server is a process of its own: kill -9 of the run leaves it behind, and it imports and
    starts everything a second time. A thread ends with the process, whatever ends that. What it has recorded stays in
    Prefect's database, where `prefect server start` with the same PREFECT_HOME shows it.
    """
    if PREFECT_API_URL.value() is not None:  # from the environment or from a profile
        yield
        return
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home))
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the log goes to the database
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        # By the environment: Prefect's own threads and the workers' processes inherit no settings of a block.
        os.environ |= {ADDRESS: url, "PREFECT_API_URL": url}
        refresh_global_settings_context()
        try:
            with _served(listener):
                yield
        finally:
            del os.environ[ADDRESS], os.environ["PREFECT_API_URL"]
            refresh_global_settings_context()


def is_server_chosen() -> bool:
    return PREFECT_API_URL.value() not in (None, os.environ.get(ADDRESS))


@contextmanager
def _served(listener: socket.socket) -> Iterator[None]:
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    ready: Future[uvicorn.Server] = Future()
    thread = threading.Thread(target=asyncio.run, args=(_serve(listener, ready),), daemon=True, name="prefect-server")
    thread.start()
    try:
        server = ready.result()
    except Exception as error:
        check_disk(error, PREFECT_HOME.value())
        raise MergeflowError(
            f"Prefect's own server does not start: {str(error).splitlines()[0]}. Its database is in PREFECT_HOME, "
            f"{PREFECT_HOME.value()}: if it is damaged or a newer Prefect made it, move it away, which loses only "
            "Prefect's history of runs; or set PREFECT_API_URL to a server."
        ) from error
    try:
        yield
    finally:
        for worker in (EventsWorker, APILogWorker):  # the last states of the tasks, the last lines of the log
            worker.drain_all(timeout=STOP_SECONDS, at_exit=False)
        server.should_exit = True
        thread.join(STOP_SECONDS)


async def _serve(listener: socket.socket, ready: "Future[uvicorn.Server]") -> None:
    """Serve until the server is told to exit; `ready` gets the server, or what is wrong."""
    import uvicorn
    from prefect.server.api.server import create_app

    try:
        # Prefect runs an app's start-up once for ever, and keeps the app: a second run in this process needs a new one.
        app = create_app(ephemeral=True, ignore_cache=True)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        # Not by uvicorn, which prints a start-up's error as a traceback and does not hand it on.
        async with app.router.lifespan_context(app):
            ready.set_result(server)
            await server.serve([listener])
    except Exception as error:
        if not ready.done():
            ready.set_exception(error)
        elif not ready.result().should_exit:
            raise
        # else the run is over: services of Prefect's that had not started yet fail when they are told to stop
