"""How texts and questions are prepared: every kind of source, and tokens."""

from collections.abc import Mapping
from pathlib import Path

from mergeflow.data.address import Maker
from mergeflow.data.decoding import Decoding, Preparation
from mergeflow.data.transforms import LABEL_TRANSFORMS
from mergeflow.modalities.causal.decoding import causal_decoding
from mergeflow.modalities.causal.sections import DataSection
from mergeflow.modalities.causal.sources.kinds import SOURCES
from mergeflow.modalities.causal.tokenizer import load_tokenizer


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how texts and questions become arrays of tokens."""
    return causal_decoding(load_tokenizer(section.tokenizer, root), section.block)


TRANSFORMS: Mapping[str, Maker] = {"fraction": LABEL_TRANSFORMS["fraction"]}
PREPARATION = Preparation(SOURCES, TRANSFORMS, decoding)
