"""examples/studies: the worlds of real CLIPs on the real data sets are projects that the CART studies can read."""

import re
import shutil
from pathlib import Path

import open_clip
import pytest
import yaml

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import _check_tag, _weights_path
from mergeflow.modalities.vision.sources.kinds import open_images
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS, get_real_task
from tasks.project.parameters import Params, StudyParams, load_params, load_study_params
from tasks.project.study_graph import study_graph
from tasks.project.study_options import check_study_options
from tests.studies.small_lab import ROOT

EXAMPLES = sorted((ROOT / "examples/studies").glob("cart_*"))
ROUNDS = sorted((ROOT / "examples/studies").glob("rounds_*"))
WORLD = ROOT / "worlds/pocket20"


def world_of(example: Path, folder: Path) -> tuple[Params, StudyParams]:
    """Copy the embedded world, put the example where its header says, and read it as every command does."""
    world = folder / "world"
    shutil.copytree(WORLD, world, ignore=shutil.ignore_patterns("outputs", ".mergeflow"))
    shutil.copy(example / "params.yaml", world)
    path = world / "studies/params.yaml"
    runs = yaml.safe_load((example / "runs.yaml").read_text())
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **runs}, sort_keys=False))
    params = load_params(world / "params.yaml")
    studies = load_study_params(world / "studies/params.yaml", params)
    check_study_options(world, studies)
    return params, studies


def test_there_is_one_for_each_size() -> None:
    assert [path.name for path in EXAMPLES] == ["cart_vit_b_32", "cart_vit_l_14"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid_and_says_what_the_literature_does(example: Path, tmp_path: Path) -> None:
    world, studies = world_of(example, tmp_path)
    name, tag = world.model.architecture, world.model.pretrained
    assert _weights_path(name, tag) is None  # a tag, not a file
    _check_tag(name, tag)
    size = (open_clip.get_model_config(name) or {})["vision_cfg"]
    assert world.data.image_size == size.get("image_size", 224)
    assert size["patch_size"] == int(example.name.rsplit("_", 1)[1])
    for run in studies.runs.values():
        tuned = run.finetune
        assert (tuned.learning_rate, tuned.batch_size, tuned.steps, tuned.precision) == (1e-5, 128, 2000, "bfloat16")
    # The runs are those of the embedded world, so that the same studies read them.
    embedded = yaml.safe_load((WORLD / "studies/params.yaml").read_text())["runs"]
    assert {key: run.tasks for key, run in studies.runs.items()} == {key: run["tasks"] for key, run in embedded.items()}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_examples_sources_are_the_20_in_order_and_open_as_far_as_they_can(example: Path, tmp_path: Path) -> None:
    tasks = world_of(example, tmp_path)[0].tasks
    names = [get_real_task(source.removeprefix("torchvision:")).name for source in tasks.values()]
    assert names == list(REAL_TASKS)
    missing = re.escape(str(tmp_path / "inputs/torchvision"))
    for task, source in tasks.items():
        with pytest.raises(MergeflowError, match=missing):
            open_images(task, source, root=tmp_path)


@pytest.mark.parametrize("example", ROUNDS, ids=lambda path: path.name)
def test_the_studies_of_rounds_and_gradients_are_valid_on_real_models(example: Path, tmp_path: Path) -> None:
    """G1 to G9, M1 to M7, L1 and more: every run that a study reads is there, and the graph can be written."""
    (tmp_path / "studies").mkdir()
    shutil.copy(example / "params.yaml", tmp_path)
    shutil.copy(example / "studies.yaml", tmp_path / "studies/params.yaml")
    params = load_params(tmp_path / "params.yaml")
    names = [get_real_task(source.removeprefix("torchvision:")).name for source in params.tasks.values()]
    assert names == list(REAL_TASKS)[:8]
    studies = load_study_params(tmp_path / "studies/params.yaml", params)
    assert "mima_16_kept" in study_graph(tmp_path, studies)
    systems = {system for study in check_study_options(tmp_path, studies) for system in study.systems}
    linear = {"L1", "L4", "L11", "L12", "L13", "L14", "L15"}
    assert systems == {*(f"G{number}" for number in range(1, 10)), *(f"M{number}" for number in range(1, 8)), *linear}
    blocks = 12 if params.model.architecture == "ViT-B-32" else 24
    assert max(studies.studies["linearity_experts"]["blocks"]) <= blocks
    longer = {name for name, run in studies.runs.items() if run.finetune.steps != 2000}
    assert longer == {"mima_1_4000", "mima_16_4000"}
    assert all(run.finetune.batch_size == 128 for run in studies.runs.values())
    pairs = studies.studies["landscape"]["pairs"]
    assert {task for pair in pairs for task in pair} <= set(params.tasks)


def test_there_is_one_of_rounds_for_each_size() -> None:
    assert [path.name for path in ROUNDS] == ["rounds_vit_b_32", "rounds_vit_l_14"]
