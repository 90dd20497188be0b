"""Stage `pretrain` (frozen): regenerate the base that ships with the project."""

from mergeflow.vision.pretraining import PretrainSettings, pretrain
from tasks.runner import StageIO


def run(io: StageIO) -> None:
    """Write the embedded base by its recipe, the defaults of `PretrainSettings`.

    On the machine and library versions that made the shipped file the bytes are the same; elsewhere they differ by
    float rounding, and so do the results of everything below.
    """
    out = io.out("mergeflow/vision/assets/pocket8-base.safetensors")
    pretrain(PretrainSettings(), out, io.report, io.params.run.workers)
