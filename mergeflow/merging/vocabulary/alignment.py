"""Which row of each model a row of the merged vocabulary is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING

from mergeflow.errors import MergeflowError, together, unknown_name
from mergeflow.late import np
from mergeflow.merging.vocabulary.choice import BASE, Source, TokenChoice, TokenizerChoice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Alignment:
    """Rows of the models' tables in the order of the merged vocabulary; -1 where there is none.

    Attributes:
        rows: Number of rows of the merged vocabulary.
        own: Of each model, the row of each token; -1 where it lacks the token, or must take it from elsewhere.
        donors: Of each model, the rows that it gives to those without an own one.
        spare: Which rows are no token's, [rows].
    """

    rows: int
    own: Mapping[str, Rows]
    donors: Mapping[str, Rows]
    spare: NDArray[np.bool_]

    def is_identity(self, model: str, rows: int) -> bool:
        """Whether a model's table of so many rows stays as it is."""
        return rows == self.rows and bool((self.own[model] == np.arange(rows)).all())


def align(
    wanted: Mapping[str, int],
    rows: int,
    models: Mapping[str, tuple[Mapping[str, int], int]],
    tokens: Mapping[str, TokenChoice],
) -> Alignment:
    """Find the rows of all models for a vocabulary.

    A row without a token (a padded vocabulary has them) is the same row of the models where it has none either. A model
    that lacks a token takes the base's row, or the only model's that has it, or the mean of all that have it.

    Args:
        wanted: The merged vocabulary: row of each token.
        rows: Its number of rows.
        models: Of each model, the base among them: row of each token, and its number of rows.
        tokens: What the recipe says of single tokens.

    Raises:
        MergeflowError: The recipe speaks of unknown tokens or models; all of it.
    """
    own = {name: _own(wanted, rows, ids, held) for name, (ids, held) in models.items()}
    lacking = own[BASE] < 0
    donors = {name: found.copy() if name == BASE else np.where(lacking, found, -1) for name, found in own.items()}
    together(*(partial(_check, token, choice, wanted, models) for token, choice in tokens.items()))
    for token, choice in tokens.items():
        row = wanted[token]
        if choice.source is not None:
            for name, (ids, held) in models.items():
                donors[name][row] = _given(choice.source, name, token, ids, held)
        if choice.force:
            for found in own.values():
                found[row] = -1
    spare = np.ones(rows, dtype=bool)
    spare[list(wanted.values())] = False
    return Alignment(rows, own, donors, spare)


def _given(source: Source, model: str, token: str, ids: Mapping[str, int], held: int) -> int:
    """Return the row that a model gives to a token whose embedding comes from a source; -1 where it gives none."""
    if source.kind == "mean" or (source.kind == "model" and source.model == model):
        return _own_row(token, ids, held)
    if source.kind == "model_token" and source.model == model:
        return _own_row(source.token, ids, held) if source.token is not None else int(source.token_id or 0)
    return -1


def _own(wanted: Mapping[str, int], rows: int, ids: Mapping[str, int], held: int) -> Rows:
    """Return a model's row of each token, and of each row without a token."""
    found = np.arange(rows)
    found[min(rows, held) :] = -1
    taken = np.fromiter(ids.values(), np.int64, len(ids))
    found[taken[taken < rows]] = -1  # a row with a token here is not the padding of a row without one there
    for token, row in wanted.items():
        found[row] = _own_row(token, ids, held)
    return found


def _own_row(token: str, ids: Mapping[str, int], held: int) -> int:
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
        raise unknown_name("token of `tokenizer.tokens`", token, _near(token, wanted))
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
        missing = _own_row(other, ids, held) < 0 and f"token '{other}'"
    if missing:
        raise MergeflowError(f"`tokenizer.tokens`: '{token}' is to come from '{source.model}', which has no {missing}.")


def _near(token: str, wanted: Mapping[str, int]) -> list[str]:
    """Return some tokens, the nearest among them: a vocabulary is too long to be listed."""
    return get_close_matches(token, wanted, n=5, cutoff=0.3) or sorted(wanted)[:5]


def rows_wanted(choice: TokenizerChoice, needed: int, held: int) -> int:
    """Return the number of rows of the merged vocabulary: the source's own where they suffice, or a rounded number.

    Args:
        choice: The recipe's `tokenizer`.
        needed: One more than the largest id of the merged vocabulary.
        held: Rows of the tables that the vocabulary is taken from.
    """
    if choice.pad_to_multiple_of is None:
        return max(needed, held)
    return -(-needed // choice.pad_to_multiple_of) * choice.pad_to_multiple_of
