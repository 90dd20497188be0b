"""Texts go through the same stages as images, by both drivers, and the whole way of a registered model."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel

from flows.rebuild.add_task import add_task, read_address
from flows.rebuild.reproduce import reproduce
from flows.rebuild.unlearn import Bounds, unlearn
from flows.rebuild.unmerge import unmerge
from mergeflow.analysis.provable.answers import ask, one_each
from mergeflow.data import load_manifest, load_split
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import example_scores
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.text.modality import build, open_examples
from mergeflow.modalities.text.sections import ModelSection
from mergeflow.modality import Model
from registry.versions import current, load, show
from tasks.commands.expert_inputs import ExpertInputs
from tests.causal.small_project import make_causal_project
from tests.flows.small_project import registry_template, run_in
from tests.flows.test_pipeline import outputs
from tests.project_folder import SWEPT, register, run_pipeline
from tests.text.small_project import TASKS, lines, make_text_project, moods

CPU = torch.device("cpu")


def rows_of(project: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads((project / "outputs/results/test.json").read_text())["rows"]}


def test_the_whole_pipeline_runs_and_experts_learn(project: Path) -> None:
    rows = rows_of(project)
    assert set(rows) == {"base", "individual", *SWEPT}
    assert rows["individual"]["accuracy"]["mood"] > 0.9  # the other two are too much for so small an encoder
    assert all(row["accuracy"].keys() == TASKS.keys() for row in rows.values())


def test_the_experts_are_asked_for_classes_and_for_numbers(project: Path) -> None:
    ready = ExpertInputs(project, [], None, [], None, None).open(20)
    near: Any = ready.sources["near"]
    scores = ask(ready.model, ready.base, ready.experts, {"near": one_each(near)}, 16).experts["near"]["near"]
    ready.model.load(ready.experts["near"])
    with torch.inference_mode():
        numbers = near.whole.answers(ready.model, torch.arange(20))
    assert torch.allclose(scores[:, 0], numbers.double(), atol=1e-5)


def test_encoders_are_merged_and_heads_travel_with_their_experts(project: Path) -> None:
    base = load_file(project / "outputs/base/model.safetensors")
    assert {name.partition(".")[0] for name in base} == {"roberta"}
    assert not [name for name in base if "pooler" in name]
    for task in TASKS:
        expert, head = (load_file(project / f"outputs/experts/{task}/{part}.safetensors") for part in ("model", "head"))
        assert expert.keys() == base.keys() == load_file(project / "outputs/merged/cart.safetensors").keys()
        assert head["weight"].shape == ({"mood": 2, "same": 2, "near": 1}[task], 32)


def test_transformers_loads_the_weights_of_an_expert(project: Path, tmp_path: Path) -> None:
    shutil.copy(project / "inputs/base/config.json", tmp_path)
    shutil.copy(project / "outputs/experts/mood/model.safetensors", tmp_path)
    model = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    for name, tensor in load_file(project / "outputs/experts/mood/model.safetensors").items():
        assert torch.equal(model.state_dict()[name.removeprefix("roberta.")], tensor)


def test_the_weights_of_the_base_say_how_to_build_it(project: Path) -> None:
    with safe_open(project / "outputs/base/model.safetensors", framework="pt") as file:
        record = file.metadata()
    assert json.loads(record["config"])["model_type"] == "roberta"
    assert str(project) not in json.dumps(record)
    model = build(ModelSection(modality="text", pretrained="gone"), record)
    model.load(load_file(project / "outputs/base/model.safetensors"))
    with pytest.raises(MergeflowError, match="run the stage `base` again"):
        build(ModelSection(modality="text", pretrained="gone"), {})


def test_what_is_stored_of_texts(project: Path) -> None:
    folder = project / "outputs/data/train/near"
    manifest = load_manifest(folder)
    data = load_split(folder, "train", verify=True)
    assert manifest["class_names"] == []
    assert manifest["splits"]["test"]["carved_from"] == "train"
    assert data.ids.dtype == np.int32
    assert data.ids.shape == (len(data), 36)
    assert set(np.unique(data.targets)) == {0.0, 1.0, 2.0}
    rows = np.arange(36) >= data.lengths[:, None]
    assert (data.ids[rows] == 1).all()
    assert not (data.ids[~rows] == 1).any()
    assert manifest["splits"]["train"]["duplicates_removed"]  # what test and validation hold has left train
    assert load_manifest(project / "outputs/data/train/mood")["transforms"] == ["metric=matthews"]


def model_of(project: Path, weights: str) -> Model:
    with safe_open(project / "outputs/base/model.safetensors", framework="pt") as file:
        model = build(ModelSection(modality="text", pretrained="-"), file.metadata())
    model.load(load_file(project / f"outputs/{weights}.safetensors"))
    return model


def test_a_kept_prediction_gives_the_figure_that_the_test_tells(project: Path) -> None:
    from sklearn.metrics import matthews_corrcoef

    folder = project / "outputs/data/test/mood"
    head = load_head(project / "outputs/experts/mood/head.safetensors")
    examples = open_examples("mood", folder, "test", head, CPU)
    model = model_of(project, "merged/ties")
    assert not model.module.training  # transformers' own classes have dropout
    right, answered = examples.scores(model, torch.arange(len(examples))).T.numpy()
    score = rows_of(project)["ties"]["accuracy"]["mood"]
    assert example_scores(model, examples).mean() == pytest.approx(score, abs=1e-12)
    assert matthews_corrcoef(right, answered) == pytest.approx(score, abs=1e-12)


def test_heads_are_probed_before_training_or_drawn(project: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    from mergeflow.modalities.text.modality import warm

    model = model_of(project, "base/model")
    head = load_head(project / "outputs/base/heads/mood.safetensors")
    drawn = head.weight.clone()
    examples = open_examples("mood", project / "outputs/data/train/mood", "train", head, CPU)
    warm(ModelSection(modality="text", pretrained="-", head="drawn"), model, examples)
    assert torch.equal(head.weight, drawn)
    warm(ModelSection(modality="text", pretrained="-"), model, examples)
    features = examples.embeddings(model, torch.arange(len(examples))).detach()
    z = ((features - features.mean(0)) / features.std(0, correction=0)).double().numpy()
    # For two classes scikit-learn has one row of weights, the difference of ours: half the penalty of both.
    reference = LogisticRegression(C=2.0, tol=1e-8, max_iter=1000).fit(z, examples.labels.numpy())
    probabilities = head(features).softmax(dim=1).detach().numpy()
    np.testing.assert_allclose(probabilities, reference.predict_proba(z), atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["joint", "iterative", "lora", "linearised", "full_batch_gd"])
def test_every_regime_trains_texts(project: Path, tmp_path: Path, regime: str) -> None:
    changes = {"steps": 4, "epochs": 1, "iterative": {"rounds": 2}, "lora": {"rank": 2, "targets": ["query", "value"]}}
    folder = make_text_project(tmp_path / "project", regime=regime, **changes)
    shutil.copytree(project / "outputs/data", folder / "outputs/data")
    shutil.copytree(project / "outputs/base", folder / "outputs/base")
    run_pipeline(folder, ("multitask", "finetune"))
    base = load_file(folder / "outputs/base/model.safetensors")
    for task in TASKS:
        made = folder / f"outputs/experts/{task}"
        assert {"model.safetensors", "head.safetensors", "training.json"} <= {path.name for path in made.iterdir()}
        expert = load_file(made / "model.safetensors")
        assert expert.keys() == base.keys()
        assert any(not torch.equal(expert[name], base[name]) for name in base)
        assert torch.isfinite(load_file(made / "head.safetensors")["weight"]).all()


def test_texts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    from tests.text.small_project import make_base

    folder = make_text_project(tmp_path / "project", {"pretrained": "inputs/other"})
    make_base(folder / "inputs/other", "bert")
    tokenizer = folder / "inputs/other/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"emu"', '"ibis"'))
    with pytest.raises(MergeflowError, match="texts of mood, same, near were prepared with the tokenizer of 'inputs/b"):
        run_pipeline(folder, ("prepare", "base"))


MODEL = "encoders"


def test_a_task_is_named_after_its_file_and_a_path_says_how_it_is_read(tmp_path: Path) -> None:
    inputs = make_text_project(tmp_path) / "inputs"
    (inputs / "stars").mkdir(parents=True)
    for name in ("moods.jsonl", "stars/train.csv", "notes.txt"):
        (inputs / name).write_text("")
    assert read_address(tmp_path, "jsonl:inputs/moods.jsonl?text=Body&label=A b&metric=f1")[0] == "moods_metricf1"
    assert read_address(tmp_path, str(inputs / "moods.jsonl")) == ("moods", "jsonl:inputs/moods.jsonl")
    assert read_address(tmp_path, str(inputs / "stars")) == ("stars", "csv:inputs/stars")
    with pytest.raises(MergeflowError, match=r"is a file, which this project's tasks are not read from: give"):
        read_address(tmp_path, str(inputs / "notes.txt"))


@pytest.mark.nightly
def test_a_project_of_texts_lives_as_one_of_images_does(project: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(project, tmp_path / "project", symlinks=True)
    store = register(folder, MODEL)

    model, shown = load(store, MODEL), show(store, MODEL)
    rows = [json.loads(line) for line in (folder / "inputs/mood/validation.jsonl").read_text().splitlines()]
    answer = model.predict(pd.DataFrame({"text": [row["text"] for row in rows], "task": "mood"}))
    right = np.mean([label == row["label"] for label, row in zip(answer["label"], rows, strict=True)])
    assert right > 0.9
    assert shown["accuracy"]["mood"] > 0.8  # Matthews' correlation of the same answers
    pairs = pd.DataFrame({"text": ["red cat"], "text_pair": ["blue cat"], "task": ["near"]})
    assert model.predict(pairs)["probabilities"][0] == {}

    assert reproduce(folder, store, MODEL, "champion", from_data=False).same
    done = unlearn(folder, store, MODEL, "champion", "same", bounds=Bounds(lose=0.9), scales=[-0.5, -1.0])
    assert not done.before.loss  # encoders are judged by their answers alone
    assert show(store, MODEL, done.rebuilt.version)["tasks"] == ["mood", "near"]
    assert reproduce(folder, store, MODEL, done.rebuilt.version, from_data=False).same

    without = unmerge(folder, store, MODEL, "champion", "near")
    assert show(store, MODEL, without.version)["tasks"] == ["mood", "same"]

    for seed, (split, count) in enumerate({"train": 80, "validation": 40, "test": 40}.items()):
        path = folder / f"inputs/again/{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines({**row, "text": f"and {row['text']}"} for row in moods(count, random.Random(seed))))
    added = add_task(folder, store, "again", "jsonl:inputs/again?conflicts=keep")
    assert show(store, MODEL, added.version)["tasks"] == ["again", "mood", "near", "same"]
    assert added.champion == added.version == current(store, MODEL).champion.version


@pytest.mark.nightly
@pytest.mark.parametrize("make", [make_text_project, make_causal_project])
def test_dvc_repro_gives_the_bits_of_mergeflow_run(make: Callable[[Path], Path], tmp_path: Path) -> None:
    made: dict[str, dict[str, bytes]] = {}
    for driver in (("mergeflow", "run"), ("dvc", "repro")):
        folder = make(tmp_path / driver[0])
        shutil.copyfile(registry_template(), folder / "mlflow.db")
        assert run_in(folder, "dvc", "init", "--no-scm", "--quiet").returncode == 0
        done = run_in(folder, *driver, timeout=900)
        assert done.returncode == 0, done.stderr
        assert (folder / "outputs/registration.json").exists()
        made[driver[0]] = outputs(folder)
    assert made["mergeflow"].keys() == made["dvc"].keys()
    assert [name for name, content in made["dvc"].items() if made["mergeflow"][name] != content] == []
    again = run_in(tmp_path / "dvc", "mergeflow", "run", timeout=900)
    assert "Nothing changed" in again.stdout, again.stdout
