"""The bases that the study `bases` compares: one pre-training, which differs in names, style or number of drawings."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor

from mergeflow.checkpoints import write_checkpoint
from mergeflow.modalities.vision.models import POCKET, ClipModel, load_clip
from mergeflow.modalities.vision.pretraining import (
    PretrainSettings,
    draw_captions,
    draw_images,
    draw_in_chunks,
    train_base,
)
from tasks.project.sections import Section
from tasks.studies.papers.bases.style import draw_chunk

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
    return draw_in_chunks(partial(draw_chunk, seed=settings.seed), settings, workers, progress)
