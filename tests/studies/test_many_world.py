"""The world of many tasks: runs over the first of its tasks, and inputs that take the first of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mergeflow.errors import MergeflowError
from tasks.project.parameters import load_params, load_study_params
from tasks.project.stage import StageIO
from tasks.studies.inputs import StudyInputs
from tests.studies.small_lab import ROOT, _graph, _open


def world_io(many_lab: Path, scratch: Path) -> StageIO:
    """Return the files of a stage that may read all of the world."""
    stage = _graph()["studies/dvc.yaml:many_base"]
    keys = (*stage.params, "evaluation", "studies/params.yaml:seeds")
    return _open(many_lab, replace(stage, params=keys, deps=("outputs/many",)), scratch, {})


def test_a_run_tunes_the_first_of_the_tasks(many_lab: Path) -> None:
    runs = many_lab / "outputs/many/runs"
    assert len(list((runs / "experts/seed_0/experts").iterdir())) == 3
    assert (runs / "joint_2/seed_1/model/image_encoder.safetensors").exists()
    assert not (many_lab / "outputs/studies/runs").exists()


def test_the_first_tasks_share_images_and_encoder(many_lab: Path, tmp_path: Path) -> None:
    inputs = StudyInputs(world_io(many_lab, tmp_path))
    two = inputs.first(2)
    assert two.tasks == inputs.tasks[:2]
    assert set(two.examples("validation")) == set(two.tasks)
    assert inputs.examples("validation")[two.tasks[0]] is two.examples("validation")[two.tasks[0]]
    assert two.model is inputs.model
    assert set(two.run("experts").experts(0)) == set(two.tasks)
    with pytest.raises(MergeflowError, match="first 5 tasks, but there are 3"):
        inputs.first(5)


def test_a_run_over_more_tasks_than_there_are_is_refused(tmp_path: Path) -> None:
    whole = yaml.safe_load((ROOT / "studies/params.yaml").read_text())
    whole["many"]["runs"] = {"joint_24": {"tasks": 24, "regime": "joint"}}
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/params.yaml").write_text(yaml.safe_dump(whole))
    with pytest.raises(MergeflowError, match="run 'joint_24' asks for 24 tasks, but `tasks` has 20"):
        load_study_params(tmp_path, load_params(ROOT / "params.yaml"))
