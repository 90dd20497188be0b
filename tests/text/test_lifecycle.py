"""Encoders go the whole way of a model: registered, served, made again, a task taken out, a task added."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flows.rebuild.add_task import add_task, read_address
from flows.rebuild.reproduce import reproduce
from flows.rebuild.unlearn import Bounds, unlearn
from flows.rebuild.unmerge import unmerge
from mergeflow.errors import MergeflowError
from registry.versions import current, load, show
from tests.project_folder import register
from tests.text.small_project import lines, make_text_project, moods

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
