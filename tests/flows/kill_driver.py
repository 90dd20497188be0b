"""The toy project under either driver, killed at any moment: neither driver nor kills may show in a hash."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.flows.small_project import ROOT, environment, run_in
from tests.toy_project import make_toy_project

DRIVERS = {"flow": ("mergeflow", "run"), "dvc": ("dvc", "repro")}


def make_repository(folder: Path, runner: str = "threads", **finetune: int) -> Path:
    """A toy project in a git repository, without the registry: each registration has an id and a time of its own."""
    make_toy_project(folder, **finetune)
    graph = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    del graph["stages"]["register"]
    (folder / "dvc.yaml").unlink()
    (folder / "dvc.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))
    values = yaml.safe_load((folder / "params.yaml").read_text())
    values["run"] |= {"runner": runner, "workers": 2}
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for name in (".dvcignore", ".gitignore", "inputs/README.md"):  # git keeps no empty folder
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    assert run_in(folder, "git", "init", "--quiet").returncode == 0
    return folder


def start(folder: Path, driver: str) -> "subprocess.Popen[bytes]":
    """Start a driver as the leader of a session, by which all that it starts can be found."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        DRIVERS[driver], cwd=folder, env=environment(), stdout=quiet, stderr=quiet, start_new_session=True
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
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (place / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(of) == leader and state != "Z":
                found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):  # it ended just now
            continue
    return found


def wait_for(what: Callable[[], object], seconds: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of dvc.lock and of every output except the report, which names the time."""
    files = [path for path in (folder / "outputs").rglob("*") if path.is_file() and path.name != "report.html"]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [folder / "dvc.lock", *sorted(files)]
    }


def kill_at_random(folder: Path, kills: int, span: float, seed: int) -> list[str]:
    """Start drivers by lot and kill each at a random moment; a project that is finished is emptied and begins again.

    Args:
        folder: of `make_repository`.
        kills: how many.
        span: the moments are drawn uniformly from the first `span` seconds.
        seed: of drivers, moments, and whether children die too.

    Returns:
        One line for each kill: driver, moment, `alone` or `all`, the stages that were at work.
    """
    lot, done = random.Random(seed), list[str]()
    expected: dict[str, str] = {}
    while len(done) < kills:
        driver, alone, moment = lot.choice(sorted(DRIVERS)), lot.random() < 0.5, lot.uniform(0, span)
        process = start(folder, driver)
        try:
            assert process.wait(moment) == 0, f"{driver} failed after: {done[-3:]}"
        except subprocess.TimeoutExpired:
            at_work = sorted(path.stem for path in (folder / ".mergeflow/progress").glob("*.json"))
            strike(process, alone)
            done.append(f"{driver} {moment:.1f} s {'alone' if alone else 'all'} {' '.join(at_work)}".strip())
            continue
        assert expected in ({}, hashes(folder)), done
        expected = hashes(folder)
        for left in ("outputs", ".mergeflow", "dvc.lock", ".dvc/cache", ".dvc/tmp"):
            path = folder / left
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return done
