"""Causal models go the whole way: registered, served as text in and out, made again, a task taken out and added."""

import html
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from flows.rebuild.add_task import add_task
from flows.rebuild.reproduce import reproduce
from flows.rebuild.unlearn import Bounds, unlearn
from flows.rebuild.unmerge import unmerge
from registry.versions import load, show
from tasks.report import write_report
from tests.causal.small_project import tale
from tests.project_folder import register

MODEL = "writers"


@pytest.mark.nightly
def test_a_project_of_causal_models_lives_as_one_of_images_does(project: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(project, tmp_path / "project", symlinks=True)
    store = register(folder, MODEL)

    model = load(store, MODEL)
    asked = pd.DataFrame({"text": ["the ship ", "the tree", "the ship "], "task": ["ships", "trees", "trees"]})
    answer = model.predict(asked)["continuation"]
    assert answer[0] == answer[2]
    assert all(isinstance(text, str) for text in answer)
    assert 0 < show(store, MODEL)["accuracy"]["ships"] < 1

    assert reproduce(folder, store, MODEL, "champion", from_data=False).same
    done = unlearn(
        folder, store, MODEL, "champion", "trees", bounds=Bounds(lose=0.9, rise=9, fall=0.9), scales=[-0.5, -1.0]
    )
    assert set(done.before.loss) == {"ships", "trees"}  # the colours are questions
    assert {criterion.form for criterion in done.chosen.criteria if criterion.task == "trees"} == {
        "accuracy",
        "loss",
        "recall",
    }
    assert set(done.before.recall) == {"ships", "trees"}
    assert done.chosen.figures.recall.keys() == done.before.recall.keys()
    assert done.chosen.figures.loss["trees"] > done.before.loss["trees"]
    assert done.rebuilt.decision is not None
    shown = {text["task"]: (text["before"], text["after"]) for text in done.texts}
    assert set(shown) == {"ships", "trees"}
    page = write_report(folder, tmp_path / "report.html").read_text()
    assert f"How version {done.rebuilt.version}, which has unlearned trees" in page
    assert all(html.escape(text, quote=False) in page for pair in shown.values() for text in pair)
    reasons = {gate.reason: gate.passed for gate in done.rebuilt.decision.gates if gate.name == "forgotten"}
    assert reasons == {criterion.reason: criterion.holds for criterion in done.chosen.criteria if not criterion.kept}
    assert reproduce(folder, store, MODEL, done.rebuilt.version, from_data=False).same
    assert isinstance(load(store, MODEL, done.rebuilt.version).predict(asked[:1])["continuation"][0], str)

    without = unmerge(folder, store, MODEL, "champion", "trees")
    assert show(store, MODEL, without.version)["tasks"] == ["colours", "ships"]

    lines = (json.dumps({"text": tale("cart", 12, n)}) + "\n" for n in range(200))
    (folder / "inputs/carts.jsonl").write_text("".join(lines))
    added = add_task(folder, store, "carts", "jsonl:inputs/carts.jsonl")
    assert show(store, MODEL, added.version)["tasks"] == ["carts", "colours", "ships", "trees"]
