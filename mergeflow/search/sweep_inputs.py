"""What a sweep reads: checkpoints, the encoder, heads and validation images; and a digest of each."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mergeflow.checkpoints import LazyStateDict, fingerprint
from mergeflow.data import load_manifest, load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.merging import make_recipe
from mergeflow.merging.files.inputs import Inputs, open_inputs
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head, load_head
from mergeflow.modalities.vision.decoding import image_decoding
from mergeflow.modalities.vision.heads import build_head
from mergeflow.modalities.vision.models import ClipModel, image_model, load_clip
from mergeflow.modalities.vision.sources.kinds import open_images
from mergeflow.modality import Examples, Model, check_fit
from mergeflow.search.sweep_file import ModelPart, Sweep


@dataclass(frozen=True)
class SweepInputs:
    """The opened inputs of a sweep.

    Attributes:
        checkpoints: Base, experts and statistics, read lazily.
        model: The image tower on the device.
        tasks: Validation examples with their heads, on the device.
        record: A digest of each input, by name.
    """

    checkpoints: Inputs
    model: Model
    tasks: dict[str, Examples]
    record: dict[str, Any]


@contextmanager
def open_sweep(
    sweep: Sweep, folder: Path, resolve: Callable[[str], str] | None = None, say: Callable[[str], None] = lambda _: None
) -> Iterator[SweepInputs]:
    """Open everything a sweep reads; `source:` tasks are prepared below `folder` where they are not yet.

    Raises:
        MergeflowError: a file that is missing or does not fit, or a device that is not there.
    """
    check_device(sweep.device)
    # The average takes any experts and needs no statistics: it opens and checks what all methods share.
    values = {"method": "average", "base": sweep.base, "experts": dict(sweep.experts)}
    opening = make_recipe({**values, "data": {kind: dict(paths) for kind, paths in sweep.data.items()}})
    with open_inputs(opening, resolve) as checkpoints:
        builds = any(task.head is None for task in sweep.tasks.values())
        say("model")
        clip = open_model(sweep.model, sweep.device, whole=builds)
        model = _fitting_model(sweep, clip, checkpoints.base)
        places = {}
        for task in sweep.tasks:
            say(f"data of {task}")
            places[task] = _place(sweep, task, folder, clip.image_size)
        tasks, digests = dict[str, Examples](), {}
        for task, place in places.items():
            tasks[task], digests[f"task {task}"] = _open_task(sweep, task, place, clip)
        say("fingerprints")
        record = {
            "version": _version(),
            "model.architecture": sweep.model.architecture,
            "split": sweep.split,
            "base": fingerprint(checkpoints.base),
            **{f"expert {name}": fingerprint(state) for name, state in checkpoints.experts.items()},
            **{
                f"{kind} {name}": fingerprint(state)
                for kind, states in checkpoints.data.items()
                for name, state in states.items()
            },
            **digests,
        }
        yield SweepInputs(checkpoints, model, tasks, record)


def check_device(device: str) -> None:
    """Refuse a CUDA device where there is none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MergeflowError(f"device '{device}' was asked for, but torch sees no CUDA device: use device: cpu.")


def open_model(model: ModelPart, device: str, whole: bool) -> ClipModel:
    """Load the architecture, with its pretrained weights only where the text tower is needed.

    Raises:
        MergeflowError: unknown architecture or tag, or an image size that is not the architecture's.
    """
    clip = load_clip(model.architecture, model.pretrained if whole else None, device)
    if model.image_size not in (None, clip.image_size):
        raise MergeflowError(
            f"model.image_size is {model.image_size}, but {model.architecture} takes {clip.image_size}: "
            f"set it to {clip.image_size}, or leave it out."
        )
    return clip


def _fitting_model(sweep: Sweep, clip: ClipModel, base: LazyStateDict) -> Model:
    """Return the image tower, once it is known that the base's tensors are its own."""
    model = image_model(clip)
    own = {name: tuple(value.shape) for name, value in model.state().items()}
    if own != {name: info.shape for name, info in base.infos.items()}:
        check_fit(f"base '{sweep.base}'", base, model.state())
    return model


def _place(sweep: Sweep, task: str, folder: Path, image_size: int) -> Path:
    """Return a task's prepared folder, prepared now where it comes from a source."""
    part = sweep.tasks[task]
    if part.data is not None:
        return Path(part.data)
    assert part.source is not None
    place = folder / "data" / task
    if place.exists():
        manifest = load_manifest(place)
        found = (manifest["source"], manifest["seed"], manifest["decoding"])
        if found == (part.source, sweep.seed, {"image_size": image_size}):
            return place
        shutil.rmtree(place)
    partial = place.with_name(f".{task}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    prepare_task(open_images(task, part.source, sweep.seed), partial, image_decoding(image_size), sweep.seed)
    os.rename(partial, place)
    return place


def _open_task(sweep: Sweep, task: str, place: Path, clip: ClipModel) -> tuple[Classification, str]:
    part, data = sweep.tasks[task], load_split(place, sweep.split)
    if data.images.shape[1] != clip.image_size:
        raise MergeflowError(
            f"task '{task}': its images have {data.images.shape[1]} pixels a side, but "
            f"{sweep.model.architecture} takes {clip.image_size}: prepare it again with that size."
        )
    head = build_head(clip, data.class_names, data.templates) if part.head is None else load_head(part.head)
    check_head(task, head, data.class_names, clip)
    split = load_manifest(place)["splits"][sweep.split]
    weight = fingerprint({"weight": head.weight.detach()})
    parts = (*(array["sha256"] for array in split["arrays"].values()), weight, head.logit_scale)
    digest = hashlib.sha256(repr((parts, head.class_names)).encode()).hexdigest()
    labels = torch.from_numpy(data.labels).to(sweep.device)
    return Classification(task, torch.from_numpy(data.images), labels, head.to(sweep.device)), digest


def check_head(task: str, head: Head, class_names: list[str], clip: ClipModel) -> None:
    """Refuse a head of other classes than the data's, or of other features than the model's."""
    differing = [f"{a!r} / {b!r}" for a, b in zip(head.class_names, class_names, strict=False) if a != b]
    if len(head.class_names) != len(class_names) or differing:
        told = f": {differing[0]} (head / data)" if differing else ""
        raise MergeflowError(
            f"task '{task}': the head has {len(head.class_names)} classes and the data {len(class_names)}{told}. "
            "Build the head from this data's class names."
        )
    width = clip.model.visual.output_dim
    if head.weight.shape[1] != width:
        raise MergeflowError(
            f"task '{task}': the head takes features of {head.weight.shape[1]} numbers, the model gives {width}: "
            "use a head built with this architecture."
        )


def _version() -> str:
    try:
        return version("mergeflow")
    except PackageNotFoundError:
        return "unknown"
