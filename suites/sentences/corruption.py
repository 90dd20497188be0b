"""Words that are hidden or exchanged, so that a model learns to name them from the rest of a passage."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mergeflow.schema import Frozen
from suites.sentences.stream import Passage
from suites.sentences.vocabulary import LINKS, word_groups

IGNORED = -100  # the target of a token that need not be named
_LINK = 0.6  # probability that the word between two sentences has to be named

Tokens = NDArray[np.int64]


class CorruptionSettings(Frozen):
    """Which words have to be named, and what happens to them.

    Args:
        lone: probability that a word of a lone sentence is chosen.
        front: of the first sentence of a pair.
        back: of the second, most of which the first one tells.
        hidden: of the chosen words, the share that is hidden.
        exchanged: of the chosen words, the share that is exchanged for another of its group; the rest stays.
        unlinked: of the pairs that a word links, the share where it is taken out and the first token has to name it.
    """

    lone: float = 0.2
    front: float = 0.1
    back: float = 0.4
    hidden: float = 0.4
    exchanged: float = 0.45
    unlinked: float = 0.5


class Batch(NamedTuple):
    """Corrupted passages, all int64 [B, L]: tokens, segments, which tokens are there, and what to name."""

    tokens: Tensor
    segments: Tensor
    mask: Tensor
    targets: Tensor


class Corruption:
    """Corrupts batch after batch."""

    def __init__(self, settings: CorruptionSettings, words: PreTrainedTokenizerFast, seed: int) -> None:
        self.settings, self.words = settings, words
        self.random = np.random.Generator(np.random.PCG64(seed))
        self._ids = words.get_vocab()
        groups = [[self._ids[word] for word in group] for group in word_groups()]
        self._members = np.concatenate(groups)
        self._first, self._place = np.zeros(len(words), np.int64), np.zeros(len(words), np.int64)
        self._count = np.ones(len(words), np.int64)
        self._place[self._members] = np.arange(len(self._members))
        for group in groups:
            self._first[group], self._count[group] = self._place[group[0]], len(group)
        self._links = [self._ids[link] for link in LINKS]

    def batch(self, passages: Sequence[Passage], exchange: bool = True) -> Batch:
        """Return passages as tokens, corrupted; pairs lose the word that links them or have it before the second.

        Args:
            exchange: whether words are exchanged; if not, those that would be are hidden.
        """
        bare = [text.link is not None and self.random.random() < self.settings.unlinked for text in passages]
        inputs = [_joined(text, unlinked) for text, unlinked in zip(passages, bare, strict=True)]
        encodings = self.words.backend_tokenizer.encode_batch(inputs)
        tokens = np.full((len(encodings), max(map(len, encodings))), self.words.pad_token_id)
        segments, mask = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, encoding in enumerate(encodings):
            tokens[row, : len(encoding)], segments[row, : len(encoding)] = encoding.ids, encoding.type_ids
            mask[row, : len(encoding)] = 1
        corrupted, targets = self._corrupt(tokens, segments, exchange)
        for row, (text, unlinked) in enumerate(zip(passages, bare, strict=True)):
            if unlinked and text.link is not None:
                targets[row, 0] = self._ids[text.link]
        return Batch(*map(torch.from_numpy, (corrupted, segments, mask, targets)))

    def _corrupt(self, tokens: Tokens, segments: Tokens, exchange: bool) -> tuple[Tokens, Tokens]:
        """Return the corrupted tokens, and the targets."""
        shares, paired = self.settings, segments.any(axis=1, keepdims=True)
        probability = np.where(segments == 1, shares.back, np.where(paired, shares.front, shares.lone))
        probability = np.where(np.isin(tokens, self._links) & (segments == 1), _LINK, probability)
        probability[tokens < len(self.words.all_special_ids)] = 0
        chosen = self.random.random(tokens.shape) < probability
        fate = self.random.random(tokens.shape)
        exchanged = shares.hidden + shares.exchanged
        hidden = shares.hidden if exchange else exchanged
        corrupted = np.where(chosen & (fate < hidden), self.words.mask_token_id, tokens)
        corrupted = np.where(chosen & (fate >= hidden) & (fate < exchanged), self._others(tokens), corrupted)
        return corrupted, np.where(chosen, tokens, IGNORED)

    def _others(self, tokens: Tokens) -> Tokens:
        """Return for each token another one of its group."""
        count, first = self._count[tokens], self._first[tokens]
        step = 1 + (self.random.random(tokens.shape) * (count - 1)).astype(np.int64)
        others: Tokens = self._members[first + (self._place[tokens] - first + step) % count]
        return others


def _joined(text: Passage, unlinked: bool) -> str | tuple[str, str]:
    """Return the tokenizer's input: a sentence, or two."""
    if text.text_pair is None:
        return text.text
    return text.text, text.text_pair if unlinked or text.link is None else f"{text.link} {text.text_pair}"
