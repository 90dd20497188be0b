"""The union of tokenizers: the base's tokens keep their rows, those that only experts have come behind them."""

from collections.abc import Mapping, Sequence
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.merging.vocabulary.tokens import Vocabulary, added_tokens

# Pieces of an added token are found before the model is asked; a score this far below all others keeps it so.
_UNLIKELY = 10.0
_CUTTING = ("normalizer", "pre_tokenizer", "decoder")


def union(base: Vocabulary, others: Mapping[str, Vocabulary]) -> tuple[Vocabulary, list[str]]:
    """Return the union of tokenizers, and what is to be said of it.

    rows of the base's tokens: as they are;  a new token's row: the next, experts in order, each in order of its rows

    New merges of BPE come after all of the base's, new pieces of Unigram have their expert's score; text is normalised
    and cut up as the base does it. Added tokens become part of the model's vocabulary, which fixes their ids.

    Args:
        base: The base's tokenizer.
        others: The experts' tokenizers by name.

    Returns:
        The union (the base's own where no expert has more), and notes.

    Raises:
        MergeflowError: Tokenizers of different kinds, all of them.
    """
    other = {name: one.kind for name, one in others.items() if one.kind != base.kind}
    if other:
        listed = ", ".join(f"'{name}' {kind}" for name, kind in other.items())
        raise MergeflowError(
            f"the tokenizer of the base is a {base.kind} model, others are not ({listed}): no tokenizer is the union "
            "of both. Choose `tokenizer_source: base` or an expert's name."
        )
    notes = [note for name, one in others.items() if (note := _cut_otherwise(name, base, one))]
    tokens = dict.fromkeys(token for one in others.values() for token in sorted(one.ids, key=one.ids.__getitem__))
    new = [token for token in tokens if token not in base.ids]
    ids = {**base.ids, **{token: base.rows + place for place, token in enumerate(new)}}
    added = _added(base, others, ids)
    if not new and len(added) == len(added_tokens(base.content)):
        return base, notes
    model = dict(base.content["model"])
    new_merges = _extend(model, ids, [base.content["model"], *(one.content["model"] for one in others.values())])
    if new_merges:
        notes.append(
            f"{new_merges} merges of experts' tokenizers come after the base's: text with their tokens may be cut up "
            "otherwise than either model has seen it"
        )
    return Vocabulary(base.folder, {**base.content, "added_tokens": added, "model": model}, ids), notes


def _added(base: Vocabulary, others: Mapping[str, Vocabulary], ids: Mapping[str, int]) -> list[dict[str, Any]]:
    found = {one["content"]: one for one in added_tokens(base.content)}
    for other in others.values():
        for one in added_tokens(other.content):
            found.setdefault(one["content"], {**one, "id": ids[one["content"]]})
    return sorted(found.values(), key=lambda one: int(one["id"]))


def _extend(model: dict[str, Any], ids: Mapping[str, int], models: Sequence[Mapping[str, Any]]) -> int:
    """Put all tokens, and what the model needs to find the new ones, into a tokenizer's model; return new merges."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: ids[token] for token in sorted(ids, key=ids.__getitem__)}
    else:
        scores = {piece: score for one in reversed(models) for piece, score in one["vocab"]}
        low = min((score for _, score in model["vocab"]), default=0.0) - _UNLIKELY
        own = len(model["vocab"])
        in_order = sorted(ids, key=ids.__getitem__)
        if [ids[token] for token in in_order] != list(range(len(ids))):
            raise MergeflowError(
                "the base's tokenizer leaves rows without a token between others, which a Unigram model cannot: save "
                "it again with its library, or choose `tokenizer_source: base`."
            )
        model["vocab"] = [*model["vocab"], *([token, scores.get(token, low)] for token in in_order[own:])]
    if "merges" not in model:
        return 0
    known = {_pair(merge) for merge in model["merges"]}
    new = dict.fromkeys(_pair(merge) for one in models[1:] for merge in one["merges"] if _pair(merge) not in known)
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
    model["merges"] = [*model["merges"], *(" ".join(pair) if as_text else list(pair) for pair in new)]
    return len(new)


def _pair(merge: Any) -> tuple[str, ...]:
    """Return a merge as two tokens; older files write them as one text."""
    return tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)


def _cut_otherwise(name: str, base: Vocabulary, other: Vocabulary) -> str | None:
    parts = [part for part in _CUTTING if base.content.get(part) != other.content.get(part)]
    listed = ", ".join(parts)
    return f"the tokenizer of '{name}' has another {listed} than the base's, which the union has" if parts else None
