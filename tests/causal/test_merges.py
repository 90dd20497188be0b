"""What is done with causal experts beyond the pipeline's own methods: estimates, WUDI, one small file, HTTP."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mergeflow.commands.statistics import add_commands
from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.adamerging import entropies
from mergeflow.merging import configure, load_recipe, merge, prepare
from mergeflow.merging.compression.compressor import compressors, configure_compressor
from mergeflow.merging.compression.suite_file import compress, extract_task
from mergeflow.modalities.causal.modality import MODALITY, perplexity
from mergeflow.modalities.causal.model import open_language
from mergeflow.modalities.heads import save_head
from registry.artifacts import ModelFiles, save_pyfunc
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


def interference(base: State, merged: State, experts: dict[str, State], name: str) -> float:
    """Σ_t ‖(τ − τ_t) τ_tᵀ‖² / ‖τ_t‖² of one matrix."""
    tau, taus = merged[name] - base[name], [expert[name] - base[name] for expert in experts.values()]
    return sum(float(((tau - part) @ part.T).square().sum() / part.square().sum()) for part in taus)


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


def test_wudi_lowers_the_interference_of_every_matrix_of_the_layers(base: State, experts: dict[str, State]) -> None:
    merged = prepare(configure("wudi", {"steps": 40, "lr": 1e-3}), base, experts).at(1.0)
    summed = prepare(configure("task_arithmetic", {}), base, experts).at(1.0)
    matrices = [name for name, value in base.items() if value.ndim == 2 and ".layers." in name]
    assert len(matrices) == 2 * 7
    for name in matrices:
        assert interference(base, merged, experts, name) < interference(base, summed, experts, name)


@pytest.mark.parametrize("name", sorted(compressors()))
def test_an_expert_comes_back_from_the_file_of_all(
    project: Path, base: State, experts: dict[str, State], tmp_path: Path, name: str
) -> None:
    weights = project / "outputs/base/model.safetensors"
    compress(configure_compressor(name), base, experts).write(tmp_path / "suite.safetensors")
    extracted = extract_task(tmp_path / "suite.safetensors", "ships", weights)
    assert extracted.keys() == base.keys()
    model, text, scores = open_language(str(weights), Path()).model, opened(project, "ships"), []
    for state in (experts["ships"], extracted, base):
        model.load(state)
        scores.append(math.log(perplexity(model, text)))
    assert scores[1] < scores[0] + 0.6 * (scores[2] - scores[0])
    assert (tmp_path / "suite.safetensors").stat().st_size < len(TASKS) * weights.stat().st_size


def test_texts_are_continued_over_http(project: Path, tmp_path: Path) -> None:
    from mlflow.pyfunc import load_model, scoring_server
    from starlette.testclient import TestClient

    with safe_open(project / "outputs/base/model.safetensors", framework="pt") as file:
        record = file.metadata()
    save_head(None, tmp_path / "none.safetensors")
    files = ModelFiles(
        weights=project / "outputs/merged/average.safetensors",
        heads=dict.fromkeys(TASKS, tmp_path / "none.safetensors"),
        model={"modality": "causal", "pretrained": "inputs/base"},
        decoding=load_manifest(project / "outputs/data/manifests/ships")["decoding"],
        class_names={task: [] for task in TASKS},
        record=record,
    )
    save_pyfunc(tmp_path / "model", files)
    model = load_model(str(tmp_path / "model"))
    client = TestClient(scoring_server.init(model), raise_server_exceptions=False)

    def post(*rows: dict[str, Any]) -> Any:
        return client.post("/invocations", json={"dataframe_records": list(rows)})

    first, two = {"task": "ships", "text": "the ship "}, {"task": "trees", "text": "a"}
    alone, both = post(first), post(two, first)
    assert alone.status_code == both.status_code == 200, alone.text
    assert alone.json()["predictions"][0] == both.json()["predictions"][1]
    refused = post({"task": "shps", "text": "a"}, {"task": "ships", "text": " "})
    assert refused.status_code == 400
    assert "2 of 2 rows cannot be answered. row 0: unknown task: did you mean" in refused.json()["message"]
