"""Hosts of a fleet: processes with homes and current folders of their own, which do not see the driver's folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from tests.flows.forked import Forked
from tests.flows.kill_driver import wait_for
from tests.flows.small_project import ROOT, environment
from tests.guard import end_below, guarded

_HIDE = 'mount -t tmpfs none "$0" && exec "$@"'


class Hosts:
    """Machines by their names; each runs one command.

    Args:
        hidden: a folder that none of them sees, where this system lets a process have mounts of its own.
        forked: start them in a moment, from a process that has imported torch; they then see all folders.
    """

    def __init__(self, folder: Path, hidden: Path, forked: bool = False, **variables: str) -> None:
        self.folder, self._hidden, self._forked, self._variables = folder, hidden, forked, variables
        hidden.mkdir(parents=True, exist_ok=True)
        self._processes: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def start(self, name: str, command: Sequence[str]) -> None:
        home = self.home(name)
        home.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": path, **self._variables}
        if self._forked:
            self._processes[name] = Forked(home, command, without_servers(environment()) | variables)
            return
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                guarded([*_hiding(self._hidden), *command]),
                cwd=home,
                env=without_servers(environment()) | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def home(self, name: str) -> Path:
        return self.folder / name

    def kill(self, name: str) -> None:
        """End a host as a cut cable does: kill -9 of all its processes."""
        process = self._processes.pop(name)
        if isinstance(process, Forked):
            ended = process.kill()
            with (self.folder / f"{name}.log").open("a") as log:
                log.write(ended.stdout + ended.stderr)
            return
        end_below(process.pid)
        process.kill()
        process.wait()

    def end(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def at_work(self, stage: str) -> list[str]:
        """Return the hosts that have a folder of a stage which they have not finished."""
        pattern = f"*/.cache/mergeflow/worker/stages/{stage}-*/"
        return sorted(path.relative_to(self.folder).parts[0] for path in self.folder.glob(pattern))


def without_servers(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what leads to a project, a cluster or Prefect."""
    leading = ("PREFECT", "MLFLOW", "DASK", "RAY", "MERGEFLOW", "XDG")
    return {name: value for name, value in variables.items() if not name.startswith(leading)}


class Machines:
    """A cluster of Dask or Ray: the host `head`, which is one of Ray's workers too, and others by their names."""

    def __init__(self, runner: str, hosts: Hosts, port: int, workers: Sequence[str]) -> None:
        self.hosts, self.workers, place = hosts, workers, f"127.0.0.1:{port}"
        if runner == "dask":
            self.address = {"DASK_SCHEDULER_ADDRESS": f"tcp://{place}"}
            self._head = f"dask scheduler --host 127.0.0.1 --port {port} --no-dashboard"
            self._worker = f"dask worker tcp://{place} --nthreads 1 --no-nanny --no-dashboard"
        else:
            self.address = {"RAY_ADDRESS": place}
            node = "--block --num-cpus 1 --object-store-memory 100000000"
            self._head = f"ray start --head --port {port} --include-dashboard false {node}"
            self._worker = f"ray start --address {place} {node}"

    def start(self, *names: str) -> None:
        """Start some hosts, or all."""
        for name in names or ("head", *self.workers):
            self.hosts.start(name, (self._head if name == "head" else self._worker).split())
            if "ray" in self._head:
                assert wait_for(partial(self._is_up, name), 120), self.hosts.log(name)

    def _is_up(self, name: str) -> bool:
        return "Ray runtime started" in self.hosts.log(name)

    def kill(self, name: str) -> tuple[str, ...]:
        """End a host, and return all that have ended: with the head the others do too."""
        if name != "head":
            self.hosts.kill(name)
            return (name,)
        self.hosts.end()
        return ("head", *self.workers)


@contextmanager
def machines(runner: str, hosts: Hosts, port: int, workers: Sequence[str]) -> Iterator[Machines]:
    cluster = Machines(runner, hosts, port, workers)
    try:
        cluster.start()
        yield cluster
    finally:
        hosts.end()


@cache
def _may_hide() -> bool:
    tried = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(tried, capture_output=True, check=False).returncode == 0


def _hiding(folder: Path) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", _HIDE, str(folder)] if _may_hide() else []
