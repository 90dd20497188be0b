"""What came of a run, in one word for a flow's state and as a file for whoever watches the night."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.plan import REGISTER
from mergeflow import layout
from mergeflow.documents import read_registration
from mergeflow.errors import first_line
from tasks.project.stage import STATE
from tasks.project.writing import write_atomically

NOTHING, CHAMPION, REFUSED, DONE, FAILED = "Nothing to do", "New champion", "Refused", "Done", "Failed"


def outcome(root: Path, ran: list[str]) -> str:
    """Return in a word what came of a run.

    Args:
        root: the project folder.
        ran: the stages that the run brought up to date.
    """
    if not ran:
        return NOTHING
    if REGISTER not in ran:
        return DONE
    decision = read_registration(root / layout.REGISTRATION)["decision"]
    return DONE if decision is None else CHAMPION if decision["promote"] else REFUSED


def outcome_of(promoted: bool, refused: bool) -> str:
    """Return in a word what came of a promotion."""
    return CHAMPION if promoted else REFUSED if refused else NOTHING


@contextmanager
def reported(root: Path, file: Path | None) -> Iterator[list[str]]:
    """Write a JSON file about the run in the block, however it ends; the block fills in the stages that ran.

    Args:
        root: the project folder.
        file: the file; None: none is written.
    """
    started, ran = time.time(), list[str]()
    report: dict[str, Any] = {"project": root.name, "started": started, "stages": ran}
    try:
        yield ran
        report |= {"outcome": outcome(root, ran), "error": None}
    except BaseException as error:
        status = getattr(error, "exit_code", None)  # of a stage's fault, whose traceback has been printed
        report |= {"outcome": FAILED, "error": f"exit status {status}" if status is not None else first_line(error)}
        raise
    finally:
        if file is not None:
            report |= {"seconds": round(time.time() - started, 3), "failed": _failures(root, started)}
            report |= _registered(root)
            write_atomically(file, json.dumps(report, indent=1))


def _registered(root: Path) -> dict[str, Any]:
    path = root / layout.REGISTRATION
    if not path.exists():
        return {"model": None, "version": None, "champion": None, "reasons": []}
    found = read_registration(path)
    reasons = found["decision"]["reasons"] if found["decision"] else []
    return {"model": found["model"], "version": found["version"], "champion": found["champion"], "reasons": reasons}


def _failures(root: Path, since: float) -> dict[str, str]:
    notes = (root / STATE / "failed").glob("*.json")
    return {path.stem: json.loads(path.read_text())["error"] for path in sorted(notes) if path.stat().st_mtime >= since}
