"""An old champion on today's validation images."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mergeflow.data import load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.images import encode_png
from mergeflow.modalities.vision.preparation import image_decoding
from registry.gates import Evidence, GateSettings
from registry.promotion import promote, register
from registry.stage import evaluate_version
from registry.versions import find_stored, load
from tasks.project.parameters import EvaluationSection

from .conftest import CLASSES
from .test_real_model import real

__all__ = ["real"]
JUDGING = EvaluationSection()


def prepare(folder: Path, task: str, size: int = 32, names: list[str] | None = None) -> Path:
    """Prepare a task of drawn images: 12 of noise for validation, plain colours for the other splits."""
    classes = names or CLASSES[task]

    def draw(split: str) -> Iterator[Example]:
        random = np.random.default_rng(0)
        for row in range(12):
            plain = Image.new("RGB", (size, size), (row, len(split), 0))
            noise = Image.fromarray(random.integers(0, 256, (size, size, 3), np.uint8))
            yield Example(noise if split == "validation" else plain, f"{row}.png", row % len(classes))

    splits = {split: partial(draw, split) for split in ("train", "validation", "test")}
    prepare_task(RawTask(task, classes, ["a {}."], splits), folder, image_decoding(size))
    return folder


def evidence(accuracy, digest):
    tasks = dict.fromkeys(CLASSES, accuracy)
    right = {task: (np.arange(12) < accuracy * 12).astype(np.float32) for task in CLASSES}
    return Evidence(tasks, dict.fromkeys(CLASSES, 1.0), right, dict.fromkeys(CLASSES, digest), True)


@pytest.mark.slow
def test_promote_asks_anew_only_where_the_images_changed(store, real, tmp_path):
    splits = {task: prepare(tmp_path / task, task) for task in CLASSES}
    first = replace(real, evidence=evidence(0.9, "old"))
    register(store, "merged", first)
    promote(store, "merged", 1, GateSettings())
    asked = []

    def reevaluate(version):
        asked.append(str(version.version))
        return evaluate_version(store, version, splits, today.evidence, JUDGING)

    same = replace(real, fingerprint="same", evidence=evidence(0.9, "old"))
    register(store, "merged", same)
    promote(store, "merged", 2, GateSettings(confidence=None), reevaluate=reevaluate)
    assert asked == []
    today = replace(real, fingerprint="today", evidence=evidence(1.0, "new"))
    register(store, "merged", today)
    answer = promote(store, "merged", 3, GateSettings(), reevaluate=reevaluate)
    assert asked == ["1"]
    assert answer.changed  # random weights on random pixels: no match for 100 %


def test_figures_are_those_of_the_model_itself(store, real, tmp_path):

    splits = {task: prepare(tmp_path / task, task) for task in CLASSES}
    register(store, "merged", real)
    evidence_anew = evaluate_version(store, find_stored(store, "merged", 1), splits, evidence(0.5, "today"), JUDGING)
    split, model = load_split(splits["digits"], "validation"), load(store, "merged", 1)
    rows = {"image": [encode_png(Image.fromarray(pixels)) for pixels in split.images], "task": ["digits"] * 12}
    labels = model.predict(pd.DataFrame(rows))["label"]
    right = [label == split.class_names[number] for label, number in zip(labels, split.labels, strict=True)]
    assert evidence_anew.scores["digits"].tolist() == right
    assert evidence_anew.digests == dict.fromkeys(CLASSES, "today")


def test_other_classes_and_other_sizes(store, real, tmp_path):
    register(store, "merged", real)
    renamed = prepare(tmp_path / "a", "digits", names=["null", "one", "two"])
    changed = {"digits": renamed, "signs": prepare(tmp_path / "b", "signs")}
    version = find_stored(store, "merged", 1)
    assert set(evaluate_version(store, version, changed, evidence(0.5, "x"), JUDGING).accuracy) == {"signs"}
    small = {"signs": prepare(tmp_path / "c", "signs", size=16)}
    with pytest.raises(MergeflowError, match="takes examples of image_size 32"):
        evaluate_version(store, version, small, evidence(0.5, "x"), JUDGING)


@pytest.mark.slow
def test_a_task_that_the_candidate_lacks_is_not_forgotten(store, real, tmp_path):
    register(store, "merged", replace(real, evidence=evidence(0.5, "old")))
    promote(store, "merged", 1, GateSettings())
    whole = evidence(1.0, "new")
    one_task = Evidence({"digits": 1.0}, {"digits": 1.0}, {"digits": whole.scores["digits"]}, {"digits": "new"}, True)
    splits = {"digits": prepare(tmp_path / "digits", "digits")}
    register(store, "merged", replace(real, fingerprint="one", evidence=one_task))
    answer = promote(
        store,
        "merged",
        2,
        GateSettings(),
        reevaluate=lambda version: evaluate_version(store, version, splits, one_task, JUDGING),
    )
    assert answer.decision.reasons == ["the candidate lacks tasks that the champion serves: signs"]
