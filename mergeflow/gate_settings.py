"""What a candidate must show to become champion: the part of params.yaml's `registry` that the gates read."""

from pydantic import Field

from mergeflow.schema import Frozen


class GateSettings(Frozen, strict=True):
    """What a candidate must show to become champion.

    Args:
        margin: least gain in mean normalised validation accuracy over the champion, a fraction (0.002 = 0.2 points).
        tolerance: largest loss in accuracy on any one task, a fraction (0.05 = 5 points).
        confidence: level of the paired bootstrap interval of the gain, whose lower end must be above 0;
            None: no interval is asked for.
        resamples: bootstrap samples.
        seed: of the bootstrap.
        require_reproducible: the recipe must have been replayed to the same bytes.
    """

    margin: float = Field(default=0.0, ge=0.0, le=1.0)
    tolerance: float = Field(default=0.05, ge=0.0, le=1.0)
    confidence: float | None = Field(default=0.95, gt=0.0, lt=1.0)
    resamples: int = Field(default=2000, ge=100)
    seed: int = 0
    require_reproducible: bool = True
