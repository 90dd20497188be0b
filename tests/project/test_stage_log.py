"""The log of a stage: its own prints alone, bounded, with the traceback that the failure's message points to."""

import json
import sys
import threading
from pathlib import Path

import pytest

from tasks.project.graph import load_graph
from tasks.running import stage_log as logs
from tasks.running.runner import failure_note, run_stage
from tasks.running.stage_log import stage_log
from tests.toy_project import make_toy_project


def test_stages_beside_each_other_have_their_own_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    together = threading.Barrier(2)

    def work(name: str) -> None:
        with stage_log(tmp_path / f"{name}.log"):
            together.wait(10)
            print(f"{name} prints")
            print(f"{name} warns", file=sys.stderr)
            together.wait(10)

    stages = [threading.Thread(target=work, args=(name,)) for name in ("left", "right")]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join()
    print("nobody's")
    for name in ("left", "right"):
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        assert lines[1:-1] == [f"{name} prints", f"{name} warns"]
        assert lines[0].endswith(" begins")
        assert lines[-1].endswith(" ends")
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["left prints", "nobody's", "right prints"]
    assert sorted(err.splitlines()) == ["left warns", "right warns"]


def test_a_log_is_bounded_and_hides_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LIMIT", 1000)
    path = tmp_path / "logs/base.log"
    with pytest.raises(ValueError, match="late"), stage_log(path):  # noqa: PT012
        print("asks postgresql://bob:s3cret@host/db")
        for _ in range(500):
            print("step", end="\r")
        raise ValueError("late")
    text = path.read_text()
    assert len(text) < 3000
    assert "s3cret" not in text
    assert "more than 1000 characters" in text
    assert text.rstrip().splitlines()[-1] == "ValueError: late"


def test_a_fault_names_the_log_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_toy_project(tmp_path / "toy")
    stage = load_graph(project)["prepare@left"]

    def fault(*_: object) -> None:
        print("so far so good")
        raise RuntimeError("out of luck")

    monkeypatch.setattr("tasks.prepare.run", fault)
    with pytest.raises(RuntimeError):
        run_stage(project, stage)
    error = json.loads(failure_note(project, "prepare@left").read_text())["error"]
    assert error == "RuntimeError: out of luck (.mergeflow/logs/prepare@left.log)"
    text = (project / ".mergeflow/logs/prepare@left.log").read_text()
    assert "so far so good" in text
    assert "in fault" in text
    assert "RuntimeError: out of luck" in text


def test_a_full_disk_costs_the_log_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    done = []
    with stage_log(tmp_path / "logs/base.log"):
        done.append(True)
    assert done
