"""The texts and probes of one seed: three books in blocks, their people and passages, and other text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mergeflow.data.task import Example
from mergeflow.modalities.causal.blocks import cut
from mergeflow.modalities.causal.decoding import causal_decoding
from mergeflow.modalities.causal.packed import PackedText
from mergeflow.modalities.causal.questions import Questions
from mergeflow.modalities.causal.tokenizer import CausalTokenizer
from studies.old.papers.unlearning.options import BOOKS, Options
from suites.books.author import Fact
from suites.books.book import find_book
from suites.books.probes import questions, verbatim
from suites.books.suite import GENERAL, documents


@dataclass(frozen=True)
class Corpus:
    """The books of a seed.

    Attributes:
        seed: Of the corpus.
        options: The study's choices.
        tokenizer: Of the base.
        device: Where batches go, and models are trained.
    """

    seed: int
    options: Options
    tokenizer: CausalTokenizer
    device: torch.device

    def texts(self, name: str, titles: Sequence[str], split: str) -> PackedText:
        """Return the documents of some tasks as one set of blocks; training splits have general text among them.

        Args:
            name: what the set is called.
            titles: of the suite's tasks.
            split: train, validation or test.
        """
        kept = (text for title in titles for path, text in documents(title, split, self.seed) if self._is_used(path))
        ids = [token for text in kept for token in (*self.tokenizer.encode(text), self.tokenizer.end)]
        return PackedText(name, cut(np.array(ids), self.options.block, self.tokenizer.end), self.device)

    def _is_used(self, path: str) -> bool:
        _, _, part = path.split("/")
        kind, _, number = part.rpartition(" ")
        if kind == "chapter":
            return int(number) < self.options.chapters
        return int(number) < (self._general * self.options.chapters / 60 if kind else self.options.general)

    @cached_property
    def _general(self) -> int:
        return sum("/general " in path for path, _ in documents(BOOKS[0], "train", self.seed))

    @cached_property
    def held_out(self) -> dict[tuple[str, str], PackedText]:
        """The validation and test blocks of each book, and of general text."""
        names = (*BOOKS, GENERAL)
        return {(name, split): self.texts(name, [name], split) for name in names for split in ("validation", "test")}

    @cached_property
    def passages(self) -> dict[str, list[str]]:
        """The passages of each book that come back word by word."""
        return {title: verbatim(find_book(title, self.seed))[: self.options.passages] for title in BOOKS}

    @cached_property
    def facts(self) -> dict[str, Questions]:
        """Questions about the people who are in one book alone."""
        return {title: self._asked(title, find_book(title, self.seed).own_facts) for title in BOOKS}

    def _asked(self, title: str, facts: Iterable[Fact]) -> Questions:
        decode = causal_decoding(self.tokenizer, self.options.block).decode
        found = [decode(Example(question, title), title).arrays for question in questions(facts)][
            : self.options.passages
        ]
        ids, ends, answers = (np.stack([one[name] for one in found]) for name in ("ids", "ends", "answers"))
        return Questions(title, ids, ends, torch.from_numpy(answers), self.tokenizer.end, self.device)
