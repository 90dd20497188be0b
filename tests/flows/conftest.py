"""Fixtures: the small project, run once for all tests of this folder."""

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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
    """A copy of the finished project."""
    target = tmp_path / "project"
    shutil.copytree(finished[0], target, symlinks=True)
    return target


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator["ThreadedMotoServer"]:
    """A server that speaks S3, with a bucket."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # the server of another test is gone
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        for method, place in (("POST", "moto-api/reset"), ("PUT", "bucket")):  # what it has is the whole process's
            urllib.request.urlopen(urllib.request.Request(f"{address}/{place}", method=method))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3(s3_server: "ThreadedMotoServer") -> str:
    """The address of a server that speaks S3."""
    return os.environ["AWS_ENDPOINT_URL"]
