"""Pipelines under either driver, killed at any moment: neither the driver nor the kills may show in a hash."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.flows.small_project import ROOT, environment, make_project, registry_template, run_in
from tests.project_folder import change_params
from tests.toy_project import make_toy_project

DRIVERS = {"flow": ("mergeflow", "run"), "dvc": ("dvc", "repro")}
MADE = ("outputs", "dvc.lock", ".mergeflow", ".dvc/cache", ".dvc/tmp", "mlflow.db", "mlartifacts")
GONE = (
    30.0  # seconds until what a killed driver leaves has ended: an orphaned stage of `dvc repro` ends when it is done
)
AGENTS, AGENTS_GONE = ("ray::DashboardAgent", "ray::RuntimeEnvAgent"), 90.0


def make_toy_repository(folder: Path, runner: str = "threads", **finetune: int) -> Path:
    """Make a toy project in a git repository, its stages two at once on `runner`."""
    make_toy_project(folder, **finetune)
    change_params(folder, {"run.runner": runner, "run.workers": 2})
    for name in (".dvcignore", ".gitignore", "inputs/README.md"):  # git keeps no empty folder
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    shutil.copyfile(registry_template(), folder / "mlflow.db")
    assert run_in(folder, "git", "init", "--quiet").returncode == 0
    return folder


PROJECTS: dict[str, Callable[[Path], Path]] = {"toy": make_toy_repository, "images": make_project}


def empty(folder: Path) -> None:
    for name in MADE:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in folder.glob("mlflow.db-*"):
        path.unlink()
    shutil.copyfile(registry_template(), folder / "mlflow.db")


def start(folder: Path, driver: str) -> "subprocess.Popen[bytes]":
    """Start a driver as the leader of a session, by which all that it starts can be found."""
    variables = {
        key: value for key, value in environment().items() if key != "PREFECT_HOME"
    }  # its making is killed too
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            DRIVERS[driver], cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True
        )


def strike(process: "subprocess.Popen[bytes]", alone: bool) -> None:
    """kill -9 of the driver, alone or with all that it started."""
    for pid in [process.pid] if alone else {process.pid, *session(process.pid)}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def session(leader: int) -> dict[int, str]:
    """The living processes of a session: command lines by process id."""
    commands = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (place / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(of) == leader and state != "Z":
                commands[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):  # it ended just now
            continue
    return commands


def wait_for(what: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def wait_for_end(leader: int) -> bool:
    """Whether all processes of a session ended in time. Two agents of Ray's try for a minute to tell the driver."""
    ours = wait_for(lambda: all(line.startswith(AGENTS) for line in session(leader).values()), GONE)
    return ours and wait_for(lambda: not session(leader), AGENTS_GONE)


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of dvc.lock, if there is one, and of every output except the report, which names the time."""
    files = [path for path in (folder / "outputs").rglob("*") if path.is_file() and path.name != "report.html"]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [*folder.glob("dvc.lock"), *sorted(files)]
    }


def mend(folder: Path, driver: str) -> None:
    """Do what docs/operations.md says of the one failure that a kill may cause: DVC cannot read its own files."""
    last = (folder.parent / f"{folder.name}.log").read_text().strip()[-300:]
    assert driver == "dvc", last
    assert "validation failed" in last or "RWLock-file" in last, last
    done = run_in(folder, "mergeflow", "status")
    assert done.returncode == 0, done.stderr
    print("mended", done.stderr.strip(), flush=True)


@dataclass(frozen=True)
class Kill:
    """One kill: which driver, its process, when, alone or with its children, what was at work, what lived on."""

    driver: str
    leader: int
    seconds: float
    alone: bool
    at_work: tuple[str, ...]
    left: dict[int, str]


def kill_at_random(folder: Path, kills: int, span: float, seed: int, expected: dict[str, str]) -> list[Kill]:
    """Start drivers by lot and kill each at a random moment; a project that is finished is emptied and begins again.

    Args:
        span: the moments are drawn uniformly from the first `span` seconds.
        seed: of drivers, moments, and whether children die too.
        expected: the `hashes` of an undisturbed run, which every finished run must have.
    """
    lot, done = random.Random(seed), list[Kill]()
    while len(done) < kills:
        driver, alone, moment = lot.choice(sorted(DRIVERS)), lot.random() < 0.5, lot.uniform(0, span)
        process = start(folder, driver)
        try:
            if process.wait(moment):
                mend(folder, driver)
                continue
        except subprocess.TimeoutExpired:
            at_work = tuple(sorted(path.stem for path in (folder / ".mergeflow/progress").glob("*.json")))
            strike(process, alone)
            if driver == "flow" or not alone:  # what `dvc repro` alone leaves is a stage, which ends when it is done
                wait_for_end(process.pid)
            done.append(Kill(driver, process.pid, round(moment, 1), alone, at_work, session(process.pid)))
            print(done[-1], flush=True)
            continue
        written = hashes(folder)
        assert written == expected, {name for name in written | expected if written.get(name) != expected.get(name)}
        empty(folder)
    return done
