"""The word-level tokenizer of pocket-clip: a small vocabulary, with hash buckets for all other words."""

import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

VOCABULARY = Path(__file__).with_name("vocabulary.txt")
CONTEXT_LENGTH = 8
VOCABULARY_SIZE = 1024
END = VOCABULARY_SIZE - 1  # the highest id, where open_clip's text tower pools
FIRST_BUCKET = 768

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Return the lower-case words of a text."""
    return _WORD.findall(text.lower())


@cache
def _ids() -> dict[str, int]:
    listed = VOCABULARY.read_text(encoding="utf-8").split()
    assert len(listed) < FIRST_BUCKET, "the vocabulary has outgrown the ids below the hash buckets"
    return {word: number for number, word in enumerate(listed, start=1)}


def vocabulary_digest(texts: Iterable[str]) -> str:
    """Return the SHA-256 of the vocabulary up to the last word of some texts, which a checkpoint's record names.

    Words are only ever added at the end, so a base keeps its ids when a later suite brings words of its own.
    """
    ids = _ids()
    used = max(ids.get(word, 0) for text in texts for word in words(text))
    return _digest(list(ids)[:used])


def knows_vocabulary(digest: str) -> bool:
    """Return whether this vocabulary begins with the one of a `vocabulary_digest`."""
    listed = list(_ids())
    return any(_digest(listed[:count]) == digest for count in range(len(listed), 0, -1))


def _digest(listed: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()


class WordTokenizer:
    """Turn texts into ids as open_clip's tokenizers do: 0 pads, the highest id ends.

    A word outside the vocabulary shares one of 255 hash buckets, whose embeddings are untrained: its class has a
    fixed head direction that fine-tuning can learn to use, but no zero-shot meaning.
    """

    context_length = CONTEXT_LENGTH

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> torch.Tensor:
        """Return ids, int64 [N, context_length]; longer texts lose their last words."""
        length = context_length or self.context_length
        batch = [texts] if isinstance(texts, str) else list(texts)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        for row, text in enumerate(batch):
            numbers = [*map(_id, words(text)[: length - 1]), END]
            ids[row, : len(numbers)] = torch.tensor(numbers)
        return ids


def _id(word: str) -> int:
    return _ids().get(word) or FIRST_BUCKET + zlib.crc32(word.encode()) % (END - FIRST_BUCKET)
