"""Fixtures: the small project, run once for all tests of this folder."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.flows.small_project import make_project, run_in


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A small project after `mergeflow run`, with what that printed. Tests that change it take a copy.

    It is made once for all processes of a parallel test run.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, printed = shared / "finished", shared / "finished.json"
    with FileLock(shared / "finished.lock"):
        if not printed.exists():
            folder.mkdir()
            done = run_in(make_project(folder), "mergeflow", "run")
            printed.write_text(json.dumps([done.args, done.returncode, done.stdout, done.stderr]))
    return folder, subprocess.CompletedProcess(*json.loads(printed.read_text()))


@pytest.fixture
def project(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the finished project."""
    target = tmp_path / "project"
    shutil.copytree(finished[0], target, symlinks=True)
    return target
