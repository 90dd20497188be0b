"""The bases that the study `bases` compares: one pre-training, which differs in names, style or number of drawings."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from mergeflow.checkpoints import write_checkpoint
from mergeflow.modalities.vision.models import POCKET, ClipModel, load_clip
from mergeflow.modalities.vision.pretraining import PretrainSettings, draw_captions, draw_images, train_base
from mergeflow.suites.pocket import get_suite
from tasks.project.sections import Section
from tasks.studies.papers.bases.style import draw_chunk

_CHUNK = 2000  # drawings of one job
Report = Callable[[str, int, int], None]


class Arm(Section):
    """One base. label: for readers. pretrained: a shipped base instead of a pre-training.

    confusion: the probability of the next class's caption, for classes that are confused at all. style: of the
    drawings, the tasks' own or another one. images: how many are drawn; they are shown as often as `passes` says.
    """

    label: str
    pretrained: str | None = None
    confusion: float = Field(0.0, ge=0, le=1)
    style: Literal["own", "other"] = "own"
    images: int = Field(112_000, ge=1)

    def settings(self, suite: str, passes: int) -> PretrainSettings:
        """Return the recipe."""
        return PretrainSettings(suite=suite, images=self.images, passes=passes, confusion=self.confusion)


def make_base(arm: Arm, suite: str, passes: int, path: Path, workers: int, report: Report) -> ClipModel:
    """Return an arm's base; a pre-training that `path` keeps already is not done again.

    Args:
        arm: which base.
        suite: the embedded suite whose classes it sees.
        passes: images shown.
        path: the safetensors file; it appears whole or not at all.
        workers: processes that draw; no pixel depends on it.
        report: called as `report(what, done, all)`.
    """
    if arm.pretrained is not None:
        return load_clip(POCKET, arm.pretrained)
    if not path.exists():
        settings = arm.settings(suite, passes)
        draw = draw_images if arm.style == "own" else draw_in_another_style
        clip, _ = train_base(settings, draw(settings, workers, report), draw_captions(settings), report)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {name: value.contiguous() for name, value in clip.model.state_dict().items()}
        write_checkpoint(path, state, {"kind": "base", "architecture": POCKET})
    return load_clip(POCKET, str(path))


def draw_in_another_style(settings: PretrainSettings, workers: int, progress: Report | None = None) -> Tensor:
    """Draw as `draw_images` does, as many of each class in the same order, in a style that no task has.

    Args:
        settings: how many pictures, of which tasks.
        workers: processes that draw.
        progress: called as `progress(what, done, all)`.

    Returns:
        uint8 [N, 32, 32, 3].
    """
    jobs = [
        (settings.suite, name, start, min(start + _CHUNK, count), settings.seed)
        for name, count in _counts(settings.suite, draw_captions(settings)).items()
        for start in range(0, count, _CHUNK)
    ]
    parts = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for part in pool.map(draw_chunk, *zip(*jobs, strict=True)):
            parts.append(part)
            if progress:
                progress("draw", len(parts), len(jobs))
    return torch.from_numpy(np.concatenate(parts))


def _counts(suite: str, captions: Tensor) -> dict[str, int]:
    """Return how many drawings each task has; captions number the classes of all tasks, task by task."""
    counts, first = {}, 0
    for name, task in get_suite(suite).tasks.items():
        end = first + len(task.class_names)
        counts[name] = int(((first <= captions) & (captions < end)).sum())
        first = end
    return counts
