"""The bases that the study `bases` compares: one pre-training, which differs in names, style or number of drawings."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field

from mergeflow.modalities.vision.models import POCKET, ClipModel, load_clip
from suites.pocket.pretraining import PretrainSettings, pretrain
from tasks.project.sections import Section

Report = Callable[[str, int, int], None]


class Arm(Section):
    """One base. label: for readers. pretrained: a shipped base, which is this pre-training already made.

    confusion: the probability of the next class's caption, for classes that are confused at all. style: of the
    drawings, as in `PretrainSettings`. images: how many are drawn; they are shown as often as `passes` says.
    """

    label: str
    pretrained: str | None = None
    confusion: float = Field(0.0, ge=0, le=1)
    style: Literal["own", "prints"] = "own"
    images: int = Field(112_000, ge=1)

    def settings(self, suite: str, passes: int) -> PretrainSettings:
        """Return the recipe."""
        return PretrainSettings(
            suite=suite, images=self.images, passes=passes, style=self.style, confusion=self.confusion
        )


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
        pretrain(arm.settings(suite, passes), path, report, workers)
    return load_clip(POCKET, str(path))
