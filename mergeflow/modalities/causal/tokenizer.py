"""A tokenizer as one text, stored with the model, and the token that ends a document."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mergeflow.modalities.pretrained import fast_tokenizer

ASSETS = Path(__file__).with_name("assets")


@dataclass(frozen=True)
class CausalTokenizer:
    """A tokenizer of the library `tokenizers`, which puts no token of its own around a text.

    Attributes:
        content: Its tokenizer.json, without padding and truncation.
        end: The id of the token that ends a document; padding has it too, where no loss is computed.
        start: The id of the token that others may put before a text (`bos_token`); None: there is none.
    """

    content: str
    end: int
    start: int | None = None

    @classmethod
    def of_record(cls, record: Mapping[str, str]) -> "CausalTokenizer":
        """Return the tokenizer that a base's metadata hold."""
        start = record.get("start")
        return cls(record["tokenizer"], int(record["end"]), None if start is None else int(start))

    @property
    def record(self) -> dict[str, str]:
        """Its entries in a base's metadata."""
        start = {} if self.start is None else {"start": str(self.start)}
        return {"tokenizer": self.content, "end": str(self.end), **start}

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides a text's ids."""
        return hashlib.sha256(f"{self.end} {self.content}".encode()).hexdigest()

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.content)

    @cached_property
    def prefix(self) -> int | None:
        """The start token where the tokenizer itself puts it before every text: then a model was trained with it."""
        return self.start if self.start is not None and self._backend.encode("a").ids[0] == self.start else None

    def begun(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text's beginning as the model knows them, behind the start token if there is one."""
        return list(ids) if self.prefix is None else [self.prefix, *ids]

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_starts(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the ids of a text, and the character at which each begins, int64 [T], never falling."""
        encoded = self._backend.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoded.offsets], np.int64)
        return encoded.ids, np.maximum.accumulate(starts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._backend.decode(list(ids))
        return text

    def decode_further(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Decode ids that follow other ones, with the leading blank that many tokenizers drop."""
        start, whole = self.decode(before), self.decode([*before, *ids])
        # They differ if a character is split between both, because its first bytes alone are no text.
        return whole.removeprefix(start) if whole.startswith(start) else self.decode(ids)


def load_tokenizer(place: str, root: Path) -> CausalTokenizer:
    """Load the tokenizer of a base."""
    lacks, hint = "no token that ends a text (eos_token)", ", which documents are joined by: add it there."
    tokenizer, content = fast_tokenizer(place, root, ASSETS, "eos_token", lacks, hint)
    return CausalTokenizer(content, int(tokenizer.eos_token_id), tokenizer.bos_token_id)
