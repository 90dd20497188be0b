"""DVC asked as a command, which waits for another DVC at work in the project and says for whom."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # DVC needs it too

from flows.lockfile import RUNNING, dvc_home, mend_locks
from mergeflow.errors import MergeflowError

WAIT = 1.0  # seconds between questions
# Beside `dvc repro` a question is answered too: its lock of a stage's files, held while the stage runs, guards writers.
_ASK = """
import contextlib, sys
import dvc.rwlock
dvc.rwlock.rwlock = lambda *_: contextlib.nullcontext()
from dvc.cli import main
sys.exit(main(sys.argv[1:]))
"""


def dvc(root: Path, *arguments: str) -> str:
    """Run a command of DVC's to its end and return what it printed.

    Raises:
        MergeflowError: it failed.
    """
    return _run(root, [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments])


def ask_dvc(root: Path, *arguments: str) -> str:
    """Run a command of DVC's that only reads, at once, whatever stage another DVC runs.

    Raises:
        MergeflowError: it failed.
    """
    return _run(root, [sys.executable, "-c", _ASK, "--wait-for-lock", *arguments])


def _run(root: Path, command: list[str]) -> str:
    told: set[str] = set()
    while True:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        text = done.stderr.strip() or done.stdout.strip()
        holders = [(int(pid), words) for pid, words in re.findall(r"\(PID (\d+)\): (.*)", text) if "is busy" in text]
        if any(_is_dvc(pid) for pid, _ in holders):
            _tell(holders, told)
            time.sleep(WAIT)
        elif not mend_locks(root):
            words = " ".join(command[command.index("--wait-for-lock") + 1 :])
            raise MergeflowError(f"`dvc {words}` failed: {text or f'it ended with status {done.returncode}'}")


def wait_for_dvc(root: Path, report: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> None:
    """Wait until no other DVC makes outputs of the project."""
    told: set[str] = set()
    while holders := writers(root):
        _tell(holders, told, report)
        time.sleep(WAIT)


def writers(root: Path) -> list[tuple[int, str]]:
    """Return process and command of each DVC that makes outputs of the project now."""
    path = dvc_home(root) / RUNNING
    try:
        entries = json.loads(path.read_text("utf-8")).get("write", {})
        found = {(int(entry["pid"]), str(entry["cmd"])) for entry in entries.values()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):  # none has run, or it writes just now
        return []
    return sorted((pid, words) for pid, words in found if _is_dvc(pid))


def _is_dvc(pid: int) -> bool:
    """Whether a process lives and is DVC; the number of one that was killed may be another program's by now."""
    try:
        return any("dvc" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _tell(
    holders: list[tuple[int, str]],
    told: set[str],
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> None:
    """Say once for whom is waited."""
    names = ", ".join(f"`dvc {words.partition(' ')[2]}` (process {pid})" for pid, words in holders)
    if names not in told:
        told.add(names)
        report(f"Waiting for {names}, which is at work in this project.")
