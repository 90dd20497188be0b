"""The tokenizer's files and the ids of config.json in the folder that a merge with its own vocabulary makes."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.formats import read_json
from mergeflow.checkpoints.writer import write_text
from mergeflow.merging.vocabulary.templates import MORE
from mergeflow.merging.vocabulary.tokens import SETTINGS, TOKENIZER, Vocabulary, added_tokens, as_text

# What a tokenizer is stored in beside tokenizer.json: for its slow form, or by older versions of transformers.
_DERIVED = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "*.model", "*.spm", "*.bpe", "*.tiktoken")
_OTHER = (TOKENIZER, SETTINGS, "special_tokens_map.json", "tekken.json", "chat_template.jin*")
_IDS = re.compile(r".*_(?:token|tokens)_(?:id|ids|index)$|(?:begin_)?suppress_tokens$")
_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a merge writes for its vocabulary.

    Attributes:
        result: The merged vocabulary.
        base: The base's.
        source: The vocabulary whose files are copied: the base's, or an expert's.
        rows: Rows of the merged vocabulary, and of the base's.
        moved: The tables whose rows are not those of the base's file.
    """

    result: Vocabulary
    base: Vocabulary
    source: Vocabulary
    rows: tuple[int, int]
    moved: frozenset[str] = frozenset()

    def write(self, folder: Path) -> None:
        """Make the files of a folder, which has the base's, those of the merged vocabulary."""
        if self.source is not self.base:
            _replace(self.source.folder, folder)
        if self.result is not self.source:
            _extend(self.result, folder)
        new, old = self.rows
        tokens = {row: token for token, row in self.base.ids.items()}
        for name in _CONFIGS:
            path, theirs = folder / name, self.source.folder / name
            if not path.is_file():
                continue
            before = config = read_json(path)
            if self.source is not self.base:
                own = read_json(theirs) if theirs.is_file() else {}
                config = _with_ids(config, own, tokens, self.result.ids)
            config = _resized(config, old, new)
            if config != before:
                write_text(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _replace(source: Path, folder: Path) -> None:
    """Take the base's tokenizer away and copy another model's."""
    for pattern in (*_DERIVED, *_OTHER):
        for file in folder.glob(pattern):
            file.unlink()
    shutil.rmtree(folder / MORE, ignore_errors=True)
    copy_tokenizer(source, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a model's tokenizer, with its chat templates.

    Args:
        source: The model's folder.
        folder: Where to; it has none of them.
    """
    for pattern in (*_DERIVED, *_OTHER):
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    if (source / MORE).is_dir():
        shutil.copytree(source / MORE, folder / MORE)


def _extend(result: Vocabulary, folder: Path) -> None:
    """Write a new tokenizer.json; older forms of the tokenizer that would disagree with it are removed."""
    write_text(folder / TOKENIZER, as_text(result.content))
    for pattern in _DERIVED:
        for file in folder.glob(pattern):
            file.unlink()
    path = folder / SETTINGS
    settings = read_json(path) if path.is_file() else {}
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        new = {str(one["id"]): {k: v for k, v in one.items() if k != "id"} for one in added_tokens(result.content)}
        write_text(path, json.dumps({**settings, "added_tokens_decoder": new}, indent=2, ensure_ascii=False) + "\n")


def _resized(config: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """Return a configuration with the new `vocab_size`, in its parts too, wherever the old one stands."""
    return {
        key: _resized(value, old, new)
        if isinstance(value, dict)
        else new
        if key == "vocab_size" and value == old
        else value
        for key, value in config.items()
    }


def _with_ids(
    config: Mapping[str, Any], theirs: Mapping[str, Any], tokens: Mapping[int, str], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return a configuration with the ids of tokens that the tokenizer's model has, else the base's by their tokens."""

    def translated(value: Any) -> Any:
        if isinstance(value, list):
            return [found for one in value if (found := translated(one)) is not None]
        known = isinstance(value, int) and not isinstance(value, bool) and value in tokens
        return ids.get(tokens[value]) if known else value

    found: dict[str, Any] = {}
    for key in dict.fromkeys((*config, *(key for key in theirs if _IDS.match(key)))):
        value = config.get(key)
        if isinstance(value, dict):
            part = theirs.get(key)
            found[key] = _with_ids(value, part if isinstance(part, dict) else {}, tokens, ids)
        elif _IDS.match(key):
            found[key] = theirs[key] if key in theirs else translated(value)
        else:
            found[key] = value
    return found
