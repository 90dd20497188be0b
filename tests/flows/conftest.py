"""Fixtures: the small project, run once for all tests of this folder."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.flows.small_project import make_project, run_in


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A small project after `mergeflow run`, with what that printed. Tests that change it take a copy."""
    folder = make_project(tmp_path_factory.mktemp("finished"))
    return folder, run_in(folder, "mergeflow", "run")


@pytest.fixture
def project(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the finished project."""
    target = tmp_path / "project"
    shutil.copytree(finished[0], target, symlinks=True)
    return target
