"""A tokenizer of a model folder: its tokens and their rows, read from tokenizer.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.formats import read_json
from mergeflow.errors import MergeflowError

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# What tokenizers of transformers that are not "fast" leave behind; tokenizer.json can be made of them.
_SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        folder: Where its tokenizer lies.
        content: tokenizer.json.
        ids: Row of each token, added tokens among them.
    """

    folder: Path
    content: Mapping[str, Any]
    ids: Mapping[str, int]

    @property
    def kind(self) -> str:
        """The tokenizer's model: BPE, WordPiece, Unigram or WordLevel."""
        return str(self.content["model"].get("type") or _untyped(self.content["model"]))

    @property
    def rows(self) -> int:
        """The number of rows it needs at least."""
        return max(self.ids.values(), default=-1) + 1


def read_vocabulary(folder: Path | None, owner: str, path: str) -> Vocabulary:
    """Read the tokenizer of a model folder.

    Args:
        folder: The folder; None where the model is a file without one.
        owner: What the model is to the merge, for the message.
        path: Its path, for the message.

    Raises:
        MergeflowError: There is none, it is a slow one, or its tokens are not readable.
    """
    if folder is None or not (folder / TOKENIZER).is_file():
        raise _none(folder, owner, path)
    content = read_json(folder / TOKENIZER)
    try:
        ids = {**token_ids(content["model"]), **{one["content"]: int(one["id"]) for one in added_tokens(content)}}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MergeflowError(
            f"'{folder / TOKENIZER}' of '{owner}' holds no vocabulary of tokens with ids ({type(error).__name__}: "
            f"{error}). Save the tokenizer again."
        ) from None
    return Vocabulary(folder, content, ids)


def token_ids(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a tokenizer's model: a mapping, or a list of pieces with scores."""
    vocab = model["vocab"]
    return dict(vocab) if isinstance(vocab, dict) else {piece: row for row, (piece, _) in enumerate(vocab)}


def added_tokens(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens, in order of their ids."""
    return sorted(content.get("added_tokens") or [], key=lambda one: int(one["id"]))


def settings_of(folder: Path | None) -> dict[str, Any]:
    """Return tokenizer_config.json of a folder; {} where there is none."""
    path = folder / SETTINGS if folder is not None else None
    return read_json(path) if path is not None and path.is_file() else {}


def _untyped(model: Mapping[str, Any]) -> str:
    """Return the kind of a model in older files, which do not say it."""
    if isinstance(model["vocab"], list):
        return "Unigram"
    return "BPE" if "merges" in model else "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def _none(folder: Path | None, owner: str, path: str) -> MergeflowError:
    slow = next((name for name in _SLOW if folder is not None and (folder / name).is_file()), None)
    if slow is not None:
        return MergeflowError(
            f"'{owner}' ({path}) has '{slow}' but no {TOKENIZER}, which tokens are aligned by: make one with "
            f"`AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`."
        )
    where = "is a file outside a model folder" if folder is None else f"has no {TOKENIZER}"
    return MergeflowError(
        f"'{owner}' ({path}) {where}, which `tokenizer` aligns tokens by: give the model's folder with its tokenizer."
    )


def as_text(content: Mapping[str, Any]) -> str:
    """Return a tokenizer as the text of its file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
