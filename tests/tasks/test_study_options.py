"""The choices of all studies are checked before any training run starts, whoever drives."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from mergeflow.errors import MergeflowError
from studies.commands.study import find_studies, run_studies
from tasks.project.graph import load_graph
from tasks.project.parameters import load_params, load_study_params
from tasks.project.study_graph import check_study_options
from tasks.running.runner import run_stage

ROOT = Path(__file__).parents[2]
CHOSEN = yaml.safe_load((ROOT / "studies/params.yaml").read_text())["studies"]["mima"]
MISSPELT = {name: value for name, value in CHOSEN.items() if name != "keep"} | {"keeps": 0.2}


def project(folder: Path, **studies: Any) -> Path:
    """A project with the repository's graph and some changed choices, without any data."""
    (folder / "studies").mkdir()
    for name in ("params.yaml", "dvc.yaml", "studies/dvc.yaml"):
        shutil.copy(ROOT / name, folder / name)
    whole = yaml.safe_load((ROOT / "studies/params.yaml").read_text())
    whole["studies"] |= studies
    (folder / "studies/params.yaml").write_text(yaml.safe_dump(whole))
    return folder


def test_every_fault_of_every_study_is_told(tmp_path: Path) -> None:
    root = project(tmp_path, mima=MISSPELT, one_epoch={"epochs": "all", "further": {}}, one_epok={})
    with pytest.raises(MergeflowError) as caught:
        check_study_options(root, load_study_params(root / "studies/params.yaml", load_params(root / "params.yaml")))
    assert str(caught.value).splitlines() == [
        "studies/params.yaml has 4 faults:",
        "  - studies.mima: keep is missing",
        "  - studies.mima: unknown key 'keeps': did you mean 'keep'? Known: at, budgets, keep, kept, rounds",
        "  - studies.one_epoch: epochs: must be a list, found 'all'",
        *str(caught.value).splitlines()[4:],
    ]
    assert "unknown study 'one_epok': did you mean 'one_epoch'?" in str(caught.value)


def test_the_command_refuses_before_anything_runs(tmp_path: Path) -> None:
    root = project(tmp_path, mima=MISSPELT)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MergeflowError, match="did you mean 'keep'"):
        run_studies(root, [find_studies(root)["one_epoch"]], False, Console(quiet=True))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_training_run_that_dvc_starts_refuses_too(tmp_path: Path) -> None:
    root = project(tmp_path, mima=MISSPELT)
    training = next(stage for stage in load_graph(root, studies=True).values() if stage.name == "train")
    with pytest.raises(MergeflowError, match="did you mean 'keep'"):
        run_stage(root, replace(training, deps=()))
    assert not (root / "outputs").exists()
