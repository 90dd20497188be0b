"""The stage `sweep` in a small project: killed at any candidate, it goes on after the last one that was scored."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mergeflow import layout
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import CandidateScorer
from mergeflow.merging import MethodCall
from tasks.project.graph import load_graph
from tasks.running.runner import open_stage, run_stage
from tasks.sweep import JOURNAL, sweep_near
from tests.evaluation.small import TASKS
from tests.project_folder import link_code

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GRID = {"rank_ratio": [0.04, 0.1], "scale": [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5]}
RUN = """
import sys
from pathlib import Path
from tasks.project.graph import load_graph
from tasks.running.runner import run_stage
root = Path(sys.argv[1])
run_stage(root, load_graph(root)["sweep@cart"])
"""


def project(world: Path, root: Path) -> Path:
    """A project whose experts are there and whose sweep is not."""
    link_code(root)
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values |= {"tasks": dict.fromkeys(TASKS, "drawn"), "sweep": {"cart": GRID}}
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    place = root / layout.BASE_MODEL
    place.parent.mkdir(parents=True)
    shutil.copy(world / "base.safetensors", place)
    shutil.copytree(world / "heads", root / layout.HEADS)
    for task in TASKS:
        shutil.copytree(world / "data" / task, root / layout.split("validation", task))
        expert = root / layout.expert_model(task)
        expert.parent.mkdir(parents=True)
        shutil.copy(world / "experts" / f"{task}.safetensors", expert)
        summary = {"task": task, "fingerprint": "", "settings": {}, "validation_accuracy": 0.9}
        (expert.parent / layout.TRAINING_FILE).write_text(json.dumps(summary))
    return root


def journal_lines(root: Path) -> list[bytes]:
    journals = list((root / ".mergeflow/journals").glob(f"sweep@cart/*/{JOURNAL}"))
    return journals[0].read_bytes().splitlines(keepends=True) if journals else []


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = project(world, tmp_path_factory.mktemp("whole"))
    assert run_stage(root, load_graph(root)["sweep@cart"])
    return root


@pytest.mark.nightly
def test_killed_it_goes_on_where_it_was(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project(world, tmp_path)
    process = subprocess.Popen([sys.executable, "-c", RUN, str(root)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline and len(journal_lines(root)) < 6:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    scored_before = len([line for line in journal_lines(root) if line.endswith(b"\n")]) - 1
    assert 5 <= scored_before < 16
    assert not (root / layout.sweep("cart")).exists()
    asked: list[MethodCall] = []
    candidate = CandidateScorer.candidate
    monkeypatch.setattr(CandidateScorer, "candidate", lambda self, call: asked.append(call) or candidate(self, call))
    assert run_stage(root, load_graph(root)["sweep@cart"])
    assert len(asked) == 16 - scored_before
    assert (root / layout.sweep("cart")).read_bytes() == (whole / layout.sweep("cart")).read_bytes()
    assert not list((root / ".mergeflow/scratch").iterdir())


def test_a_wider_grid_scores_what_is_new(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MethodCall] = []
    candidate = CandidateScorer.candidate
    monkeypatch.setattr(CandidateScorer, "candidate", lambda self, call: asked.append(call) or candidate(self, call))

    def rows(root: Path, grid: dict[str, list[float]], **changes: object) -> list[dict[str, object]]:
        values = yaml.safe_load((root / "params.yaml").read_text()) | {"sweep": {"ties": grid}}
        (root / "params.yaml").write_text(yaml.safe_dump(values | changes))
        asked.clear()
        assert run_stage(root, load_graph(root)["sweep@ties"])
        return json.loads((root / layout.sweep("ties")).read_text())["candidates"]

    root, anew = tmp_path / "root", tmp_path / "anew"
    for folder in (root, anew):
        folder.mkdir()
        project(world, folder)
    wider = {"keep": [0.2, 0.5], "scale": [0.5, 1.0]}
    rows(root, {"keep": [0.2], "scale": [0.5]})
    grown = rows(root, wider)
    assert len(asked) == 3
    assert rows(anew, wider) == grown
    assert len(rows(root, {"keep": [0.2], "scale": [1.0]})) == 1
    assert not asked
    section = yaml.safe_load((root / "params.yaml").read_text())["evaluation"]
    rows(root, {"keep": [0.2], "scale": [1.0]}, evaluation=section | {"batch_size": 7})
    assert len(asked) == 1


def test_a_climb_scores_the_same_numbers_in_fewer_candidates(world: Path, whole: Path, tmp_path: Path) -> None:
    root = project(world, tmp_path)
    sweep_near(open_stage(root, load_graph(root)["sweep@cart"])[0], {"rank_ratio": 0.04, "scale": 1.0})
    near, all_of_them = (json.loads((folder / layout.sweep("cart")).read_text()) for folder in (root, whole))
    assert near["candidates"][0]["args"] == {"rank_ratio": 0.04, "scale": 1.0}
    assert all(row in all_of_them["candidates"] for row in near["candidates"])
    assert len(near["candidates"]) < len(all_of_them["candidates"]) == 16


def test_a_method_without_a_model_that_can_be_kept_is_left_out(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = project(world, tmp_path)
    values = yaml.safe_load((root / "params.yaml").read_text())

    def select(**grids: dict[str, list[float]]) -> None:
        (root / "params.yaml").write_text(yaml.safe_dump(values | {"sweep": grids}))
        stages = load_graph(root)
        for method in grids:
            run_stage(root, stages[f"sweep@{method}"])
        run_stage(root, stages["select"])

    overflowing, fault = {"scale": [1e43]}, r"sweep\.task_arithmetic: the best candidate \(scale 1e\+43\).*overflows"
    with pytest.raises(MergeflowError, match=fault):
        select(task_arithmetic=overflowing)
    assert json.loads((root / layout.sweep("task_arithmetic")).read_text())["candidates"][0]["mean"] == 0.0
    select(task_arithmetic=overflowing, average={})
    assert re.search(f"warning: {fault}", capsys.readouterr().err)
    assert json.loads((root / layout.SELECTION).read_text())["methods"].keys() == {"average"}
    assert [path.name for path in (root / layout.MERGED).iterdir()] == ["average.safetensors"]
