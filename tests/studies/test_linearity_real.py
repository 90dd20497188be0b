"""examples/linearity: the paper's own settings are valid, and its nets run at their real size on real file formats."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from studies.lab.linearity import World, open_world
from tasks.project.studies import find_study_modules
from tests.studies.small_lab import ROOT, link_choices, run_result
from tests.vision.test_data_real_tasks import make_cifar10, make_cifar100, make_mnist

STUDIES: dict[str, Any] = yaml.safe_load((ROOT / "examples/linearity/studies.yaml").read_text())["studies"]


def test_every_study_of_linearity_has_real_choices() -> None:
    of_nets = {name for name in find_study_modules(ROOT) if name.startswith("linearity_")} - {"linearity_experts"}
    assert set(STUDIES) == of_nets


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a handful of pictures in the files that torchvision reads."""
    folder = link_choices(tmp_path_factory.mktemp("real"))
    data = folder / "inputs/torchvision"
    data.mkdir(parents=True)
    make_mnist(data)
    make_cifar10(data)
    make_cifar100(data, [f"class {number}" for number in range(25)])
    return folder


@pytest.mark.real
@pytest.mark.nightly
def test_the_fashion_worlds_pictures_are_fetched_as_torchvision_reads_them(tmp_path: Path) -> None:
    world = shutil.copytree(
        ROOT / "worlds/fashion", tmp_path / "fashion", ignore=shutil.ignore_patterns("packages", "torchvision")
    )
    subprocess.run([sys.executable, world / "inputs/fetch.py"], check=True)
    choices = yaml.safe_load((world / "studies/params.yaml").read_text())["studies"]["fashion_controls"]
    tasks = open_world(World.model_validate({**choices["digits"], "angles": [0]}), world)
    assert (len(tasks["0°"].train), len(tasks["0°"].test)) == (60000, 10000)
    assert tasks["0°"].train.labels.bincount().tolist() == [6000] * 10


SHORT: dict[str, Any] = {
    "seeds": [0],
    "train": 32,
    "test": 32,
    "steps": 1,
    "batch_size": 4,
    "orders": 1,
    "averages": [2],
    "stages": [1, 2],
    "spawn": [0, 1],
    "sample": 32,
    "add": [1.0],
    "negate": [0.0, 1.0],
    "scales": [0.4],
}


def shortened(choices: Any) -> Any:
    """Return a study's choices with its nets as they are, a handful of examples of three tasks, and one step each."""
    if not isinstance(choices, dict):
        return choices
    settings = {key: SHORT.get(key, shortened(value)) for key, value in choices.items()}
    if "learning_rate" in settings:
        settings |= {"steps": 1, "batch_size": 4}
    if isinstance(settings.get("epochs"), list):
        settings["epochs"] = [1, 2]
    elif "spawn" in settings:
        settings["epochs"] = 2
    for key in ("angles", "splits", "rates"):
        if isinstance(settings.get(key), list):
            settings[key] = settings[key][:3]
    return settings


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # through triples that are all equally good goes no line
@pytest.mark.parametrize(
    "study",
    [
        pytest.param(study, marks=pytest.mark.slow if study == "linearity_stitches" else pytest.mark.nightly)
        for study in sorted({*STUDIES} - {"linearity_texts"})
    ],
)
def test_a_study_of_nets_runs_at_its_real_size(
    study: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.utils.check_md5", lambda *_, **__: True)  # of the published files
    result = run_result(root, study, tmp_path, **shortened(STUDIES[study]))
    assert result.findings
    assert len(result.rows) > 0
