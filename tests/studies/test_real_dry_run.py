"""The studies on the real architecture: ViT-B/32 at 224 pixels with random weights, a handful of images, a step or two.

The data sets are two of the real ones, in the files that they come in, made small. What this shows is that every shape,
file and stage of the examples fits; no number means anything.
"""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import yaml

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from tasks.studies.results import StudyResult
from tests.project_folder import run_pipeline
from tests.studies.small_lab import ROOT, run_study, train_run
from tests.vision.test_data_real_tasks import make_dtd, make_eurosat

pytestmark = pytest.mark.nightly
EXAMPLE = ROOT / "examples/studies/rounds_vit_b_32"
TASKS = ("dtd", "eurosat")
RUNS: dict[str, dict[str, Any]] = {
    "one_epoch": {},
    "converged": {"epochs": 2},
    "joint": {},
    "joint_half": {},
    "mima_1": {},
    "mima_4": {},
    "per_round_1_4": {},
}
STUDIES: dict[str, dict[str, Any]] = {
    "mima": {"rounds": [1, 4], "budgets": [], "at": [], "kept": []},
    "alignment": {"rounds": [1, 4], "shown": [4], "compared": []},
    "landscape": {"rounds": [1, 4], "pairs": [list(TASKS)], "size": 3},
    "one_epoch": {"epochs": [1, 2]},
    "merge_frequency": {"rounds": [1, 4], "multiples": [1], "course": ["mima_4"]},
    "gradients": {"runs": {"paper": "converged"}, "images": 4},
    "linearity_experts": {"images": 32, "path": 3, "scales": [0.4], "add": [1.0], "negate": [1.0], "blocks": [9, 10]},
    "mergeability": {"runs": {"one_epoch": "one epoch", "mima_1": "four steps"}, "rounds": [1, 4], "images": 32},
    "cost": {"rates": ["joint_half"], "iterative": ["mima_4"], "one_shot": ["mima_1"], "rank_ratio": [0.08]},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as a project: its params.yaml and runs, with fewer tasks, steps and seeds."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("real") / "project"
    for make in (make_dtd, make_eurosat):
        (root / "inputs/torchvision").mkdir(parents=True, exist_ok=True)
        make(root / "inputs/torchvision")
    for name in ("dvc.yaml", "mergeflow", "tasks", "registry"):
        (root / name).symlink_to(ROOT / name)
    values = yaml.safe_load((EXAMPLE / "params.yaml").read_text())
    torch.manual_seed(0)
    clip = open_clip.create_model(values["model"]["architecture"], pretrained=None)
    write_checkpoint(root / "inputs/base.safetensors", clip.state_dict())
    values["model"]["pretrained"] = "inputs/base.safetensors"
    values["tasks"] = {task: values["tasks"][task] for task in TASKS}
    values["finetune"] |= {"steps": 4, "batch_size": 8}
    values["run"]["device"] = "cpu"
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    run_pipeline(root, ("prepare", "base"))
    whole = yaml.safe_load((EXAMPLE / "studies.yaml").read_text())
    whole |= {"seeds": [0], "runs": {name: whole["runs"][name] | changes for name, changes in RUNS.items()}}
    (root / "studies").mkdir()
    (root / "studies/params.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    for name in RUNS:
        train_run(root, name)
    return root


def test_experts_are_image_towers_of_the_real_size(real: Path) -> None:
    with open_checkpoint(real / "outputs/studies/runs/mima_4/seed_0/experts/dtd/model.safetensors") as state:
        assert sum(info.numel for info in state.infos.values()) == 87_849_216
        assert tuple(state.infos["visual.proj"].shape) == (768, 512)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_on_the_real_architecture(name: str, real: Path, tmp_path: Path) -> None:
    result = StudyResult.read(run_study(real, name, tmp_path, **STUDIES[name]))
    assert result.tables
    assert result.findings
    assert result.figures
    assert not any("does not fit" in note for note in result.notes)
