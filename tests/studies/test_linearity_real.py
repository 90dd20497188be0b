"""examples/linearity: the paper's own settings are valid, and rotated MNIST runs on the data set's real format."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mergeflow.linearity.affine import Combination, affine
from mergeflow.linearity.layers import find_layers
from tasks.project.studies import find_study_modules, load_declaration
from tasks.studies.nets import World, open_world, train_world
from tests.studies.small_lab import ROOT
from tests.vision.test_data_real_tasks import make_mnist

STUDIES: dict[str, Any] = yaml.safe_load((ROOT / "examples/linearity/studies.yaml").read_text())["studies"]


@pytest.mark.parametrize("study", STUDIES)
def test_choices_are_what_the_study_takes(study: str) -> None:
    load_declaration(ROOT, find_study_modules(ROOT)[study]).options.model_validate(STUDIES[study])


def test_every_study_of_linearity_has_real_choices() -> None:
    of_nets = {name for name in find_study_modules(ROOT) if name.startswith("linearity_")} - {"linearity_experts"}
    assert set(STUDIES) == of_nets


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with a handful of pictures in the files that torchvision reads."""
    folder = tmp_path_factory.mktemp("real")
    data = folder / "inputs/torchvision"
    data.mkdir(parents=True)
    make_mnist(data)
    return folder


def test_rotated_mnist_trains_and_is_measured_at_its_real_size(root: Path) -> None:
    real = World.model_validate(STUDIES["linearity_pairs"]["worlds"]["rotated_mnist"])
    short = {"steps": 1, "batch_size": 2}
    world = real.model_copy(
        update={
            "angles": real.angles[:3],
            "splits": real.splits[:3],
            "train": 32,
            "test": 32,
            "pretrain": real.pretrain.model_copy(update=short),
            "tune": real.tune.model_copy(update=short),
        }
    )
    tasks = open_world(world, root)
    done = train_world(world, tasks, 0)
    layers = find_layers(done.model.module)
    assert len(layers) == len(real.hidden)
    ends = {"start": done.start, **done.tuned}
    pair = dict.fromkeys(list(ends)[:2], 0.5) if len(ends) > 1 else {"start": 1.0}
    found = affine(done.model, {"test": next(iter(tasks.values())).test}, ends, {"half": Combination(pair)}, layers)
    assert all(
        one.distance.shape == one.coef.shape and (one.distance >= -1e-12).all() for one in found["half"].values()
    )
