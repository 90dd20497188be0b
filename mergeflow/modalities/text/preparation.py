"""How texts are prepared: every kind of source, transforms of labels, the choice of a figure, and tokens."""

from collections.abc import Mapping
from pathlib import Path

from mergeflow.data.address import Maker
from mergeflow.data.decoding import Decoding, Preparation
from mergeflow.data.transforms import LABEL_TRANSFORMS
from mergeflow.modalities.text.decoding import text_decoding
from mergeflow.modalities.text.judging import judged_by
from mergeflow.modalities.text.sections import DataSection
from mergeflow.modalities.text.sources.kinds import SOURCES
from mergeflow.modalities.text.tokenizer import load_tokenizer


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how texts become arrays of tokens."""
    return text_decoding(load_tokenizer(section.tokenizer, root, section.max_length))


TRANSFORMS: Mapping[str, Maker] = {**LABEL_TRANSFORMS, "metric": judged_by}
PREPARATION = Preparation(SOURCES, TRANSFORMS, decoding)
