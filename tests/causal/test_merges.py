"""Estimates of causal experts: AdaMerging and statistics, which need no heads, from the command to a merge."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import load_file
from torch import Tensor

from mergeflow.commands.statistics import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.adamerging import entropies
from mergeflow.merging import configure, load_recipe, merge, prepare
from mergeflow.modalities.causal.modality import MODALITY
from mergeflow.modalities.causal.model import open_language
from mergeflow.modalities.heads import save_head
from tests.causal.small_project import TASKS
from tests.command import invoke

State = dict[str, Tensor]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(project: Path) -> State:
    return load_file(project / "outputs/base/model.safetensors")


@pytest.fixture(scope="module")
def experts(project: Path) -> dict[str, State]:
    return {task: load_file(project / f"outputs/experts/{task}/model.safetensors") for task in TASKS}


def opened(project: Path, task: str) -> Any:
    return MODALITY.open(task, project / f"outputs/data/validation/{task}", "validation", None, CPU)


def call(project: Path, *words: str) -> Result:
    whole = [*words, "--architecture", str(project / "outputs/base/model.safetensors")]
    done = invoke(add_commands, *whole, obj=lambda text: text)
    if isinstance(done.exception, MergeflowError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def recipe_of(project: Path, out: Path, method: str, **more: Any) -> Path:
    experts = {task: str(project / f"outputs/experts/{task}/model.safetensors") for task in TASKS}
    base = str(project / "outputs/base/model.safetensors")
    values = {"method": method, "base": base, "experts": experts, "out": str(out / "merged.safetensors"), **more}
    (out / "recipe.yaml").write_text(yaml.safe_dump(values))
    return out / "recipe.yaml"


def test_adamerging_learns_without_heads_and_lowers_the_entropy(
    project: Path, base: State, experts: dict[str, State], tmp_path: Path
) -> None:
    recipe = recipe_of(project, tmp_path, "adamerging", args={"granularity": "task", "steps": 8, "lr": 0.05})
    places = [f"--task={task}={project / f'outputs/data/validation/{task}'}" for task in TASKS]
    done = call(project, "adamerge", str(recipe), *places, "--out", str(tmp_path / "learned"))
    assert "entropy" in done.output
    learned = load_file(merge(load_recipe(tmp_path / "learned/recipe.yaml")).path)
    start = prepare(configure("task_arithmetic", {"scale": 0.3}), base, experts).at(0.3)
    model = open_language(str(project / "outputs/base/model.safetensors"), Path()).model
    data = {task: opened(project, task) for task in TASKS}
    before, after = (sum(entropies(model, data, state).values()) for state in (start, learned))
    assert after < before
    with pytest.raises(MergeflowError, match="unknown task of --head 'shps': did you mean 'ships'"):
        call(project, "adamerge", str(recipe), *places, "--head=shps=x", "--out", str(tmp_path / "other"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [("fisher", "fisher"), ("gram", "regmean")])
def test_statistics_need_no_head_where_a_task_has_none(project: Path, tmp_path: Path, kind: str, method: str) -> None:
    files = {task: tmp_path / f"{task}.safetensors" for task in TASKS}
    save_head(None, tmp_path / "none.safetensors")
    for number, (task, out) in enumerate(files.items()):
        expert = str(project / f"outputs/experts/{task}/model.safetensors")
        head = ["--head", str(tmp_path / "none.safetensors")] if number == 0 else []  # a file that says so will do
        places = ["--task", str(project / f"outputs/data/train/{task}"), "--out", str(out), *head]
        assert "3 examples of train" in call(project, "statistics", kind, expert, *places, "--samples", "3").output
    data = {kind: {task: str(path) for task, path in files.items()}}
    made = load_file(merge(load_recipe(recipe_of(project, tmp_path, method, data=data))).path)
    assert made.keys() == load_file(project / "outputs/base/model.safetensors").keys()
