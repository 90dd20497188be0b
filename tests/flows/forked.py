"""Commands in processes of their own that need not import what each of them imports: torch, Prefect, MLflow, DVC.

One process imports these libraries, none of ours, and forks for every command. A fork is a process like any other: it
has its own modules of ours, its own environment, folder and output, and ends by itself. It starts in a tenth of a
second instead of five.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import threading
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

COMMANDS = ("mergeflow", "dvc", "prefect")
_LIBRARIES = (
    *("torch", "safetensors.torch", "open_clip", "pyarrow.parquet", "matplotlib.figure", "yaml", "typer", "PIL.Image"),
    *("mlflow", "mlflow.pyfunc", "prefect", "prefect.task_runners", "prefect.server.api.server", "uvicorn"),
    *("dvc.cli", "dvc.repo", "dvc.repo.reproduce", "dvc.repo.status", "dvc.commands.status", "dvc.commands.repro"),
)


def run_forked(
    folder: Path, command: tuple[str, ...], env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run` does with its output captured."""
    server, asked = _server(), json.dumps([str(folder), command, env])
    assert server.stdin
    assert server.stdout
    server.stdin.write(asked + "\n")
    server.stdin.flush()
    pid = json.loads(server.stdout.readline())
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.kill(pid, 9)

    timer = threading.Timer(timeout, stop)
    timer.start()
    status, out, err = json.loads(server.stdout.readline())
    timer.cancel()
    if late.is_set():
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return subprocess.CompletedProcess(command, status, out, err)


# What libraries read when they are imported, as `registry` and the tests' environment set it.
_SET = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}


@cache
def _server() -> "subprocess.Popen[str]":
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | _SET)
    atexit.register(process.kill)
    return process


def _serve() -> Any:
    """Fork for every line of the standard input; in the fork return the function that is the command."""
    answers, out, err = os.fdopen(os.dup(1), "w"), os.memfd_create("out"), os.memfd_create("err")
    os.dup2(2, 1)  # what a library prints when it is imported is no answer
    for library in _LIBRARIES:
        import_module(library)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # a collection in a fork would touch, and so copy, the pages of all that was imported here
    while line := sys.stdin.readline():
        folder, command, env = json.loads(line)
        pid = os.fork()
        if not pid:
            answers.close()
            return _become(folder, command, env, (out, err))
        print(pid, file=answers, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([status, *map(_taken, (out, err))]), file=answers, flush=True)
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


def _taken(output: int) -> str:
    """Return what was written, and empty the file for the next command."""
    size = os.lseek(output, 0, os.SEEK_END)
    found = os.pread(output, size, 0).decode(errors="replace")
    os.ftruncate(output, 0)
    os.lseek(output, 0, os.SEEK_SET)
    return found


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
