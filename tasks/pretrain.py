"""Stages `pretrain` and `many_pretrain` (frozen): regenerate a base that ships with the project."""

from pathlib import Path

from mergeflow.modalities.vision.pretraining import RECIPES, pretrain
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write the embedded base that the stage declares, by its recipe.

    On the machine and library versions that made the shipped file the bytes are the same; elsewhere they differ by
    float rounding, and so do the results of everything below.
    """
    (path,) = io.stage.outs
    recipe = RECIPES[Path(path).stem.removesuffix("-base")]
    pretrain(recipe, io.out(path), io.report, io.params.run.workers)
