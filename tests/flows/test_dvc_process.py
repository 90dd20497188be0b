"""A `dvc repro` beside: a run waits for it by name, a question is answered at once, a dead one counts for nothing."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from flows.dvc_commands import record_outputs, wait_for_dvc, writers
from flows.status import print_status
from mergeflow.cli import _message_of
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.running.runner import DiskFull, check_disk, run_stage
from tests.flows.kill_driver import make_toy_repository

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_toy_repository(tmp_path / "project")


@pytest.fixture
def repro(project: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that DVC's list of writers names as the one that makes an expert."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "dvc", "repro"])
    entry = {"pid": process.pid, "cmd": "/usr/bin/dvc repro"}
    lock = project / ".dvc/tmp/rwlock"
    lock.parent.mkdir(exist_ok=True)
    outs = ("outputs/experts/left", "outputs/data/train/left")
    lock.write_text(json.dumps({"write": {str(project / out): entry for out in outs}, "read": {}}))
    yield process
    process.kill()
    process.wait()


def test_a_run_waits_for_it_by_name(project: Path, repro: "subprocess.Popen[bytes]") -> None:
    assert writers(project) == [(repro.pid, "/usr/bin/dvc repro")]
    threading.Timer(0.5, lambda: (repro.kill(), repro.wait())).start()
    said: list[str] = []
    wait_for_dvc(project, said.append)
    assert said == [f"Waiting for `dvc repro` (process {repro.pid}), which is at work in this project."]
    assert writers(project) == []


def test_what_it_writes_is_recorded_after_it(
    project: Path,
    repro: "subprocess.Popen[bytes]",
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_stage(project, load_graph(project)["prepare@left"])
    monkeypatch.setattr("flows.dvc_commands.time.sleep", lambda _: (repro.kill(), repro.wait()))
    record_outputs(project, ["prepare@left"])
    assert f"Waiting for `dvc repro` (process {repro.pid})" in capsys.readouterr().err
    assert "prepare@left" in (project / "dvc.lock").read_text()


def test_status_answers_beside_it_and_writes_nothing(project: Path, repro: "subprocess.Popen[bytes]") -> None:
    before = {path: path.read_bytes() for path in (project / "outputs").rglob("*") if path.is_file()}
    printed = StringIO()
    todo = print_status(project, Console(file=printed, width=200))
    assert f"`dvc repro` (process {repro.pid}) is at work here" in printed.getvalue()
    assert "finetune@left" in todo
    assert before == {path: path.read_bytes() for path in (project / "outputs").rglob("*") if path.is_file()}


def test_status_counts_what_a_killed_run_has_finished_as_finished(project: Path) -> None:
    def status() -> tuple[list[str], str]:
        printed = StringIO()
        return print_status(project, Console(file=printed, width=200)), printed.getvalue()

    finished = ["prepare@left", "prepare@right", "base"]
    for address in finished:
        assert run_stage(project, load_graph(project)[address])
    todo, text = status()
    assert not {*finished} & {*todo}
    assert "finetune@left" in todo
    assert f"3 more have finished: {', '.join(finished)}" in text
    (project / "outputs/base/model.safetensors").unlink()
    todo, text = status()
    assert ("base" in todo, "prepare@left" in todo) == (True, False)
    params = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(params.replace("inputs: 8", "inputs: 9"))
    todo, text = status()
    assert {*finished} <= {*todo}
    assert "have finished" not in text


def test_a_folder_that_is_not_the_users_is_named(tmp_path: Path) -> None:
    for number in (errno.EACCES, errno.EROFS):
        assert f"{tmp_path}: " in str(_message_of(OSError(number, os.strerror(number), str(tmp_path))))
    assert _message_of(OSError(errno.EIO, "Input/output error", "a")) is None


def test_a_full_disk_is_told_whoever_met_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk(RuntimeError("500"), tmp_path, tmp_path / "nowhere")
    for error in (OSError(28, "No space left on device"), RuntimeError("(sqlite3.Error) database or disk is full")):
        with pytest.raises(DiskFull, match="the disk is full"):
            check_disk(error, tmp_path)
        assert "the disk is full" in str(_message_of(error))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(MergeflowError, match=r"the disk is full \(0 MiB free where .*Free some space and run again"):
        check_disk(RuntimeError("500"), tmp_path)
