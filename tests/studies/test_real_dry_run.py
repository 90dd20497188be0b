"""The studies on the real architectures: CLIPs at 224 pixels with random weights, a handful of images, a step or two.

The data sets are two of the real ones, in the files that they come in, made small. What this shows is that every shape,
file and stage of the examples fits; no number means anything.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import yaml

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from studies.lab.study import read_rows
from tests.project_folder import link_code, run_pipeline
from tests.studies import test_cart
from tests.studies.small_lab import ROOT, run_study, train_run
from tests.vision.test_data_real_tasks import make_dtd, make_eurosat

pytestmark = pytest.mark.nightly
TASKS = ["dtd", "eurosat"]
TWO = len(TASKS)
# example → the runs that its studies read, with what is changed in them, and these studies with their choices
ROUNDS: dict[str, dict[str, Any]] = {
    "one_epoch": {"batch_size": 2},
    "one_epoch_128": {"batch_size": 2},
    "converged": {"epochs": 2, "batch_size": 2},
    "joint": {},
    "joint_half": {},
    "mima_1": {},
    "mima_4": {},
    "per_round_1_4": {},
}
OF_ROUNDS: dict[str, dict[str, Any]] = {
    "mima": {"rounds": [1, 4], "budgets": [], "at": [], "kept": []},
    "alignment": {"rounds": [1, 4], "shown": [4], "compared": []},
    "landscape": {"rounds": [1, 4], "pairs": [TASKS], "size": 3},
    "one_epoch": {"epochs": [1, 2]},
    "merge_frequency": {"rounds": [1, 4], "multiples": [1], "course": ["mima_4"]},
    "gradients": {"runs": {"paper": "converged"}, "images": 4},
    "linearity_experts": {"images": 32, "path": 3, "scales": [0.4], "add": [1.0], "negate": [1.0], "blocks": [9, 10]},
    "mergeability": {"runs": {"one_epoch_128": "one epoch", "mima_1": "four steps"}, "rounds": [1, 4], "images": 32},
    "cost": {"rates": ["joint_half"], "iterative": ["mima_4"], "one_shot": ["mima_1"], "rank_ratio": [0.08]},
    "projection": {
        "paths": ["mima_4"],
        "factors": [1.0],
        "images": 4,
        "drops": [0.5],
        "methods": ["task_arithmetic", "ties", "breadcrumbs", "dare", "cart"],
    },
    "equivalence": {
        "model_tasks": TASKS,
        "examples": 1,
        "epochs": 2,
        "model_steps": [1e-6, 1e-5],
        "model_scales": [0.7],
        "widths": [6, 8, 3],
        "samples": 8,
        "seeds": [0],
        "net_steps": [1e-4, 1e-3],
        "scales": [0.7],
        "gains": [1.0],
    },
}
CART: dict[str, dict[str, Any]] = {"experts": {"tasks": TWO}, "mima_8": {"tasks": TWO, "steps": 8}}
SCALE = {"low": 0.5, "high": 1.0, "step": 0.5, "start": 0.5}
OF_CART: dict[str, dict[str, Any]] = {
    "many_tasks": {
        "counts": [TWO],
        "together": {},
        "methods": {"average": {}, "ties": {"scale": SCALE}, "iso_c": {}},
        "adapted": {"directions": ["cart"], "counts": [TWO], "rates": [0.01], "steps": 1},
    },
    "rank_curve": test_cart.CURVE | {"suites": [{"tasks": TWO, "ratios": [0.0, 0.08, 1.0], "tuned": [0.08]}]},
    "interference": test_cart.LAYERS | {"counts": [TWO], "shown": [TWO], "compared": {"mima_8": TWO}},
    "adaptation": test_cart.ADAPT | {"tasks": TWO, "counts": [TWO], "images": 4},
    "compression": test_cart.FILES | {"counts": [TWO]},
    # of two tasks there are subsets of one and of both
    "subset_scaling": test_cart.SUBSETS | {"sizes": [1, TWO], "starts": [1], "validation": 4, "test": 4},
    "cart_landscape": test_cart.PLANES | {"tasks": TWO, "images": 4},
}
FEW_ROUNDS, THEIR_RUNS = ("alignment", "landscape", "projection", "linearity_experts"), ("joint", "mima_1", "mima_4")
FEW_CART = ("many_tasks", "rank_curve", "interference", "compression")
EXAMPLES = {
    "rounds_vit_b_32": (ROUNDS, OF_ROUNDS),
    "cart_vit_b_32": (CART, OF_CART),
    "landscape_vit_b_16": (
        {"mima_1": {}, "mima_4": {}, "mima_8": {"steps": 8}},
        {"landscape": OF_ROUNDS["landscape"] | {"rounds": [1, 4, 8]}},
    ),
    # What decides a shape is the architecture: some of the studies are enough for the large one, a quarter of an hour
    # each on one core, in up to 13 GB.
    "rounds_vit_l_14": ({run: ROUNDS[run] for run in THEIR_RUNS}, {name: OF_ROUNDS[name] for name in FEW_ROUNDS}),
    "cart_vit_l_14": (CART, {name: OF_CART[name] for name in FEW_CART}),
}
PARAMETERS = {"b_32": 87_849_216, "b_16": 86_192_640, "l_14": 303_966_208}
PAIRS = [(example, study) for example, (_, studies) in EXAMPLES.items() for study in studies]


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """An example as a project: its params.yaml and runs, with fewer tasks, steps and seeds; removed afterwards."""
    torch.set_num_threads(1)
    example = ROOT / "examples/studies" / request.param
    runs = EXAMPLES[request.param][0]
    root = tmp_path_factory.mktemp("real") / "project"
    for make in (make_dtd, make_eurosat):
        (root / "inputs/torchvision").mkdir(parents=True, exist_ok=True)
        make(root / "inputs/torchvision")
    link_code(root)
    values = yaml.safe_load((example / "params.yaml").read_text())
    torch.manual_seed(0)
    clip = open_clip.create_model(values["model"]["architecture"], pretrained=None)
    write_checkpoint(root / "inputs/base.safetensors", clip.state_dict())
    values["model"]["pretrained"] = "inputs/base.safetensors"
    values["tasks"] = {task: values["tasks"][task] for task in TASKS}
    # bfloat16 is for a device: without instructions for it a processor takes 25 times as long for a step.
    values["finetune"] |= {"steps": 4, "batch_size": 2, "accumulate": 1, "precision": "float32"}
    values["run"]["device"] = "cpu"
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    run_pipeline(root, ("prepare", "base"))
    whole = yaml.safe_load((example / "studies.yaml").read_text()) | {"seeds": [0]}
    whole["runs"] = {name: whole["runs"][name] | changes for name, changes in runs.items()}
    (root / "studies").mkdir()
    (root / "studies/params.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    for name in runs:
        train_run(root, name)
    yield request.param, root
    shutil.rmtree(root)  # some gigabytes


@pytest.mark.parametrize("real", EXAMPLES, indirect=True)
def test_experts_are_image_towers_of_the_real_size(real: tuple[str, Path]) -> None:
    example, root = real
    (path, *_) = sorted((root / "outputs/studies/runs").rglob("dtd/model.safetensors"))
    with open_checkpoint(path) as state:
        assert sum(info.numel for info in state.infos.values()) == PARAMETERS[example.partition("_vit_")[2]]
        assert tuple(state.infos["visual.proj"].shape) == ((768, 512) if "_b_" in example else (1024, 768))


# The scope is said because `name` is the test's own: without it every study would train all runs anew.
@pytest.mark.parametrize(("real", "name"), PAIRS, indirect=["real"], scope="module")
def test_a_study_runs_on_the_real_architecture(name: str, real: tuple[str, Path], tmp_path: Path) -> None:
    example, root = real
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:  # what it took of the memory ends with it
        done = apart.submit(run_study, root, name, tmp_path, **EXAMPLES[example][1][name])
    folder = done.result()
    assert len(read_rows(folder / "rows.parquet"))
    assert list(folder.glob("*.svg"))
    shutil.rmtree(tmp_path)
