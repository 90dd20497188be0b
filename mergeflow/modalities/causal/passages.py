"""How models go on from the beginnings of held-out passages: texts for people to read beside the figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from mergeflow.modalities.causal.generation import greedy
from mergeflow.modalities.causal.model import LanguageModule
from mergeflow.modalities.causal.tokenizer import CausalTokenizer

PROMPT, WRITTEN = 16, 32  # tokens: a sentence is given, two are written


@dataclass(frozen=True)
class Continued:
    """What a model writes behind the beginning of a passage.

    Attributes:
        prompt: The beginning.
        own: The passage's own next words.
        written: The model's.
        right: Tokens of the model's that stand at the same place in the passage.
    """

    prompt: str
    own: str
    written: str
    right: int


def held_out(folder: Path, split: str, count: int) -> list[str]:
    """Return pieces of a prepared split of texts, spread evenly over it; none of a split of questions."""
    rows = pq.read_table(folder / f"{split}.parquet", columns=["text", "document"]).to_pylist()
    texts = [row["text"] for row in rows if row["document"] is not None]
    if not texts:
        return []
    return [texts[number] for number in np.unique(np.linspace(0, len(texts) - 1, min(count, len(texts))).astype(int))]


def go_on(
    module: LanguageModule, tokenizer: CausalTokenizer, passages: Sequence[str], most: int | None = None
) -> list[Continued]:
    """Return how a model goes on from the first 16 tokens of each passage with 32 more, the likeliest ones.

    Args:
        module: the model.
        tokenizer: of its base.
        passages: texts; those that end before they could be told are left out.
        most: how many of the others are continued, the first ones; all by default.
    """
    found = [ids for ids in map(tokenizer.encode, passages) if len(ids) >= PROMPT + WRITTEN][:most]
    if not found:
        return []
    told = greedy(module, [ids[:PROMPT] for ids in found], WRITTEN, tokenizer.end)
    continued = []
    for known, new in zip(found, told, strict=True):
        own = known[PROMPT : PROMPT + WRITTEN]
        right = sum(a == b for a, b in zip(own, new, strict=True))
        before = known[:PROMPT]
        rest, written = (tokenizer.decode_further(before, ids) for ids in (own, new))
        continued.append(Continued(tokenizer.decode(before), rest, written, right))
    return continued
