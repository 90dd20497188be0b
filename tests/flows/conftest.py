"""Fixtures: the small project, run once for all tests of this folder."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.flows.bucket import serve_bucket
from tests.flows.small_project import make_project, run_in
from tests.once import once

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A small project after `mergeflow run`, with what that printed. Tests that change it take a copy.

    It is made once for all processes of a parallel test run.
    """

    def make(folder: Path) -> None:
        folder.mkdir()
        done = run_in(make_project(folder), "mergeflow", "run")
        serialised = json.dumps([done.args, done.returncode, done.stdout, done.stderr])
        folder.with_name("printed.json").write_text(serialised)

    folder = once(tmp_path_factory, "finished", make)
    return folder, subprocess.CompletedProcess(*json.loads(folder.with_name("printed.json").read_text()))


@pytest.fixture
def project(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    target = tmp_path / "project"
    shutil.copytree(finished[0], target, symlinks=True)
    return target


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator["ThreadedMotoServer"]:
    with serve_bucket() as (server, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def s3(s3_server: "ThreadedMotoServer") -> str:
    return os.environ["AWS_ENDPOINT_URL"]
