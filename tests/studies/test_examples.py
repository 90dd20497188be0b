"""examples: every file of choices is a project that studies can read; those of CLIPs are of the real tasks."""

import re
import shutil
from pathlib import Path

import open_clip
import pytest
import yaml

from mergeflow.data.address import parse_address
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import find_weights
from mergeflow.modalities.vision.preparation import open_images
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS, get_real_task
from tasks.project.parameters import Params, StudyParams, load_params, load_study_params
from tasks.project.study_graph import study_graph
from tests.studies.small_lab import ROOT

FOLDER = ROOT / "examples/studies"
CLIPS = sorted(path for path in FOLDER.iterdir() if "_vit_" in path.name)
FILES = [*sorted((ROOT / "examples").rglob("studies.yaml")), ROOT / "examples/theory/clip.yaml"]


def project_of(file: Path, folder: Path) -> tuple[Params, StudyParams]:
    """Put an example where its header or the README says, and read it as every command does."""
    (folder / "studies").mkdir(parents=True)
    if file.with_name("params.yaml").exists():
        shutil.copy(file.with_name("params.yaml"), folder)
        shutil.copy(file, folder / "studies/params.yaml")
    else:  # a section for the choices of a project that is there
        shutil.copy(ROOT / "params.yaml", folder)
        whole = yaml.safe_load((ROOT / "studies/params.yaml").read_text()) | yaml.safe_load(file.read_text())
        (folder / "studies/params.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    params = load_params(folder / "params.yaml")
    return params, load_study_params(folder / "studies/params.yaml", params)


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_an_example_is_a_project_whose_studies_are_valid(file: Path, tmp_path: Path) -> None:
    _, studies = project_of(file, tmp_path)
    graph = study_graph(tmp_path, studies)
    assert all(f"mergeflow stage run {name}" in graph for name in studies.studies)
    reads_files = re.compile(r"(torchvision|folder):|\binputs/")
    for name, section in studies.studies.items():  # what is measured of the user's files is stale when they change
        stage = yaml.safe_load(graph)["stages"][name]
        assert ("inputs" in stage.get("deps", [])) == bool(reads_files.search(yaml.safe_dump(section))), name


def test_the_readme_names_every_example() -> None:
    named = re.findall(r"`((?:rounds|landscape|cart|glue|soups)_\w+_\w+)`", (FOLDER / "README.md").read_text())
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(named)


@pytest.mark.parametrize("example", CLIPS, ids=lambda path: path.name)
def test_a_clip_is_a_published_one_and_its_tasks_are_the_real_ones_in_order(example: Path, tmp_path: Path) -> None:
    params, _ = project_of(example / "studies.yaml", tmp_path)
    name, tag = params.model.architecture, params.model.pretrained
    assert find_weights(name, tag) is None  # a tag of open_clip, not a file
    size = (open_clip.get_model_config(name) or {})["vision_cfg"]
    assert params.data.image_size == size.get("image_size", 224)
    assert size["patch_size"] == int(example.name.rsplit("_", 1)[1])
    names = [get_real_task(parse_address(source).place).name for source in params.tasks.values()]
    every = list(REAL_TASKS)
    assert names == {"cart": every[:20], "soups": ["CIFAR10"]}.get(example.name.partition("_")[0], every[:8])
    for task, source in params.tasks.items():
        with pytest.raises(MergeflowError, match=re.escape(str(tmp_path / "inputs/torchvision"))):
            open_images(task, source, root=tmp_path)


@pytest.mark.parametrize(
    ("example", "world"),
    [("cart_vit_b_32", "pocket20"), ("cart_vit_l_14", "pocket20"), ("glue_roberta_base", "sentences8")],
)
def test_runs_and_studies_are_those_of_the_embedded_world(example: str, world: str, tmp_path: Path) -> None:
    _, studies = project_of(FOLDER / example / "studies.yaml", tmp_path)
    embedded = yaml.safe_load((ROOT / f"worlds/{world}/studies/params.yaml").read_text())
    assert {key: run.tasks for key, run in studies.runs.items()} == {
        key: run.get("tasks") for key, run in embedded["runs"].items()
    }
    assert studies.studies.keys() == embedded["studies"].keys()


def test_the_landscapes_are_of_the_tasks_and_the_tuning_of_the_rounds(tmp_path: Path) -> None:
    landscape, rounds = (
        project_of(FOLDER / name / "studies.yaml", tmp_path / name)[0]
        for name in ("landscape_vit_b_16", "rounds_vit_b_32")
    )
    assert (landscape.tasks, landscape.finetune) == (rounds.tasks, rounds.finetune)
