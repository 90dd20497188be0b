"""Pre-training of the shipped bases of the embedded suites, on a CPU.

The base is meant to be good in features and wrong in names, as a CLIP is on data sets far from its captions: it sees
drawings of all classes, but in every task a share of the classes forms a cycle, and most of their images carry the
caption of the next class in it. `docs/data.md` has measurements and limits.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from mergeflow.checkpoints import write_checkpoint
from mergeflow.modalities.vision.models import POCKET, ClipModel, ImageEncoder, load_clip
from mergeflow.modalities.vision.tokenizer import vocabulary_digest
from mergeflow.processes import worker_pool
from mergeflow.schema import Frozen
from suites.pocket import TEMPLATES, Suite, get_suite, prints
from suites.pocket.core import generator
from suites.pocket.stream import draw_chunk
from suites.pretraining import SHARDS, adamw, descend_all

_CHUNK = 2000
_CONFUSED_SHARE = {
    "digits": 0.4,
    "street": 0.4,
    "signs": 0.5,
    "textures": 0.45,
    "land": 0.4,
    "aerial": 0.5,
    "scenes": 0.4,
    "vehicles": 0.5,
}
_WEIGHTS = {"digits": 0.8, "street": 1.5, "signs": 1.5, "textures": 1.0}
_WEIGHTS |= {"land": 0.7, "aerial": 1.0, "scenes": 0.8, "vehicles": 1.5}

Progress = Callable[[str, int, int], None]


class PretrainSettings(Frozen):
    """The recipe of a base.

    Args:
        start: base whose weights to go on from; None begins with random ones.
        seed: of weights, drawings, captions and order.
        passes: number of images shown, each drawing about passes / images times.
        batch: images a step.
        learning_rate: peak; linear warm-up, then cosine to 0.
        warmup: share of the steps with rising learning rate.
        weight_decay: on matrices, not on vectors and embeddings.
        style: own, as the tasks are drawn, or prints, a style that no task has.
        photo_share: share of the drawings of `own` as in the tasks, the rest is clip art.
        confused_share: per task, the share of the classes whose captions are confused.
        confusion: probability that an image of such a class carries the next class's caption.
        weights: per task, its share of the drawings relative to 1.
    """

    suite: str = "pocket8"
    start: str | None = None
    seed: int = 0
    images: int = Field(default=112_000, gt=0)
    passes: int = Field(default=400_000, gt=0)
    batch: int = Field(default=256, gt=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    warmup: float = Field(default=0.05, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    style: Literal["own", "prints"] = "own"
    photo_share: float = Field(default=0.5, ge=0, le=1)
    confused_share: dict[str, float] = Field(default_factory=lambda: dict(_CONFUSED_SHARE))
    confusion: float = Field(default=0.7, ge=0, le=1)
    weights: dict[str, float] = Field(default_factory=lambda: dict(_WEIGHTS))

    def record(self) -> dict[str, Any]:
        """Return the settings as the checkpoint's record keeps them."""
        return self.model_dump(exclude_none=True)


# pocket20 goes on from pocket8, whose eight tasks are half as frequent as the new ones. Tasks of two classes cannot be
# confused by a cycle and still be better than chance: the base is shown few of them. The bases of prints know the right
# names, and no task's style.
_PRINTS: dict[str, Any] = {"style": "prints", "confusion": 0.0}
_TWENTY = PretrainSettings(
    suite="pocket20",
    start="pocket8",
    images=130_000,
    learning_rate=1.5e-3,
    weights={"tissue": 0.15, "reviews": 0.3} | {name: weight / 2 for name, weight in _WEIGHTS.items()},
)
RECIPES = {
    "pocket8": PretrainSettings(),
    "pocket20": _TWENTY,
    "pocket8-prints": PretrainSettings(**_PRINTS),
    "pocket20-prints": _TWENTY.model_copy(update={"start": "pocket8-prints", **_PRINTS}),
}


def confused_captions(suite: Suite, settings: PretrainSettings) -> dict[str, dict[int, int]]:
    """Return for each task the cycle of its confused classes: label to the label whose caption it mostly gets.

    Example:
        >>> cycle = confused_captions(get_suite("pocket8"), PretrainSettings(confused_share={"land": 0.5}))["land"]
        >>> len(cycle), sorted(cycle) == sorted(cycle.values())
        (5, True)
    """
    cycles = {}
    for name, task in suite.tasks.items():
        classes = len(task.class_names)
        count = round(classes * settings.confused_share.get(name, 0.45))
        chosen = generator("confusion", name, settings.seed).permutation(classes)[:count].tolist()
        cycles[name] = dict(zip(chosen, chosen[1:] + chosen[:1], strict=True)) if count > 1 else {}
    return cycles


def drawn_counts(settings: PretrainSettings) -> dict[str, int]:
    """Return the number of drawings of each task."""
    weights = {name: settings.weights.get(name, 1.0) for name in get_suite(settings.suite).tasks}
    return {name: round(settings.images * weight / sum(weights.values())) for name, weight in weights.items()}


def draw_captions(settings: PretrainSettings) -> Tensor:
    """Return the caption of every pre-training drawing, int64 [N], an index into all class names of the suite."""
    suite = get_suite(settings.suite)
    cycles = confused_captions(suite, settings)
    captions, first = [], 0
    for name, count in drawn_counts(settings).items():
        classes = len(suite.tasks[name].class_names)
        labels = np.arange(count) % classes
        swapped = generator("captions", name, settings.seed).random(count) < settings.confusion
        following = np.array([cycles[name].get(label, label) for label in range(classes)])
        captions.append(first + np.where(swapped, following[labels], labels))
        first += classes
    return torch.from_numpy(np.concatenate(captions))


def draw_images(settings: PretrainSettings, workers: int, progress: Progress | None = None) -> Tensor:
    """Draw the pre-training images, uint8 [N, 32, 32, 3], task by task.

    Args:
        workers: processes that draw; no pixel depends on it.
    """
    draw = partial(draw_chunk, photo_share=settings.photo_share, seed=settings.seed)
    if settings.style == "prints":
        draw = partial(prints.draw_chunk, seed=settings.seed)
    jobs = [
        (settings.suite, name, start, min(start + _CHUNK, count))
        for name, count in drawn_counts(settings).items()
        for start in range(0, count, _CHUNK)
    ]
    parts = []
    with worker_pool(workers) as pool:
        for part in pool.map(draw, *zip(*jobs, strict=True)):
            parts.append(part)
            if progress:
                progress("draw", len(parts), len(jobs))
    return torch.from_numpy(np.concatenate(parts))


class _Loss:
    """Cross-entropy of images against the prompts of all classes."""

    def __init__(self, clip: ClipModel, class_names: list[str]) -> None:
        self.model = clip.model
        self.encoder = ImageEncoder(clip)
        self.prompts = [clip.tokenizer([t.replace("{}", name) for name in class_names]) for t in TEMPLATES]

    def shard(self, images: Tensor, captions: Tensor, step: int, total: int) -> Tensor:
        """Return a shard's part of the batch mean."""
        text = nn.functional.normalize(self.model.encode_text(self.prompts[step % len(self.prompts)]), dim=-1)
        # The whole tower, not the encoder's shortcut: it made the shipped base, which must come out bit for bit.
        features = nn.functional.normalize(self.model.visual(self.encoder.normalised_pixels(images)).float(), dim=-1)
        logits = self.model.logit_scale.exp() * features @ text.T
        return nn.functional.cross_entropy(logits, captions, reduction="sum") / total


def _batches(count: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield `steps` index tensors, epoch after epoch in fresh random order."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=draw)
    at = 0
    for _ in range(steps):
        if at + batch > count:
            order, at = torch.randperm(count, generator=draw), 0
        yield order[at : at + batch]
        at += batch


def train_base(
    settings: PretrainSettings, images: Tensor, captions: Tensor, progress: Progress | None = None
) -> tuple[ClipModel, float]:
    """Train a pocket-clip; return it and the mean loss of the last fiftieth of the steps.

    Args:
        images: uint8 [N, S, S, 3].
        captions: tokens of each image's caption, int64 [N, L].
    """
    suite = get_suite(settings.suite)
    clip = load_clip(POCKET, settings.start, seed=settings.seed)
    loss = _Loss(clip, [name for task in suite.tasks.values() for name in task.class_names])
    optimizer = adamw(clip.model.train(), settings.learning_rate, settings.weight_decay)
    batch = min(settings.batch, len(images))
    steps = max(1, settings.passes // batch)
    losses = (
        [partial(loss.shard, images[part], captions[part], step, batch) for part in chosen.chunk(SHARDS)]
        for step, chosen in enumerate(_batches(len(images), batch, steps, settings.seed))
    )
    report = None if progress is None else partial(progress, "train")

    def clamp() -> None:
        with torch.no_grad():
            clip.model.logit_scale.clamp_(max=math.log(100))

    losses_seen = descend_all(clip.model, [optimizer], losses, steps, settings.warmup, report, clamp)
    clip.model.eval()
    return clip, losses_seen


def pretrain(
    settings: PretrainSettings, out_path: str | Path, progress: Progress | None = None, workers: int = 2
) -> Mapping[str, float | str]:
    """Regenerate the base of an embedded suite.

    On one machine the same settings give the same bytes, whatever `workers` is.

    Args:
        out_path: the safetensors file; it appears whole or not at all.
        progress: called with (phase, done, total).

    Returns:
        The checkpoint's fingerprint and the last training loss.
    """
    images = draw_images(settings, workers, progress)
    clip, loss = train_base(settings, images, draw_captions(settings), progress)
    texts = [name for task in get_suite(settings.suite).tasks.values() for name in task.class_names]
    record = {
        "kind": "base",
        "architecture": POCKET,
        "recipe": json.dumps(settings.record(), sort_keys=True),
        "vocabulary": vocabulary_digest([*texts, *TEMPLATES]),
        "torch": torch.__version__,
    }
    state = {name: value.contiguous() for name, value in clip.model.state_dict().items()}
    return {"fingerprint": write_checkpoint(out_path, state, record), "loss": loss}
