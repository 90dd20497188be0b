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
from studies.lab.methods import Adaptation
from tasks.project.parameters import Params, StudyParams, load_params, load_study_params
from tasks.project.study_graph import check_study_options, study_graph
from tests.studies.small_lab import ROOT

# task → images of train, validation and test: as published, after a tenth (at most 5000) is carved
_SIZES = """
cars 7330 814 8041, dtd 3384 376 1880, eurosat 21600 2700 2700, gtsrb 23976 2664 12630, mnist 55000 5000 10000,
resisc45 17010 1890 6300, sun397 17865 1985 19850, svhn 68257 5000 26032, cifar100 45000 5000 10000,
fer2013 25839 2870 7178, flowers102 1020 1020 6149, oxford_iiit_pet 3312 368 3669, pcam 262144 32768 32768,
stl10 4500 500 8000, emnist 235000 5000 40000, cifar10 45000 5000 10000, food101 70750 5000 25250,
fashion_mnist 55000 5000 10000, rendered_sst2 6920 872 1821, kmnist 55000 5000 10000
"""
SPLITS = {task: tuple(map(int, sizes)) for task, *sizes in (one.split() for one in _SIZES.split(","))}

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


def test_the_readme_names_every_example_and_puts_it_where_the_tests_do() -> None:
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)) == {
        "`rounds_vit_b_32`, `rounds_vit_l_14`",
        "`landscape_vit_b_16`",
        "`cart_vit_b_32`, `cart_vit_l_14`",
        "`glue_roberta_base`",
    }
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(
        re.findall(r"`((?:rounds|landscape|cart|glue)_\w+_\w+)`", text)
    )
    copies = [line.split()[1:] for line in text.splitlines() if line.startswith("cp ")]
    assert copies == [
        ["$EXAMPLES/rounds_vit_b_32/params.yaml", "params.yaml"],
        ["$EXAMPLES/rounds_vit_b_32/studies.yaml", "studies/params.yaml"],
    ]


def test_there_is_one_for_each_size() -> None:
    assert [path.name for path in EXAMPLES] == ["cart_vit_b_32", "cart_vit_l_14"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid_and_says_what_the_literature_does(example: Path, tmp_path: Path) -> None:
    world, studies = project_of(example, tmp_path)
    name, tag = world.model.architecture, world.model.pretrained
    assert _weights_path(name, tag) is None  # a tag, not a file
    _check_tag(name, tag)
    size = (open_clip.get_model_config(name) or {})["vision_cfg"]
    assert world.data.image_size == size.get("image_size", 224)
    assert size["patch_size"] == int(example.name.rsplit("_", 1)[1])
    for run in studies.runs.values():
        tuned = run.finetune
        assert (tuned.learning_rate, tuned.batch_size, tuned.steps, tuned.precision) == (1e-5, 128, 2000, "bfloat16")
    # Runs and studies are those of the embedded world.
    embedded = yaml.safe_load((WORLD / "studies/params.yaml").read_text())
    assert {key: run.tasks for key, run in studies.runs.items()} == {
        key: run["tasks"] for key, run in embedded["runs"].items()
    }
    assert studies.studies.keys() == embedded["studies"].keys()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_choices_of_cart_are_the_papers(example: Path, tmp_path: Path) -> None:
    """Appendix B and D, and AdaMerging's own settings; none is the number of the embedded world."""
    chosen = project_of(example, tmp_path)[1].studies
    table, adapted, subsets = chosen["many_tasks"], chosen["adaptation"], chosen["subset_scaling"]
    scale = {name: sweep.get("scale", {}) for name, sweep in table["methods"].items()}
    assert (scale["cart"]["low"], scale["cart"]["high"], scale["cart"]["step"]) == (1.0, 3.0, 0.2)
    assert table["methods"]["cart"]["args"] == {"rank_ratio": [0.04, 0.08, 0.16, 0.32]}
    assert (scale["task_arithmetic"]["low"], scale["task_arithmetic"]["high"]) == (0.05, 1.0)
    assert table["methods"].keys() >= {"average", "task_arithmetic", "ties", "consensus"}
    assert table["adapted"]["counts"] == table["counts"] == [8, 14, 20]
    assert Adaptation("cart", "layer", "test", init=1.0, lr=0.001).batch_size == adapted["batch_size"] == 16
    assert table["adapted"]["steps"] == adapted["steps"] == 500
    assert table["adapted"]["rates"] == adapted["rates"]
    assert min(adapted["rates"]) < 0.001 < max(adapted["rates"])
    assert 0.001 in adapted["rates"]
    assert {round(1.0 + 0.2 * step, 1) for step in range(11)} <= set(chosen["rank_curve"]["scales"]["centred"])
    assert subsets["grids"] == {
        "average": {},
        "task_arithmetic": {"scale": [0.1, 0.2, 0.3]},
        "ties": {"keep": [0.05, 0.1, 0.2], "scale": [1.0]},
        "cart": {"rank_ratio": [0.08, 0.12, 0.16], "scale": [1.0]},
    }
    whole = max(split[2] for split in SPLITS.values())
    wanted = (whole, whole) if example.name == "cart_vit_b_32" else (1000, 2000)  # Figure 7 is of ViT-B/32
    assert subsets["validation"] >= wanted[0]
    assert subsets["test"] >= wanted[1]


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
    longer = {name for name, run in studies.runs.items() if run.finetune.steps != 2000}
    assert longer == {"mima_1_4000", "mima_16_4000"}
    small = {name: run.finetune for name, run in studies.runs.items() if run.finetune.batch_size != 128}
    assert small.keys() == {"one_epoch", "converged", "converged_sgd"}
    assert {(one.batch_size, one.accumulate) for one in small.values()} == {(8, 1)}
    head = (example / "studies.yaml").read_text().partition("seeds:")[0]
    told = [int(number) for number in re.findall(r"(\d+)(?: steps)? on (?!Task)", head)]
    steps = [-(-SPLITS[task][0] // 8) for task in params.tasks]
    assert min(steps) >= 200
    assert all(abs(found - exact) <= 0.02 * exact for found, exact in zip(told, steps, strict=True)), told
    listed = [-(-SPLITS[task][0] // 128) for task in params.tasks]
    assert f"{', '.join(map(str, listed[:-1]))} and {listed[-1]}" in " ".join(head.replace("#", " ").split())
    pairs = studies.studies["landscape"]["pairs"]
    assert {task for pair in pairs for task in pair} <= set(params.tasks)


def test_there_is_one_of_rounds_for_each_size() -> None:
    assert [path.name for path in ROUNDS] == ["rounds_vit_b_32", "rounds_vit_l_14"]


def test_the_landscapes_are_of_the_papers_vit_b_16(tmp_path: Path) -> None:
    params, studies = project_of(FOLDER / "landscape_vit_b_16", tmp_path)
    rounds, _ = project_of(FOLDER / "rounds_vit_b_32", Path(mkdtemp(dir=tmp_path)))
    assert (params.model.architecture, params.tasks) == ("ViT-B-16-quickgelu", rounds.tasks)
    assert params.finetune == rounds.finetune
    assert list(studies.studies) == ["landscape"]
    assert "mima_8" in study_graph(tmp_path, studies)
