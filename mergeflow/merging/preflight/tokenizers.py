"""Tokenizers, special tokens and chat templates of base and experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergeflow.merging.preflight.findings import Finding, difference
from mergeflow.merging.vocabulary.templates import templates_of
from mergeflow.merging.vocabulary.tokens import TOKENIZER, Vocabulary, added_tokens, read_vocabulary, settings_of

Folders = Mapping[str, Path | None]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def tokenizer_findings(base: Path | None, experts: Folders, resized: Mapping[str, str]) -> list[Finding]:
    """Return how the experts' tokens differ from the base's, where nothing aligns them.

    Args:
        base: The base's folder.
        experts: The experts' folders by name.
        resized: Experts whose tables have another number of rows, with the words for it.
    """
    found = [
        Finding(
            "tokenizer",
            f"tokenizer: '{name}' {words}; `tokenizer_source: union` (or base, or {name}) aligns them",
            True,
        )
        for name, words in resized.items()
    ]
    own = _content(base)
    unlike = {name: text for name, folder in experts.items() if own and (text := _content(folder)) and text != own}
    mine = read_vocabulary(base, "base", str(base)) if unlike else None
    for name in unlike:
        folder = experts[name]
        assert mine is not None
        found += _compared(name, mine, read_vocabulary(folder, name, str(folder)))
    return found


def _aligns(name: str) -> str:
    return f"`tokenizer_source: union` (or base, or {name}) aligns them"


def _content(folder: Path | None) -> bytes | None:
    path = folder / TOKENIZER if folder is not None else None
    return path.read_bytes() if path is not None and path.is_file() else None


def _compared(name: str, base: Vocabulary, other: Vocabulary) -> list[Finding]:
    """Compare one expert's tokenizer: rows of other tokens are refused, new tokens and other cuts are warned of."""
    moved = [token for token, row in other.ids.items() if base.ids.get(token, row) != row]
    named = {row: token for token, row in base.ids.items()}
    taken = [token for token, row in other.ids.items() if token not in base.ids and row in named]
    new = [token for token in other.ids if token not in base.ids]
    if moved or taken:
        parts = [f"{_count(moved)} in other rows"] * bool(moved)
        parts += [f"{_count(taken, 'row')} of other tokens{_some(taken)}"] * bool(taken)
        return [Finding("tokenizer", f"tokenizer: '{name}' has {' and '.join(parts)}; {_aligns(name)}", refused=True)]
    found = []
    if new:
        keeps = f"`tokenizer_source: union` (or {name}) keeps them"
        found.append(Finding("tokenizer", f"tokenizer: '{name}' has {_count(new)} more{_some(new)}; {keeps}"))
    lacking = [token for token in base.ids if token not in other.ids]
    if lacking:
        found.append(Finding("tokenizer", f"tokenizer: '{name}' lacks {_count(lacking)}{_some(lacking)}"))
    merges = base.content["model"].get("merges") != other.content["model"].get("merges")
    unlike = [part for part in _PARTS if base.content.get(part) != other.content.get(part)] + ["merges"] * merges
    if unlike:
        text = f"tokenizer: '{name}' cuts text with another {', '.join(unlike)}; the result has the base's"
        found.append(Finding("tokenizer", text))
    marks = {one["content"]: one.get("special") for one in added_tokens(base.content)}
    changed = [
        one["content"]
        for one in added_tokens(other.content)
        if one["content"] in base.ids and marks.get(one["content"]) != one.get("special")
    ]
    if changed:
        found.append(Finding("tokenizer", f"added tokens: '{name}' marks {len(changed)} differently{_some(changed)}"))
    return found


def _count(things: list[str], word: str = "token") -> str:
    return f"{len(things)} {word}{'s' * (len(things) > 1)}"


def _some(tokens: list[str]) -> str:
    return f" ({', '.join(repr(token) for token in tokens[:3])}{', …' * (len(tokens) > 3)})"


def special_findings(base: Path | None, experts: Folders) -> list[Finding]:
    """Return which special tokens of experts differ from the base's."""
    own, others = _special(base), {name: _special(folder) for name, folder in experts.items()}
    found = []
    for key in _SPECIAL:
        unlike = {
            name: given.get(key) for name, given in others.items() if given and own and given.get(key) != own.get(key)
        }
        if unlike:
            way_out = f"; `tokenizer_source: {next(iter(unlike))}` takes an expert's"
            found.append(difference(key, own.get(key), unlike, way_out=way_out))
    return found


def _special(folder: Path | None) -> dict[str, Any]:
    given = settings_of(folder)
    return {key: one.get("content") if isinstance(one := given[key], dict) else one for key in given}


def template_findings(base: Path | None, experts: Folders) -> list[Finding]:
    """Return which experts have another chat template than the base."""
    own = templates_of(base)
    unlike = [name for name, folder in experts.items() if (found := templates_of(folder)) and found != own]
    if not unlike:
        return []
    listed = ", ".join(f"'{name}'" for name in unlike)
    have = "have" if len(unlike) > 1 else "has"
    words = f"{listed} {have} another than the base" if own else f"{listed} {have} one, the base has none"
    return [Finding("chat_template", f"chat_template: {words}; `chat_template: {unlike[0]}` (or auto) chooses one")]
