"""The world of many tasks: runs over the first of its tasks, and inputs that take the first of them."""

from pathlib import Path

import pytest
import yaml

from mergeflow.application import find_project
from mergeflow.errors import MergeflowError
from studies.commands.study import find_studies
from studies.lab.inputs import Laboratory
from tasks.project.graph import load_graph
from tasks.project.parameters import load_params, load_study_params
from tasks.project.study_graph import check_study_options
from tests.studies.small_lab import ROOT, study_io

pytestmark = pytest.mark.slow

WORLD = ROOT / "worlds/pocket20"


def test_the_world_is_a_project_like_the_root() -> None:
    assert find_project(WORLD / "studies") == WORLD
    params = load_params(WORLD / "params.yaml")
    assert len(params.tasks) == 20
    assert "finetune@kana" in load_graph(WORLD)
    check_study_options(WORLD, load_study_params(WORLD / "studies/params.yaml", params))


def test_the_roots_command_finds_the_studies_of_both() -> None:
    studies = find_studies(ROOT)
    assert (studies["mima"].root, studies["many_tasks"].root) == (ROOT, WORLD)
    assert studies["many_tasks"].folder == WORLD / "outputs/studies/many_tasks"
    assert set(find_studies(WORLD)) == {name for name, study in studies.items() if study.root == WORLD}


def test_a_run_tunes_the_first_of_the_tasks(many_lab: Path) -> None:
    runs = many_lab / "outputs/studies/runs"
    assert len(list((runs / "experts/seed_0/experts").iterdir())) == 3
    assert (runs / "joint_2/seed_1/model/model.safetensors").exists()
    assert len(list((runs / "mima_3/seed_0/experts").iterdir())) == 3


def test_the_first_tasks_share_images_and_encoder(many_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(many_lab, "rank_curve", tmp_path))
    two = inputs.first(2)
    assert two.tasks == inputs.tasks[:2]
    assert set(two.examples("validation")) == set(two.tasks)
    assert inputs.examples("validation")[two.tasks[0]] is two.examples("validation")[two.tasks[0]]
    assert two.model is inputs.model
    assert set(two.run("experts").experts(0)) == set(two.tasks)
    with pytest.raises(MergeflowError, match="first 5 tasks, but there are 3"):
        inputs.first(5)


def test_a_run_over_more_tasks_than_there_are_is_refused(tmp_path: Path) -> None:
    whole = yaml.safe_load((WORLD / "studies/params.yaml").read_text())
    whole["runs"] = {"joint_24": {"tasks": 24, "regime": "joint"}}
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/params.yaml").write_text(yaml.safe_dump(whole))
    with pytest.raises(MergeflowError, match="run 'joint_24' asks for 24 tasks, but"):
        load_study_params(tmp_path / "studies/params.yaml", load_params(WORLD / "params.yaml"))
