"""examples/studies: the choices for real CLIPs on the real data sets are projects that the papers' studies can read."""

import re
import shutil
from pathlib import Path
from tempfile import mkdtemp

import open_clip
import pytest
import yaml

from mergeflow.data.address import parse_address
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import _check_tag, _weights_path
from mergeflow.modalities.vision.sources.kinds import open_images
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS, get_real_task
from tasks.project.parameters import Params, StudyParams, load_params, load_study_params
from tasks.project.study_graph import check_study_options, study_graph
from tests.studies.small_lab import ROOT

FOLDER = ROOT / "examples/studies"
EXAMPLES = sorted(FOLDER.glob("cart_*"))
ROUNDS = sorted(FOLDER.glob("rounds_*"))
WORLD = ROOT / "worlds/pocket20"


def project_of(example: Path, folder: Path) -> tuple[Params, StudyParams]:
    """Put the example where the README says, and read it as every command does."""
    (folder / "studies").mkdir()
    shutil.copy(example / "params.yaml", folder)
    shutil.copy(example / "studies.yaml", folder / "studies/params.yaml")
    params = load_params(folder / "params.yaml")
    studies = load_study_params(folder / "studies/params.yaml", params)
    check_study_options(folder, studies)
    return params, studies


def test_the_readme_names_every_example() -> None:
    text = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(
        re.findall(r"`((?:rounds|landscape|cart|glue)_\w+_\w+)`", text)
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid_and_has_the_size_of_its_model(example: Path, tmp_path: Path) -> None:
    world, studies = project_of(example, tmp_path)
    name, tag = world.model.architecture, world.model.pretrained
    assert _weights_path(name, tag) is None  # a tag, not a file
    _check_tag(name, tag)
    size = (open_clip.get_model_config(name) or {})["vision_cfg"]
    assert world.data.image_size == size.get("image_size", 224)
    assert size["patch_size"] == int(example.name.rsplit("_", 1)[1])
    # Runs and studies are those of the embedded world.
    embedded = yaml.safe_load((WORLD / "studies/params.yaml").read_text())
    assert {key: run.tasks for key, run in studies.runs.items()} == {
        key: run["tasks"] for key, run in embedded["runs"].items()
    }
    assert studies.studies.keys() == embedded["studies"].keys()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_examples_sources_are_the_20_in_order_and_open_as_far_as_they_can(example: Path, tmp_path: Path) -> None:
    tasks = project_of(example, tmp_path)[0].tasks
    names = [get_real_task(parse_address(source).place).name for source in tasks.values()]
    assert names == list(REAL_TASKS)
    missing = re.escape(str(tmp_path / "inputs/torchvision"))
    for task, source in tasks.items():
        with pytest.raises(MergeflowError, match=missing):
            open_images(task, source, root=tmp_path)


@pytest.mark.parametrize("example", ROUNDS, ids=lambda path: path.name)
def test_the_studies_of_rounds_and_gradients_are_valid_on_real_models(example: Path, tmp_path: Path) -> None:
    """G1 to G9, M1 to M7, L1 and more: every run that a study reads is there, and the graph can be written."""
    params, studies = project_of(example, tmp_path)
    names = [get_real_task(parse_address(source).place).name for source in params.tasks.values()]
    assert names == list(REAL_TASKS)[:8]
    assert "mima_16_kept" in study_graph(tmp_path, studies)
    systems = {system for study in check_study_options(tmp_path, studies) for system in study.systems}
    linear = {"L1", "L4", "L11", "L12", "L13", "L14", "L15"}
    assert systems == {*(f"G{number}" for number in range(1, 10)), *(f"M{number}" for number in range(1, 8)), *linear}
    blocks = 12 if params.model.architecture == "ViT-B-32" else 24
    assert max(studies.studies["linearity_experts"]["blocks"]) <= blocks
    pairs = studies.studies["landscape"]["pairs"]
    assert {task for pair in pairs for task in pair} <= set(params.tasks)


def test_the_landscapes_are_of_the_papers_vit_b_16(tmp_path: Path) -> None:
    params, studies = project_of(FOLDER / "landscape_vit_b_16", tmp_path)
    rounds, _ = project_of(FOLDER / "rounds_vit_b_32", Path(mkdtemp(dir=tmp_path)))
    assert (params.model.architecture, params.tasks) == ("ViT-B-16-quickgelu", rounds.tasks)
    assert params.finetune == rounds.finetune
    assert list(studies.studies) == ["landscape"]
    assert "mima_8" in study_graph(tmp_path, studies)
