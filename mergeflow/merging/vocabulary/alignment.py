"""Models of different vocabularies, brought to one before a merge: which row of each model a token is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.folders import config_of, folder_of
from mergeflow.checkpoints.header import FLOAT64, DType, TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict, view
from mergeflow.errors import MergeflowError, together, unknown_name
from mergeflow.late import np, torch
from mergeflow.merging.architectures.architecture import Architecture, architecture_of
from mergeflow.merging.architectures.blocks import vocab_sizes
from mergeflow.merging.vocabulary.companions import (
    BASE,
    TOKENIZER,
    UNION,
    Source,
    TokenChoice,
    TokenizerChoice,
    TokenizerFiles,
    Vocabulary,
    added_tokens,
    cut_otherwise,
    read_vocabulary,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]
    from torch import Tensor


@dataclass(frozen=True)
class Alignment:
    """Rows of the models' tables, by model, in the order of the merged vocabulary; -1 where there is none."""

    rows: int
    direct: Mapping[str, Rows]  # the row of each token; -1 where it is lacking, or must come from elsewhere
    donors: Mapping[str, Rows]  # the rows given to tokens without a direct row
    spare: NDArray[np.bool_]  # which rows are no token's, [rows]

    def is_identity(self, model: str, rows: int) -> bool:
        """Whether a model's table of so many rows stays as it is."""
        return rows == self.rows and bool((self.direct[model] == np.arange(rows)).all())


def align(
    wanted: Mapping[str, int],
    rows: int,
    models: Mapping[str, tuple[Mapping[str, int], int]],
    tokens: Mapping[str, TokenChoice],
) -> Alignment:
    """Find the rows of all models for a vocabulary, given each model's ids of tokens and number of rows.

    A row without a token (a padded vocabulary has them) is the same row of the models where it has none either. A model
    that lacks a token takes the base's row, or the only model's that has it, or the mean of all that have it.

    """
    rows_of = {name: _token_rows(wanted, rows, ids, held) for name, (ids, held) in models.items()}
    lacking = rows_of[BASE] < 0
    donors = {
        name: row_ids.copy() if name == BASE else np.where(lacking, row_ids, -1) for name, row_ids in rows_of.items()
    }
    together(*(partial(_check, token, choice, wanted, models) for token, choice in tokens.items()))
    for token, choice in tokens.items():
        row = wanted[token]
        if choice.source is not None:
            for name, (ids, held) in models.items():
                donors[name][row] = _given(choice.source, name, token, ids, held)
        if choice.force:
            for row_ids in rows_of.values():
                row_ids[row] = -1
    spare = np.ones(rows, dtype=bool)
    spare[list(wanted.values())] = False
    return Alignment(rows, rows_of, donors, spare)


def _given(source: Source, model: str, token: str, ids: Mapping[str, int], held: int) -> int:
    """Return the row that a model gives to a token whose embedding comes from a source; -1 where it gives none."""
    if source.kind == "mean" or (source.kind == "model" and source.model == model):
        return _row_of(token, ids, held)
    if source.kind == "model_token" and source.model == model:
        return _row_of(source.token, ids, held) if source.token is not None else int(source.token_id or 0)
    return -1


def _token_rows(wanted: Mapping[str, int], rows: int, ids: Mapping[str, int], held: int) -> Rows:
    """Return a model's row of each token, and of each row without a token."""
    row_ids = np.arange(rows)
    row_ids[min(rows, held) :] = -1
    taken = np.fromiter(ids.values(), np.int64, len(ids))
    row_ids[taken[taken < rows]] = -1  # a row with a token here is not the padding of a row without one there
    for token, row in wanted.items():
        row_ids[row] = _row_of(token, ids, held)
    return row_ids


def _row_of(token: str, ids: Mapping[str, int], held: int) -> int:
    """Return a token's row in a model; -1 where it has none, or its table ends before."""
    row = ids.get(token, -1)
    return row if row < held else -1


def _check(
    token: str,
    choice: TokenChoice,
    wanted: Mapping[str, int],
    models: Mapping[str, tuple[Mapping[str, int], int]],
) -> None:
    if token not in wanted:
        some = get_close_matches(token, wanted, n=5, cutoff=0.3) or sorted(wanted)[:5]  # all of them are too many
        raise unknown_name("token of `tokenizer.tokens`", token, some)
    source = choice.source
    if source is None or source.model is None:
        return
    if source.model not in models:
        raise unknown_name(f"model as source of the token '{token}'", source.model, models)
    ids, held = models[source.model]
    other = source.token if source.token is not None else token
    if source.token_id is not None:
        missing = source.token_id >= held and f"row {source.token_id} (it has {held})"
    else:
        missing = _row_of(other, ids, held) < 0 and f"token '{other}'"
    if missing:
        raise MergeflowError(f"`tokenizer.tokens`: '{token}' is to come from '{source.model}', which has no {missing}.")


def rows_wanted(choice: TokenizerChoice, needed: int, held: int) -> int:
    """Return the rows of a vocabulary that needs so many: the source's own where they suffice, or a rounded number."""
    multiple = choice.pad_to_multiple_of
    return max(needed, held) if multiple is None else ceil(needed / multiple) * multiple


@dataclass(frozen=True)
class Picked:
    """A table and which of its rows are taken."""

    entry: Entry
    rows: Rows


@dataclass(frozen=True)
class AlignedEntry:
    """A table in the rows of another vocabulary, formed when it is read.

    row i = direct[its row for i]; if it has none, (1/n) Σ over n donors of donor[its row for i]; without a donor 0

    A row that is no token's and that no model has is the mean of the tokens' rows: as a row of a head it is never the
    most likely one, which a row of zeros is where all other scores are negative.
    """

    direct: Picked  # the table, and the row of each token there
    donors: tuple[Picked, ...]  # tables of the models that give rows to tokens without a direct row
    width: int  # elements of a row
    dtype: DType
    spare: NDArray[np.bool_]  # which rows are no token's, [rows]

    def read(self, start: int, stop: int) -> Tensor:
        first, last = start // self.width, ceil(stop / self.width)
        out = torch.zeros(last - first, self.width, dtype=self.dtype.torch)
        rows = self.direct.rows[first:last]
        self._fill(out, self.direct.entry, rows)
        absent = rows < 0
        if absent.any():
            given = [np.where(absent, donor.rows[first:last], -1) for donor in self.donors]
            self._give(out, given)
            empty = absent & self.spare[first:last] & np.all([ids < 0 for ids in given], axis=0)
            if empty.any():
                out[empty] = self._mean.to(out.dtype)
        return out.reshape(-1)[start - first * self.width : stop - first * self.width]

    @cached_property
    def _mean(self) -> Tensor:
        """The mean of the tokens' rows, [width] in float64."""
        tokens = np.flatnonzero(~self.spare)
        total = torch.zeros(self.width, dtype=torch.float64)
        for part in np.array_split(tokens, ceil(len(tokens) / 4096)):
            start, stop = int(part[0]), int(part[-1]) + 1
            rows = self.read(start * self.width, stop * self.width).reshape(-1, self.width)
            total += rows[torch.from_numpy(part - start)].double().sum(0)
        return total / len(tokens)

    def _give(self, out: Tensor, given: list[Rows]) -> None:
        """Fill the rows that donors give: copied from a single one, the mean of several."""
        count = sum(((rows >= 0).astype(np.int64) for rows in given), np.zeros(len(out), np.int64))
        for donor, rows in zip(self.donors, given, strict=True):
            self._fill(out, donor.entry, np.where(count == 1, rows, -1))
        places = np.flatnonzero(count > 1)
        if len(places):
            wide = torch.float64 if self.dtype == FLOAT64 else torch.float32
            total = torch.zeros(len(places), self.width, dtype=wide)
            for donor, rows in zip(self.donors, given, strict=True):
                part = torch.zeros_like(total)
                self._fill(part, donor.entry, rows[places])
                total += part
            out[places] = (total / torch.from_numpy(count[places])[:, None]).to(self.dtype.torch)

    def _fill(self, out: Tensor, entry: Entry, rows: Rows) -> None:
        for begin, end in _runs(rows):
            row = int(rows[begin])
            piece = entry.read(row * self.width, (row + end - begin) * self.width)
            out[begin:end] = piece.reshape(-1, self.width).to(out.dtype)


def _runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield where runs of rows that follow each other begin and end; rows of -1 are left out."""
    if not len(rows):
        return
    breaks = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] < 0)) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    yield from ((begin, end) for begin, end in pairwise(edges) if rows[begin] >= 0)


States = Mapping[str, LazyStateDict]


def rows_of(state: LazyStateDict, architecture: Architecture, owner: str) -> int:
    """Return the number of rows that a model's tables of tokens have."""
    lengths = [
        info.shape[0]
        for name, info in state.infos.items()
        if len(info.shape) == 2 and architecture.role(name, info.shape) == "embedding"
    ]
    declared = [size for size in vocab_sizes(config_of(state)) if size in lengths]
    if not lengths:
        raise MergeflowError(
            f"'{owner}' ({state.path}) has no embeddings of tokens: `tokenizer` is for language models. Remove it."
        )
    return declared[0] if declared else max(lengths)


def token_axes(state: LazyStateDict, architecture: Architecture, rows: int) -> dict[str, int]:
    """Return the tensors with one row for each token (embeddings, heads and their biases), with the axis of the rows.

    An axis that is not the first has only axes of length 1 before it, as in `final_logits_bias` [1, V].
    """
    axes = {}
    for name, info in state.infos.items():
        if architecture.role(name, info.shape) in ("embedding", "head") and rows in info.shape:
            axis = info.shape.index(rows)
            if all(length == 1 for length in info.shape[:axis]):
                axes[name] = axis
    return axes


def aligned(
    name: str, states: States, axes: Mapping[str, int], held: Mapping[str, int], plan: Alignment
) -> LazyStateDict:
    """Return one model's state with its tables in the rows of the merged vocabulary.

    Args:
        axes: Of the base's `token_axes`.
        held: Rows of each model, the base among them.
    """
    state = states[name]
    entries, infos = dict(state.entries), dict(state.infos)
    for tensor, axis in axes.items():
        info = state.infos.get(tensor)
        if info is None or not _fits(info, states[BASE].infos[tensor], axis, held[name]):
            continue
        taken_from_base = name != BASE and state.entries[tensor] is states[BASE].entries[tensor]
        rows = BASE if taken_from_base else name
        if plan.is_identity(rows, info.shape[axis]):
            continue
        shape = tuple(plan.rows if at == axis else length for at, length in enumerate(info.shape))
        difference = state.is_task_vector and tensor not in state.absolute
        donors = () if difference else _donors(tensor, states, axis, held, plan)
        width = int(np.prod(info.shape[axis + 1 :], dtype=np.int64))
        picked = Picked(state.entries[tensor], plan.direct[rows])
        entries[tensor] = AlignedEntry(picked, donors, width, info.dtype, plan.spare)
        infos[tensor] = TensorInfo(shape, info.dtype)
    return view(state, entries=entries, infos=infos)


def _donors(tensor: str, states: States, axis: int, held: Mapping[str, int], plan: Alignment) -> tuple[Picked, ...]:
    """Return the models that give rows of a tensor to others; a difference from the base cannot."""
    base, donors = states[BASE].infos[tensor], []
    for name, state in states.items():
        whole = tensor in state and not (state.is_task_vector and tensor not in state.absolute)
        if whole and _fits(state.infos[tensor], base, axis, held[name]) and bool((plan.donors[name] >= 0).any()):
            donors.append(Picked(state.entries[tensor], plan.donors[name]))
    return tuple(donors)


def _fits(info: TensorInfo, base: TensorInfo, axis: int, held: int) -> bool:
    """Whether a tensor is the base's but for its number of rows."""
    return len(info.shape) == len(base.shape) and info.shape == (*base.shape[:axis], held, *base.shape[axis + 1 :])


# Pieces of an added token are found before the model is asked; a score this far below all others keeps it so.
_UNLIKELY = 10.0


def union(base: Vocabulary, others: Mapping[str, Vocabulary]) -> tuple[Vocabulary, list[str]]:
    """Return the union of tokenizers, and what is to be said of it.

    rows of the base's tokens: as they are;  a new token's row: the next, experts in order, each in order of its rows

    New merges of BPE come after all of the base's, new pieces of Unigram have their expert's score; text is normalised
    and cut up as the base does it. Added tokens become part of the model's vocabulary, which fixes their ids. Where no
    expert has more, the union is the base's own.
    """
    other = {name: words.kind for name, words in others.items() if words.kind != base.kind}
    if other:
        listed = ", ".join(f"'{name}' {kind}" for name, kind in other.items())
        raise MergeflowError(
            f"the tokenizer of the base is a {base.kind} model, others are not ({listed}): no tokenizer is the union "
            "of both. Choose `tokenizer_source: base` or an expert's name."
        )
    notes = [note for name, words in others.items() if (note := _cut_otherwise(name, base, words))]
    tokens = dict.fromkeys(token for words in others.values() for token in sorted(words.ids, key=words.ids.__getitem__))
    new = [token for token in tokens if token not in base.ids]
    ids = {**base.ids, **{token: base.rows + place for place, token in enumerate(new)}}
    added = _added(base, others, ids)
    if not new and len(added) == len(added_tokens(base.content)):
        return base, notes
    model = dict(base.content["model"])
    new_merges = _extend(model, ids, [base.content["model"], *(words.content["model"] for words in others.values())])
    if new_merges:
        notes.append(
            f"{new_merges} merges of experts' tokenizers come after the base's: text with their tokens may be cut up "
            "otherwise than either model has seen it"
        )
    return Vocabulary(base.folder, {**base.content, "added_tokens": added, "model": model}, ids), notes


def _added(base: Vocabulary, others: Mapping[str, Vocabulary], ids: Mapping[str, int]) -> list[dict[str, Any]]:
    added = {token["content"]: token for token in added_tokens(base.content)}
    for other in others.values():
        for token in added_tokens(other.content):
            added.setdefault(token["content"], {**token, "id": ids[token["content"]]})
    return sorted(added.values(), key=lambda token: int(token["id"]))


def _extend(model: dict[str, Any], ids: Mapping[str, int], models: Sequence[Mapping[str, Any]]) -> int:
    """Put all tokens, and what the model needs to find the new ones, into a tokenizer's model; return new merges."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: ids[token] for token in sorted(ids, key=ids.__getitem__)}
    else:
        scores = {piece: score for part in reversed(models) for piece, score in part["vocab"]}
        low = min((score for _, score in model["vocab"]), default=0.0) - _UNLIKELY
        before = len(model["vocab"])
        in_order = sorted(ids, key=ids.__getitem__)
        if [ids[token] for token in in_order] != list(range(len(ids))):
            raise MergeflowError(
                "the base's tokenizer leaves rows without a token between others, which a Unigram model cannot: save "
                "it again with its library, or choose `tokenizer_source: base`."
            )
        model["vocab"] = [*model["vocab"], *([token, scores.get(token, low)] for token in in_order[before:])]
    if "merges" not in model:
        return 0
    merges = {_pair(merge) for merge in model["merges"]}
    new = dict.fromkeys(_pair(merge) for part in models[1:] for merge in part["merges"] if _pair(merge) not in merges)
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
    model["merges"] = [*model["merges"], *(" ".join(pair) if as_text else list(pair) for pair in new)]
    return len(new)


def _pair(merge: Any) -> tuple[str, ...]:
    """Return a merge as two tokens; older files write them as one text."""
    return tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)


def _cut_otherwise(name: str, base: Vocabulary, other: Vocabulary) -> str | None:
    parts = cut_otherwise(base, other, aligned=True)
    listed = ", ".join(parts)
    return f"the tokenizer of '{name}' has another {listed} than the base's, which the union has" if parts else None


@dataclass(frozen=True)
class Fitted:
    """Models of one vocabulary."""

    base: LazyStateDict
    experts: dict[str, LazyStateDict]
    files: TokenizerFiles  # what the result's folder holds for it
    notes: tuple[str, ...]  # what was done, a sentence each


def fit_vocabularies(choice: TokenizerChoice, base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> Fitted:
    """Bring all models to one vocabulary, token by token; an adapter without a tokenizer has the base's."""
    states = {BASE: base, **experts}
    vocabularies = _read(states)
    source, result, notes = _result(choice, vocabularies)
    result = _with_new_tokens(result, choice)
    architecture = architecture_of(base)
    held = {BASE: rows_of(base, architecture, BASE)}
    axes = token_axes(base, architecture, held[BASE])
    for name, state in experts.items():
        listed = [state.infos[tensor].shape[axis] for tensor, axis in axes.items() if tensor in state]
        held[name] = rows_of(state, architecture, name) if not state.is_task_vector else max(listed, default=held[BASE])
    rows = rows_wanted(choice, result.rows, held[BASE if choice.source == UNION else choice.source])
    models = {name: (words.ids, held[name]) for name, words in vocabularies.items()}
    plan = align(result.ids, rows, models, dict(choice.tokens))
    changed = {name: aligned(name, states, axes, held, plan) for name in states}
    moved = frozenset(tensor for tensor in axes if changed[BASE].entries[tensor] is not base.entries[tensor])
    return Fitted(
        changed.pop(BASE),
        changed,
        TokenizerFiles(result, vocabularies[BASE], source, (rows, held[BASE]), moved),
        (*_notes_on(choice, result, plan, vocabularies, held), *notes),
    )


def _read(states: States) -> dict[str, Vocabulary]:
    """Read the tokenizer of each model."""
    vocabularies: dict[str, Vocabulary] = {}

    def read(name: str, state: LazyStateDict) -> None:
        folder = folder_of(state)
        if state.is_task_vector and (folder is None or not (folder / TOKENIZER).is_file()):
            return
        vocabularies[name] = read_vocabulary(folder, name, state.path)

    together(*(partial(read, name, state) for name, state in states.items()))
    return {name: vocabularies.get(name, vocabularies[BASE]) for name in states}


def _result(
    choice: TokenizerChoice, vocabularies: Mapping[str, Vocabulary]
) -> tuple[Vocabulary, Vocabulary, list[str]]:
    """Return the vocabulary whose files are copied, the merged one, and notes."""
    base = vocabularies[BASE]
    if choice.source == UNION:
        result, notes = union(base, {name: words for name, words in vocabularies.items() if name != BASE})
        return base, result, notes
    if choice.source not in vocabularies:
        raise unknown_name("source of the tokenizer", choice.source, (UNION, *vocabularies))
    return vocabularies[choice.source], vocabularies[choice.source], []


def _with_new_tokens(vocabulary: Vocabulary, choice: TokenizerChoice) -> Vocabulary:
    """Return a vocabulary with the tokens that the recipe adds to it."""
    new = [token for token, row in choice.tokens if row.new and token not in vocabulary.ids]
    if not new:
        return vocabulary
    ids = {token: vocabulary.rows + place for place, token in enumerate(new)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
    added = [{"id": row, "content": token, **plain} for token, row in ids.items()]
    content = {**vocabulary.content, "added_tokens": [*added_tokens(vocabulary.content), *added]}
    return union(vocabulary, {"recipe": Vocabulary(vocabulary.folder, content, {**vocabulary.ids, **ids})})[0]


def _notes_on(
    choice: TokenizerChoice,
    result: Vocabulary,
    plan: Alignment,
    vocabularies: Mapping[str, Vocabulary],
    held: Mapping[str, int],
) -> list[str]:
    kind = "the union" if choice.source == UNION else f"that of '{choice.source}'"
    notes = [f"vocabulary: {kind}, {len(result.ids)} tokens in {plan.rows} rows; the base has {held[BASE]} rows"]
    for name, words in vocabularies.items():
        lacking = [token for token, row in result.ids.items() if words.ids.get(token, held[name]) >= held[name]]
        dropped = sum(token not in result.ids for token in words.ids)
        if lacking:
            some = ", ".join(f"'{token}'" for token in lacking[:3]) + ", …" * (len(lacking) > 3)
            notes.append(f"'{name}' lacks {len(lacking)} of its tokens ({some}): their embeddings there are others'")
        if dropped:
            notes.append(f"{dropped} of the {len(words.ids)} tokens of '{name}' are not in it and are left out")
        moved = sum(result.ids[token] != row for token, row in words.ids.items() if token in result.ids)
        if moved:
            notes.append(f"{moved} tokens of '{name}' are in other rows there and are aligned")
    return notes
