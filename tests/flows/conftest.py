"""Fixtures: the small project, run once for all tests of this folder."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.flows.small_project import make_project, run_in
from tests.once import once


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A small project after `mergeflow run`, with what that printed. Tests that change it take a copy.

    It is made once for all processes of a parallel test run.
    """

    def make(folder: Path) -> None:
        folder.mkdir()
        done = run_in(make_project(folder), "mergeflow", "run")
        told = json.dumps([done.args, done.returncode, done.stdout, done.stderr])
        folder.with_name("printed.json").write_text(told)

    folder = once(tmp_path_factory, "finished", make)
    return folder, subprocess.CompletedProcess(*json.loads(folder.with_name("printed.json").read_text()))


@pytest.fixture
def project(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the finished project."""
    target = tmp_path / "project"
    shutil.copytree(finished[0], target, symlinks=True)
    return target
