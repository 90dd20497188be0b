"""The iterative regime through the flow: the rounds' tasks run on the task runner, to the bits of a serial run."""

import json
from pathlib import Path

import pytest

from tests.flows.small_project import run_in
from tests.project_folder import change_params

pytestmark = pytest.mark.slow

ITERATIVE = {"finetune.regime": "iterative", "finetune.steps": 6}
ITERATIVE |= {"finetune.iterative": {"rounds": 3, "optimiser": "kept"}}


def fingerprints(project: Path) -> dict[str, str]:
    experts = (project / "outputs/experts").glob("*/training.json")
    return {path.parent.name: json.loads(path.read_text())["fingerprint"] for path in experts}


def test_rounds_on_the_runner_equal_a_serial_run(project: Path) -> None:
    before = fingerprints(project)
    change_params(project, ITERATIVE)
    done = run_in(project, "mergeflow", "run")
    assert done.returncode == 0, done.stderr
    by_flow = fingerprints(project)
    assert by_flow.keys() == before.keys()
    assert all(by_flow[task] != before[task] for task in before)
    rows = json.loads((project / "outputs/experts/red/training.json").read_text())["epochs"]
    assert sorted({row["round"] for row in rows}) == [1, 2, 3]
    serial = run_in(project, "mergeflow", "stage", "run", "multitask", "--force")
    assert serial.returncode == 0, serial.stderr
    made = (project / "outputs/multitask").glob("*/training.json")
    assert {path.parent.name: json.loads(path.read_text())["fingerprint"] for path in made} == by_flow


def test_a_task_that_fails_is_named_with_its_round_and_the_others_are_kept(project: Path) -> None:
    wild = {"finetune.learning_rate": 1e30, "finetune.gradient_clip": 0.0, "finetune.warmup": 0.0}
    change_params(project, ITERATIVE | wild)
    failed = run_in(project, "mergeflow", "run")
    assert failed.returncode == 2
    assert "round" in failed.stderr
    assert "the loss became" in failed.stderr
    assert "Traceback" not in failed.stderr
