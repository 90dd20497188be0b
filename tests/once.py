"""Folders that no test changes, made once for all processes of a parallel run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has made, in this process or in another one of the same run.

    Args:
        make: makes the folder whose path it gets, which is not there yet.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name / "made", shared / name / "done"
    (shared / name).mkdir(exist_ok=True)
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed here
            make(folder)
            done.touch()
    return folder
