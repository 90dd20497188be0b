"""How images are prepared: every kind of source, the transforms, and decoding to one size."""

from pathlib import Path

from mergeflow.data.decoding import Decoding, Preparation
from mergeflow.modalities.vision.decoding import image_decoding
from mergeflow.modalities.vision.sections import DataSection
from mergeflow.modalities.vision.sources.kinds import SOURCES
from mergeflow.modalities.vision.transforms import TRANSFORMS


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how images become arrays at the section's size."""
    return image_decoding(section.image_size)


PREPARATION = Preparation(SOURCES, TRANSFORMS, decoding)
