"""A tokenizer as one text, stored with the model, for texts and pairs of texts."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.modalities.pretrained import fast_tokenizer

ASSETS = Path(__file__).with_name("assets")
PAIRS = "pairs"  # what a manifest says among its transforms of a task whose examples are two texts


@dataclass(frozen=True)
class Encoded:
    """Token ids of an example, the segment that each belongs to, and whether tokens at the end were cut."""

    ids: list[int]
    segments: list[int]
    cut: bool


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of the library `tokenizers`.

    Attributes:
        content: Its tokenizer.json, without padding and truncation.
        pad: The id that fills the rows of an array.
        segments: Whether the model takes a segment number for each token.
        max_length: Tokens of an example, special ones included; the longer of two texts is cut first.
    """

    content: str
    pad: int
    segments: bool
    max_length: int

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides a text's ids."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the manifest records for readers of the arrays."""
        return {"tokenizer": self.digest, "max_length": self.max_length, "pad": self.pad, "segments": self.segments}

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.content)
        backend.enable_truncation(self.max_length)
        return backend

    def encode(self, text: str, text_pair: str | None = None) -> Encoded:
        """Return the tokens of a text or of two, with the tokenizer's special tokens."""
        for name, value in (("text", text), ("text_pair", text_pair)):
            if value is not None and not value.strip():
                raise MergeflowError(f"its {name} is empty: give it some words, or remove the row.")
        encoding = self._backend.encode(text, text_pair)
        if not encoding.ids:
            raise MergeflowError(f"the tokenizer knows nothing of {text!r:.40}, which has no token: remove the row.")
        return Encoded(encoding.ids, encoding.type_ids, bool(encoding.overflowing))


def load_tokenizer(place: str, root: Path, max_length: int) -> TextTokenizer:
    """Load the tokenizer of a base."""
    hint = ": name a base of an encoder that was saved whole."
    tokenizer, content = fast_tokenizer(place, root, ASSETS, "pad_token", "no token for padding", hint)
    segments = "token_type_ids" in tokenizer.model_input_names
    return TextTokenizer(content, int(tokenizer.pad_token_id), segments, max_length)
