"""Score image encoders in a sweep: open model, heads and images, with a digest of each."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mergeflow.checkpoints import LazyStateDict, fingerprint
from mergeflow.data import load_manifest, load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.accuracy import Judge
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.vision.models import ClipModel, build_head, image_model, load_clip, open_prepared
from mergeflow.modalities.vision.preparation import image_decoding
from mergeflow.modalities.vision.preparation import open_images as open_source
from mergeflow.modality import Examples, Model, check_fit
from mergeflow.search.scorer import Candidate, CandidateModel
from mergeflow.search.sweep_file import SourceError, Sweep


class ImageScorer:
    """Accuracy of image encoders on labelled images: those of validation, and of test when these are asked for."""

    def __init__(
        self,
        model: Model,
        examples: dict[str, Examples],
        test: Callable[[], dict[str, Examples]],
        judge: Judge,
    ) -> None:
        self.tasks: Sequence[str] = tuple(examples)
        self._model, self._examples, self._test, self._judge = model, examples, test, judge

    @torch.inference_mode()
    def __call__(self, model: CandidateModel, candidate: Candidate, only: str | None = None) -> dict[str, float]:
        examples = self._test() if candidate.split == "test" else self._examples
        self._model.load(model.state)
        return self._judge.accuracies(examples if only is None else {only: examples[only]})


def open_images(
    sweep: Sweep, folder: Path, base: LazyStateDict, say: Callable[[str], None]
) -> tuple[ImageScorer, dict[str, Any]]:
    """Return the scorer of image encoders, which the base must fit, and digests of its inputs."""
    assert sweep.model is not None
    builds = any(task.head is None for task in sweep.tasks.values())
    say("model")
    part = sweep.model
    clip = load_clip(part.architecture, part.pretrained if builds else None, sweep.device)
    if part.image_size not in (None, clip.image_size):
        raise MergeflowError(
            f"model.image_size is {part.image_size}, but {part.architecture} takes {clip.image_size}: "
            f"set it to {clip.image_size}, or leave it out."
        )
    model = image_model(clip)
    shapes = {name: tuple(value.shape) for name, value in model.state().items()}
    if shapes != {name: info.shape for name, info in base.infos.items()}:
        check_fit(f"base '{sweep.base}'", base, model.state())
    places = {}
    for task in sweep.tasks:
        say(f"data of {task}")
        places[task] = _place(sweep, task, folder, clip.image_size)

    def open_split(split: str) -> dict[str, tuple[Classification, str]]:
        return {task: _open_task(sweep, task, place, clip, split) for task, place in places.items()}

    opened = open_split(sweep.split)
    facts = {"model.architecture": part.architecture}
    facts |= {f"task {task}": digest for task, (_, digest) in opened.items()}
    if sweep.precision != "float32":  # journals from before there was a choice name none
        facts["precision"] = sweep.precision
    judge = Judge(model, sweep.batch_size, sweep.precision, sweep.compile)
    return ImageScorer(model, _without_digests(opened), lambda: _without_digests(open_split("test")), judge), facts


def _without_digests(opened: dict[str, tuple[Classification, str]]) -> dict[str, Examples]:
    return {task: data for task, (data, _) in opened.items()}


def _place(sweep: Sweep, task: str, folder: Path, image_size: int) -> Path:
    """Return a task's prepared folder, prepared now where it comes from a source."""
    part = sweep.tasks[task]
    if part.data is not None:
        return Path(part.data)
    assert part.source is not None
    place = folder / "data" / task
    if place.exists():
        manifest = load_manifest(place)
        origin = (manifest["source"], manifest["seed"], manifest["decoding"])
        if origin == (part.source, sweep.seed, {"image_size": image_size}):
            return place
        shutil.rmtree(place)
    partial = place.with_name(f".{task}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        prepare_task(open_source(task, part.source, sweep.seed), partial, image_decoding(image_size), sweep.seed)
    except MergeflowError as error:
        raise SourceError(f"tasks.{task}, source '{part.source}': {error}") from None
    os.rename(partial, place)
    return place


def _open_task(sweep: Sweep, task: str, place: Path, clip: ClipModel, split: str) -> tuple[Classification, str]:
    part, data = sweep.tasks[task], load_split(place, split)
    head = build_head(clip, data.class_names, data.templates) if part.head is None else load_head(part.head)
    examples = open_prepared(task, place, split, clip, head, sweep.device)
    record = load_manifest(place)["splits"][split]
    weight = fingerprint({"weight": head.weight.detach()})
    parts = (*(array["sha256"] for array in record["arrays"].values()), weight, head.logit_scale)
    return examples, hashlib.sha256(repr((parts, head.class_names)).encode()).hexdigest()
