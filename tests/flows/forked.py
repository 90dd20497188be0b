"""Commands in processes of their own that need not import what each of them imports: torch, Prefect, MLflow, DVC.

One process of a whole test run imports these libraries, none of ours, and forks for every command another process,
which forks the command and tells how it ends. A fork is a process like any other: it has its own modules of ours, its
own environment, folder and output, and ends by itself. It starts in a tenth of a second instead of five.
"""

import atexit
import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from tests.guard import wait_with

ROOT = Path(__file__).parents[2]
COMMANDS = ("mergeflow", "dvc", "prefect")
_LIBRARIES = (
    *("torch", "safetensors.torch", "open_clip", "pyarrow.parquet", "matplotlib.figure", "yaml", "typer", "PIL.Image"),
    *("mlflow", "mlflow.pyfunc", "prefect", "prefect.task_runners", "prefect.server.api.server", "uvicorn"),
    *("dvc.cli", "dvc.repo", "dvc.repo.reproduce", "dvc.repo.status", "dvc.commands.status", "dvc.commands.repro"),
)


class Forked:
    """A command at work in a fork."""

    def __init__(self, folder: Path, command: Sequence[str], env: dict[str, str]) -> None:
        _hold_server()
        self._command, self._end, self._server = command, Future[list[Any]](), _connect()
        print(json.dumps([str(folder), command, env]), file=self._server, flush=True)
        self.pid = json.loads(self._server.readline())
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with self._server:
            self._end.set_result(json.loads(self._server.readline() or '[-9, "", "the server of forks has ended"]'))

    def wait(self, timeout: float | None = None) -> "subprocess.CompletedProcess[str]":
        """Return how it has ended.

        Raises:
            TimeoutExpired: it is still at work.
        """
        try:
            return subprocess.CompletedProcess(self._command, *self._end.result(timeout))
        except TimeoutError:
            raise subprocess.TimeoutExpired(self._command, timeout or 0) from None

    def kill(self) -> "subprocess.CompletedProcess[str]":
        """kill -9, unless it has ended; return what it had printed."""
        if not self._end.done():
            os.kill(self.pid, 9)
        return self.wait()


def run_forked(
    folder: Path, command: Sequence[str], env: dict[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Run a command as `subprocess.run` does with its output captured."""
    process = Forked(folder, command, env)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired as late:
        late.output, late.stderr = (done := process.kill()).stdout, done.stderr
        raise


# What libraries read when they are imported, as `registry` and the tests' environment set it.
_SET = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}


_IDLE = 5.0  # seconds without a test process after which the server ends
_started: list["subprocess.Popen[bytes]"] = []


@cache
def run_folder() -> Path:
    """Return a folder that all processes of a parallel test run share; a run in one process has its own."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = Path(tempfile.gettempdir()) / f"mergeflow-{run}" if run else Path(tempfile.mkdtemp(prefix="mergeflow-"))
    folder.mkdir(exist_ok=True)
    return folder


def _connect() -> IO[str]:
    """Connect to the server, which is started where none answers."""
    place = run_folder() / "forks"
    connection = socket.socket(socket.AF_UNIX)
    with FileLock(f"{place}.lock"):
        try:
            connection.connect(str(place))
        except OSError:
            place.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(place))
                listener.listen()
                command = [sys.executable, "-m", "tests.flows.forked"]
                _started.append(subprocess.Popen(command, cwd=ROOT, stdin=listener, env=os.environ | _SET))
            connection.connect(str(place))
    with connection:
        return connection.makefile("rw")


@cache
def _hold_server() -> IO[str]:
    """Keep a connection, without which the server would end between two commands."""
    return _connect()


def _serve() -> Any:
    """Fork for every command's connection; in a fork of such a fork return the function that is the command."""
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints when it is imported
    for library in _LIBRARIES:
        import_module(library)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # a collection in a fork would touch, and so copy, the pages of all that was imported here
    living: set[int] = set()
    while select.select([listener], [], [], _IDLE)[0] or living:
        living -= {pid for pid in living if os.waitpid(pid, os.WNOHANG)[0]}
        if select.select([listener], [], [], 0)[0]:
            connection, _ = listener.accept()
            pid = os.fork()
            if not pid:
                listener.close()
                return _answer(connection)
            living.add(pid)
            connection.close()
    return lambda: 0


def _answer(connection: socket.socket) -> Any:
    """Fork for the command that a test process sends; in the fork return the function that is the command.

    The command ends with the test process, whose end of the connection is then closed.
    """
    asked = connection.makefile("rw")
    if line := asked.readline():
        folder, command, env = json.loads(line)
        outputs = os.memfd_create("out"), os.memfd_create("err")
        pid = os.fork()
        if not pid:
            asked.close()
            connection.close()
            return _become(folder, command, env, outputs)
        print(pid, file=asked, flush=True)
        wait_with(connection.fileno(), pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed = [os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace") for output in outputs]
        with suppress(BrokenPipeError):  # the test process has ended
            print(json.dumps([status, *printed]), file=asked, flush=True)
    return lambda: 0


def _become(folder: str, command: list[str], env: dict[str, str], outputs: tuple[int, int]) -> Any:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    sys.argv = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    sys.path[0] = str(Path(sys.executable).parent)
    if (Path(folder) / "mergeflow/cli.py").is_file():  # a repository's own copy, which the command would start again
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))
    sys.modules["prefect.context"].refresh_global_settings_context()
    (entry,) = entry_points(group="console_scripts", name=command[0])
    return entry.load()


def _end(status: int) -> None:
    """End as the interpreter does, but for taking the modules apart: that takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    command = _serve()
    try:
        code = command()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(int(code or 0))
