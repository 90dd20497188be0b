"""Three small tasks of drawn squares, and experts of the pocket architecture trained on them for a few steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.data import load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example, RawTask
from mergeflow.evaluation import CandidateScorer
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import load_head, save_head
from mergeflow.modalities.vision.models import build_head, image_model, load_clip
from mergeflow.modalities.vision.preparation import image_decoding
from mergeflow.modality import Network
from tests.once import once

TASKS = {"red": (220, 40, 40), "blue": (40, 40, 220), "grey": (200, 200, 200)}
PLACES = {"centre": slice(10, 22), "corner": slice(0, 12), "edge": slice(20, 32)}
COUNTS = {"train": 24, "validation": 15, "test": 9}


def examples(task: str, split: str) -> Iterator[Example]:
    generator = np.random.default_rng([*TASKS].index(task) * 10 + [*COUNTS].index(split))
    for index in range(COUNTS[split]):
        label = index % len(PLACES)
        place = [*PLACES.values()][label]
        pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        pixels[place, place] = (pixels[place, place] + np.array(TASKS[task], np.uint8).astype(int)) // 2
        yield Example(Image.fromarray(pixels), f"{split}/{index}.png", label)


def prepare(folder: Path, task: str, size: int = 32) -> None:
    raw = RawTask(
        task,
        [f"{task} {place}" for place in PLACES],
        ["a photo of a {}."],
        {split: lambda split=split: examples(task, split) for split in COUNTS},
    )
    prepare_task(raw, folder, image_decoding(size), seed=0)


def shared_world(factory: pytest.TempPathFactory) -> Path:
    """Return the one world that all tests of a run share, made by one thread; nobody changes it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = once(factory, "evaluation_world", make_world)
    torch.set_num_threads(before)
    return folder


def make_world(folder: Path) -> None:
    """Write base, experts, prepared tasks and heads below a folder."""
    clip = load_clip("pocket-clip", "pocket8")
    model = image_model(clip)
    base = {name: value.clone() for name, value in model.state().items()}
    write_checkpoint(folder / "base.safetensors", base)
    for task in TASKS:
        prepare(folder / "data" / task, task)
        train = load_split(folder / "data" / task, "train")
        head = build_head(clip, train.class_names, train.templates)
        save_head(head, folder / "heads" / f"{task}.safetensors")
        model.load(base)
        write_checkpoint(folder / "experts" / f"{task}.safetensors", train_expert(model, train, head))


def train_expert(model: Network, train: Any, head: Any, steps: int = 6) -> dict[str, torch.Tensor]:
    optimiser = torch.optim.AdamW(model.module.parameters(), lr=3e-4)
    images, labels = torch.from_numpy(train.images.copy()), torch.from_numpy(train.labels)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(head(model.module(images)), labels).backward()
        optimiser.step()
    return model.state()


def sweep_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """A sweep of that world, as its file would hold it."""
    return {
        "base": str(folder / "base.safetensors"),
        "experts": {task: str(folder / "experts" / f"{task}.safetensors") for task in TASKS},
        "model": {"architecture": "pocket-clip"},
        "tasks": {
            task: {"data": str(folder / "data" / task), "head": str(folder / "heads" / f"{task}.safetensors")}
            for task in TASKS
        },
        "methods": {
            "average": {},
            "task_arithmetic": {"scale": [0.2, 0.4, 0.6]},
            "cart": {"rank_ratio": [0.04, 0.16], "scale": [0.5, 1.0, 2.0]},
        },
        **changes,
    }


def make_scorer(world: Path, **judging: Any) -> CandidateScorer:
    """The scorer of the world's experts on their validation examples."""
    data = {}
    for task in TASKS:
        split = load_split(world / "data" / task, "validation")
        head = load_head(world / "heads" / f"{task}.safetensors")
        data[task] = Classification(task, torch.from_numpy(split.images.copy()), torch.from_numpy(split.labels), head)
    experts = {task: dict(open_checkpoint(world / "experts" / f"{task}.safetensors")) for task in TASKS}
    base = dict(open_checkpoint(world / "base.safetensors"))
    return CandidateScorer(image_model(load_clip("pocket-clip")), data, base, experts, **judging)
