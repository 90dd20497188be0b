"""The smallest other modality goes through the same stages: trained heads, float64, every regime."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergeflow.errors import MergeflowError
from mergeflow.merging.files.vectors import extract
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.heads import Head, load_head, save_head
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.modalities.toy.preparation import open_toy
from tasks.project.graph import load_graph
from tasks.project.new import new_project
from tasks.project.parameters import load_params
from tasks.running.runner import is_up_to_date, open_stage, run_stage
from tests.toy_project import SWEPT, make_toy_project, run_pipeline

PARTS = ("base/model", "vectors/left", "experts/left/model")
LAYERS_OF = ("base/model", "merged/average", "merged/cart")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_toy_project(tmp_path_factory.mktemp("toy") / "project")
    run_pipeline(folder)
    return folder


@pytest.mark.slow
def test_the_whole_pipeline_runs_and_experts_learn(project: Path) -> None:
    rows = {row["name"]: row for row in json.loads((project / "outputs/results/test.json").read_text())["rows"]}
    assert set(rows) == {"base", "individual", *SWEPT}
    assert min(rows["individual"]["accuracy"].values()) > 0.7
    assert rows["individual"]["mean"] > rows["average"]["mean"] > 1 / 4


def test_task_vectors_say_what_they_are_and_of_which_base(project: Path, tmp_path: Path) -> None:
    """A merge that took one for an expert would subtract the base from it once more."""
    base, vector, expert = (project / f"outputs/{name}.safetensors" for name in PARTS)
    extract(base, vector, tmp_path / "again.safetensors")  # of a task vector it is a copy
    tuned, start = load_file(expert), load_file(base)
    for name, value in load_file(tmp_path / "again.safetensors").items():
        assert torch.allclose(value.double(), tuned[name] - start[name], atol=1e-6)
    with pytest.raises(MergeflowError, match="taken from the base"):
        extract(expert, vector, tmp_path / "wrong.safetensors")


def test_weights_are_float64_and_heads_travel_with_their_experts(project: Path) -> None:
    base = load_file(project / "outputs/base/model.safetensors")
    for task in ("left", "right"):
        expert = load_file(project / f"outputs/experts/{task}/model.safetensors")
        assert expert.keys() == base.keys() == {"layers.0.weight", "layers.1.weight"}
        assert all(value.dtype == torch.float64 for value in expert.values())
        before = load_file(project / f"outputs/base/heads/{task}.safetensors")
        after = load_file(project / f"outputs/experts/{task}/head.safetensors")
        assert before.keys() == after.keys() == {"weight", "bias"}
        assert not torch.equal(before["weight"], after["weight"])


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"widths": [8, 16, 4], "head": "none"}
    folder = make_toy_project(tmp_path_factory.mktemp("headless") / "project", model)
    run_pipeline(folder)
    return folder


@pytest.mark.slow
def test_a_modality_without_heads_goes_through_the_whole_pipeline(headless: Path) -> None:
    rows = {row["name"]: row for row in json.loads((headless / "outputs/results/test.json").read_text())["rows"]}
    assert set(rows) == {"zero_shot", "individual", *SWEPT}
    assert min(rows["individual"]["accuracy"].values()) > 0.7
    assert rows["individual"]["mean"] > rows["zero_shot"]["mean"]
    assert not list(headless.glob("outputs/experts/*/head.safetensors"))
    with pytest.raises(MergeflowError, match="its task has no head, but here one is needed"):
        load_head(headless / "outputs/base/heads/left.safetensors")


def test_a_lost_head_is_not_taken_for_a_task_without_one(headless: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(headless, tmp_path / "project", symlinks=True)
    (folder / "outputs/base/heads/left.safetensors").unlink()
    with pytest.raises(MergeflowError, match=r"heads/left\.safetensors"):
        run_stage(folder, load_graph(folder)["finetune@left"])


def test_logits_that_are_too_few_are_refused(tmp_path: Path) -> None:
    folder = make_toy_project(tmp_path / "project", {"widths": [8, 3], "head": "none"})
    with pytest.raises(MergeflowError, match=r"right has 4\. Let the widths end with 4"):
        run_pipeline(folder, ("prepare", "base"))


def test_another_head_trains_only_its_own_expert_again(headless: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(headless, tmp_path / "project", symlinks=True)
    other = Head(torch.eye(4, dtype=torch.float64), 1.0, list("abcd"))
    save_head(other, folder / "outputs/base/heads/left.safetensors")
    for manifest in (folder / ".mergeflow/manifests").glob("base*.json"):
        manifest.unlink()  # as if the base had been fetched with this head: what is recorded is compared
    stages = [load_graph(folder)[f"finetune@{task}"] for task in ("left", "right")]
    assert [is_up_to_date(folder, stage, open_stage(folder, stage)[1]) for stage in stages] == [False, True]


@pytest.mark.slow
def test_a_new_toy_project_runs_as_it_is(tmp_path: Path) -> None:
    folder = new_project(tmp_path / "dots", "toy")
    run_pipeline(folder)
    rows = {row["name"]: row for row in json.loads((folder / "outputs/results/test.json").read_text())["rows"]}
    assert rows["individual"]["mean"] > 0.8
    assert rows["average"]["mean"] > rows["base"]["mean"]
    base, average, cart = (load_file(folder / f"outputs/{name}.safetensors") for name in LAYERS_OF)
    for name in base:  # CART treats both layers as matrices: with three tasks its directions are not zero
        assert (cart[name] - average[name]).norm() > 0.01 * (average[name] - base[name]).norm()


@pytest.mark.parametrize("regime", ["joint", "iterative", "lora", "linearised", "full_batch_gd"])
def test_every_regime_trains_it(tmp_path: Path, regime: str) -> None:
    changes = {"steps": 8, "epochs": 2, "iterative": {"rounds": 2}, "lora": {"rank": 2, "targets": ["0", "1"]}}
    folder = make_toy_project(tmp_path / "project", regime=regime, **changes)
    run_pipeline(folder, ("prepare", "base", "multitask", "finetune"))
    for task in ("left", "right"):
        made = folder / f"outputs/experts/{task}"
        assert {"model.safetensors", "head.safetensors", "training.json"} <= {path.name for path in made.iterdir()}
        files = (folder / f"outputs/base/heads/{task}.safetensors", made / "head.safetensors")
        before, after = (load_file(file)["weight"] for file in files)
        assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modality": "toi", "widths": [8, 4]}, "model.modality: unknown modality 'toi': did you mean 'toy'"),
        ({"modality": "toy", "widths": [8], "activaton": "tanh"}, "did you mean 'activation'"),
    ],
)
def test_wrong_sections_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    import yaml

    path = make_toy_project(tmp_path / "project") / "params.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"model": change}))
    with pytest.raises(MergeflowError, match=message):
        load_params(path)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("cluods", "unknown toy task 'cluods': did you mean 'clouds'"),
        ("clouds,clases=3", "unknown option of toy:clouds 'clases': did you mean 'classes'"),
        ("clouds,train=many", "train must be a whole number above 0, found 'many'"),
    ],
)
def test_wrong_sources_are_refused(place: str, message: str) -> None:
    with pytest.raises(MergeflowError, match=message):
        open_toy("left", place, 0, Path())


def test_an_answer_that_is_no_number_is_refused() -> None:
    doubled = SimpleNamespace(module=lambda rows: torch.stack([rows[:, 0] * 10, rows[:, 0] - rows[:, 0] * 10], dim=1))
    device = torch.device("cpu")
    names, widths = {"left": ["a", "b"]}, {"inputs": 1}
    loaded: Any = Loaded(MODALITIES.get("toy"), doubled, {"left": None}, names, widths, {}, device)
    assert SERVED.get("toy").answer(loaded, {"x0": [1.0], "task": ["left"]})["label"] == ["a"]
    with pytest.raises(MergeflowError, match="row 1: the model's answer is no finite number"):
        SERVED.get("toy").answer(loaded, {"x0": [1.0, 1e308], "task": ["left"] * 2})
