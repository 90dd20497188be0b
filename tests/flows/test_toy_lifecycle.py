"""Small nets go the whole way of a model: registered, served, made again, a task taken out, a task added."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from flows.rebuild.add_task import add_task, read_address
from flows.rebuild.reproduce import reproduce
from flows.rebuild.unlearn import Bounds, unlearn
from flows.rebuild.unmerge import unmerge
from mergeflow.analysis.provable.answers import ask
from mergeflow.data import load_split
from mergeflow.errors import MergeflowError
from registry.store import Store, connect
from registry.versions import current, load, show
from tasks.commands.advise import make_advice
from tasks.commands.expert_inputs import ExpertInputs
from tests.flows.small_project import registry_template
from tests.project_folder import change_params, register
from tests.toy_project import PIPELINE, make_toy_project, run_pipeline

pytestmark = pytest.mark.slow

MODEL = "nets"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy project whose winner is registered; the tests below change it in their order."""
    folder = make_toy_project(tmp_path_factory.mktemp("toy") / "project")
    register(folder, MODEL, (*PIPELINE, "figures", "register"))
    return folder


@pytest.fixture
def store(project: Path) -> Store:
    return connect(project_root=project)


def test_the_champion_answers_as_it_was_scored(project: Path, store: Store) -> None:
    model, shown = load(store, MODEL), show(store, MODEL)
    assert model.metadata.signature.inputs.input_names() == [*(f"x{k}" for k in range(8)), "task"]
    for task in ("left", "right"):
        split = load_split(project / f"outputs/data/validation/{task}", "validation")
        rows = pd.DataFrame(split.inputs, columns=[f"x{k}" for k in range(8)])
        answer = model.predict(rows.assign(task=task))
        right = [label == split.class_names[k] for label, k in zip(answer["label"], split.labels, strict=True)]
        assert np.mean(right) == shown["accuracy"][task]
        assert all(sum(row.values()) == pytest.approx(1.0) for row in answer["probabilities"])
    rows.loc[1, "x3"] = np.nan
    with pytest.raises(MergeflowError, match=r"2 of 60 rows cannot be classified\. row 0: unknown task.*row 1: x3"):
        model.predict(rows.assign(task=["rigth", *["right"] * 59]))


@pytest.mark.parametrize("from_data", [False, True])
def test_it_is_made_again_bit_for_bit(project: Path, store: Store, from_data: bool) -> None:
    done = reproduce(project, store, MODEL, "champion", from_data=from_data)
    assert done.same
    assert done.experts == ({"left": True, "right": True} if from_data else {})


def test_advice_on_the_projects_experts_takes_their_own_heads_and_samples(project: Path) -> None:
    asked = ExpertInputs(project, [], None, [], None, None)
    advice = make_advice(asked, 40)
    assert advice.names == ("left", "right")
    assert not advice.remarks
    ready = asked.open(40)
    # The classes of `left` and `right` are 3 and 4: logits of a task's own head, not the net's features.
    outputs = ask(ready.model, ready.base, ready.experts, ready.sources)
    assert outputs.what == "logits"
    assert [outputs.base[task].shape[1] for task in ("left", "right")] == [3, 4]
    assert advice.pairs is not None
    assert advice.scales == sorted(advice.scales or [])


def test_a_task_is_unlearned_as_far_as_the_other_allows(project: Path, store: Store) -> None:
    before, bounds = show(store, MODEL)["accuracy"], Bounds(lose=0.05, at_most=0.4)
    done = unlearn(project, store, MODEL, "champion", "right", bounds=bounds, scales=[-0.5, -1.0, -2.0])
    accuracies = {trial.scale: trial.figures.accuracy for trial in done.tried if trial.scale < 0 and trial.keeps}
    assert done.chosen.scale < 0
    assert done.chosen.figures.accuracy["right"] == min(accuracy["right"] for accuracy in accuracies.values())
    assert all(accuracy["left"] >= before["left"] - 0.05 - 1e-9 for accuracy in accuracies.values())
    assert done.tried[0].scale == 0  # what leaving it out does alone
    shown = show(store, MODEL, done.rebuilt.version)
    assert (shown["kind"], shown["tasks"], shown["removed_tasks"]) == ("unlearn", ["left"], ["right"])
    assert shown["recipe"]["weights"] == {"right": done.chosen.scale}
    assert done.rebuilt.decision is not None
    gates = {gate.name: gate for gate in done.rebuilt.decision.gates}
    assert gates["forgotten"].passed == (done.chosen.figures.accuracy["right"] <= 0.4)
    assert gates["forgotten"].reason.startswith("right must be forgotten")
    assert gates["tolerance"].passed
    assert gates["kept"].reason.startswith("left must be kept: its accuracy")
    assert gates["kept"].passed
    assert not done.before.loss  # only of texts
    assert gates["reproducible"].passed  # the recipe with its weight, replayed
    assert reproduce(project, store, MODEL, done.rebuilt.version).same
    with pytest.raises(MergeflowError, match="has unlearned a task already"):
        unlearn(project, store, MODEL, done.rebuilt.version, "left")
    again = unlearn(project, store, MODEL, "champion", "right", bounds=bounds, scales=[-2.0, -1.0, -0.5])
    assert (again.rebuilt.version, again.rebuilt.new) == (done.rebuilt.version, False)


def test_unlearning_that_cannot_be_is_refused_in_one_sentence(project: Path, store: Store) -> None:
    candidate = current(store, MODEL).candidate
    with pytest.raises(MergeflowError, match="did you mean 'right'"):
        unlearn(project, store, MODEL, "champion", "rigth")
    with pytest.raises(
        MergeflowError, match=r"other task within its bounds: at λ = -50 left must be kept.*unmerge --task right"
    ):
        unlearn(project, store, MODEL, "champion", "right", bounds=Bounds(lose=0.0), scales=[-50.0])
    with pytest.raises(MergeflowError, match="fractions"):
        unlearn(project, store, MODEL, "champion", "right", bounds=Bounds(lose=5))
    with pytest.raises(MergeflowError, match="losses in nats"):
        unlearn(project, store, MODEL, "champion", "right", bounds=Bounds(at_least=-1))
    assert current(store, MODEL).candidate == candidate


def test_a_task_is_taken_out_and_one_is_added(project: Path, store: Store) -> None:
    without = unmerge(project, store, MODEL, "champion", "right")
    assert show(store, MODEL, without.version)["tasks"] == ["left"]
    assert without.normalised == pytest.approx(1.0, abs=0.1)  # judged with its own trained head
    with pytest.raises(
        MergeflowError,
        match="is a folder, which this project's tasks are not read from: give KIND:ADDRESS with a kind of toy",
    ):
        read_address(project, str(project / "inputs"))
    name, source = read_address(project, "toy:clouds,classes=2")
    assert (name, source) == ("clouds_classes_2", "toy:clouds,classes=2")
    added = add_task(project, store, "third", source)
    assert show(store, MODEL, added.version)["tasks"] == ["left", "right", "third"]
    assert added.champion == added.version == current(store, MODEL).champion.version
    assert "third" in yaml.safe_load((project / "params.yaml").read_text())["tasks"]
    assert json.loads((project / "outputs/experts/third/training.json").read_text())["task"] == "third"
    rows = pd.DataFrame([[0.5] * 8], columns=[f"x{k}" for k in range(8)]).assign(task="third")
    assert set(load(store, MODEL).predict(rows)["probabilities"][0]) == {"third 0", "third 1"}
    assert reproduce(project, store, MODEL, added.version, from_data=True).same


def test_weight_0_is_the_merge_without_the_task_which_may_be_followed_by_another(tmp_path: Path) -> None:
    folder = make_toy_project(tmp_path / "project", steps=30)
    tasks = dict.fromkeys(("left", "middle", "right"), "toy:clouds")
    change_params(folder, {"sweep": {"cart": {"rank_ratio": [0.5], "scale": [1.0]}}, "tasks": tasks})
    register(folder, MODEL, (*PIPELINE, "figures", "register"))
    store = connect(project_root=folder)
    bounds = Bounds(lose=1.0)
    at_0 = unlearn(folder, store, MODEL, "champion", "left", bounds=bounds, scales=[-0.1]).tried[0].figures.accuracy
    without = unmerge(folder, store, MODEL, "champion", "left").version
    assert show(store, MODEL, without)["accuracy"] == {name: at_0[name] for name in ("middle", "right")}
    both = unmerge(folder, store, MODEL, without, "right")
    assert show(store, MODEL, both.version)["removed_tasks"] == ["left", "right"]
    assert both.decision is not None
    assert "tasks" not in {gate.name for gate in both.decision.gates if not gate.passed}


def test_a_task_added_to_many_rewrites_nothing_of_theirs(tmp_path: Path) -> None:
    tasks = {f"task{number:02}": "toy:clouds" for number in range(6)}
    folder = make_toy_project(tmp_path / "project", steps=10)
    change_params(folder, {"sweep": {"task_arithmetic": {"scale": [0.1, 0.2]}}, "tasks": tasks})
    register(folder, MODEL, (*PIPELINE, "figures", "register"))
    before = written(folder)
    add_task(folder, connect(project_root=folder), "another", "toy:clouds")
    again = {name for name, when in written(folder).items() if before.get(name) != when}
    of_others = {name for name in again if any(task in name for task in tasks)}
    assert {name.partition("/heads/")[0] for name in of_others} == {"outputs/base"}  # it is written whole
    assert {name for name in again if "/records/" in name} == {
        f".mergeflow/records/{stage}.json" for stage in ("prepare@another", "base", "multitask", "finetune@another")
    }


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Return when each file of a project's outputs and of its records was written, and as which file."""
    places = (folder / "outputs", folder / ".mergeflow/records")
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def test_a_net_without_heads_is_registered_and_answers(tmp_path: Path) -> None:
    folder = make_toy_project(tmp_path / "project")
    model = {"modality": "toy", "widths": [8, 16, 4], "head": "none"}
    change_params(folder, {"model": model, "registry.model": MODEL})
    shutil.copyfile(registry_template(), folder / "mlflow.db")
    run_pipeline(folder, (*PIPELINE, "figures", "register"))
    store = connect(project_root=folder)
    split = load_split(folder / "outputs/data/validation/left", "validation")
    rows = pd.DataFrame(split.inputs, columns=[f"x{k}" for k in range(8)]).assign(task="left")
    answer = load(store, MODEL).predict(rows)
    right = [label == split.class_names[k] for label, k in zip(answer["label"], split.labels, strict=True)]
    assert np.mean(right) == show(store, MODEL)["accuracy"]["left"]
    assert list(answer["probabilities"][0]) == ["left 0", "left 1", "left 2", "output 3"]
    assert reproduce(folder, store, MODEL, "champion", from_data=True).same
