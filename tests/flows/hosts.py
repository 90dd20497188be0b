"""Hosts of a fleet: processes with homes and current folders of their own, which do not see the driver's folder."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.flows.forked import Forked
from tests.flows.small_project import ROOT, environment
from tests.guard import guarded

_HIDE = 'mount -t tmpfs none "$0" && exec "$@"'


class Hosts:
    """Machines by their names; each runs one command.

    Args:
        folder: where their homes are made.
        hidden: a folder that none of them sees, where this system lets a process have mounts of its own.
        forked: start them in a moment, from a process that has imported torch; they then see all folders.
        variables: what their environment has besides.
    """

    def __init__(self, folder: Path, hidden: Path, forked: bool = False, **variables: str) -> None:
        self.folder, self._hidden, self._forked, self._variables = folder, hidden, forked, variables
        hidden.mkdir(parents=True, exist_ok=True)
        self._processes: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a host, or start it again."""
        home = self.home(name)
        home.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": path, **self._variables}
        if self._forked:
            self._processes[name] = Forked(home, command, without_servers(environment()) | variables)
            return
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                guarded([*_hiding(self._hidden), *command]),
                cwd=home,
                env=without_servers(environment()) | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def home(self, name: str) -> Path:
        """Return a host's home."""
        return self.folder / name

    def kill(self, name: str) -> None:
        """End a host as a cut cable does: kill -9 of all its processes."""
        process = self._processes.pop(name)
        if isinstance(process, Forked):
            ended = process.kill()
            with (self.folder / f"{name}.log").open("a") as log:
                log.write(ended.stdout + ended.stderr)
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        """Kill all of them."""
        for name in list(self._processes):
            self.kill(name)

    def log(self, name: str) -> str:
        """Read a host's log."""
        return (self.folder / f"{name}.log").read_text()

    def at_work(self, stage: str) -> list[str]:
        """Return the hosts that have a folder of a stage which they have not finished."""
        pattern = f"*/.cache/mergeflow/worker/stages/{stage}-*/"
        return sorted(path.relative_to(self.folder).parts[0] for path in self.folder.glob(pattern))


def without_servers(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what leads to a project, a cluster or Prefect."""
    leading = ("PREFECT", "MLFLOW", "DASK", "RAY", "MERGEFLOW", "XDG")
    return {name: value for name, value in variables.items() if not name.startswith(leading)}


@contextmanager
def dask_hosts(hosts: Hosts, port: int, workers: Sequence[str]) -> Iterator[Hosts]:
    """Start a scheduler, `head`, and workers of Dask; end them with the block."""
    try:
        hosts.start("head", dask_scheduler(port))
        for name in workers:
            hosts.start(name, dask_worker(port))
        yield hosts
    finally:
        hosts.end()


def dask_scheduler(port: int) -> list[str]:
    return ["dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]


def dask_worker(port: int) -> list[str]:
    return ["dask", "worker", f"tcp://127.0.0.1:{port}", "--nthreads", "1", "--no-nanny", "--no-dashboard"]


@cache
def _may_hide() -> bool:
    tried = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(tried, capture_output=True, check=False).returncode == 0


def _hiding(folder: Path) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", _HIDE, str(folder)] if _may_hide() else []
