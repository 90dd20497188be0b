"""Models of different vocabularies, brought to one vocabulary before their files are merged."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from mergeflow.checkpoints.folders import folder_of
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import together, unknown_name
from mergeflow.merging.architectures.architecture import architecture_of
from mergeflow.merging.vocabulary.alignment import Alignment, align, rows_wanted
from mergeflow.merging.vocabulary.choice import BASE, UNION, TokenizerChoice
from mergeflow.merging.vocabulary.companions import TokenizerFiles
from mergeflow.merging.vocabulary.tables import States, aligned, rows_of, token_axes
from mergeflow.merging.vocabulary.tokens import TOKENIZER, Vocabulary, read_vocabulary
from mergeflow.merging.vocabulary.union import union


@dataclass(frozen=True)
class Fitted:
    """Models of one vocabulary.

    Attributes:
        base: The base.
        experts: The experts by name.
        files: What the result's folder holds for it.
        notes: What was done, a sentence each.
    """

    base: LazyStateDict
    experts: dict[str, LazyStateDict]
    files: TokenizerFiles
    notes: tuple[str, ...]


def fit_vocabularies(choice: TokenizerChoice, base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> Fitted:
    """Bring the embeddings and heads of all models to one vocabulary, token by token.

    Args:
        choice: Which vocabulary, and what single tokens' embeddings are.
        base: The base.
        experts: The experts by name; an adapter without a tokenizer has the base's.

    Raises:
        MergeflowError: Models without a readable tokenizer.json (all at once), tokenizers that have no union, or tokens
            and models of the recipe that are not there.
    """
    states = {BASE: base, **experts}
    vocabularies = _read(states)
    source, result, notes = _result(choice, vocabularies)
    architecture = architecture_of(base)
    held = {BASE: rows_of(base, architecture, BASE)}
    axes = token_axes(base, architecture, held[BASE])
    for name, state in experts.items():
        listed = [state.infos[tensor].shape[axis] for tensor, axis in axes.items() if tensor in state]
        held[name] = rows_of(state, architecture, name) if not state.is_task_vector else max(listed, default=held[BASE])
    rows = rows_wanted(choice, result.rows, held[BASE if choice.source == UNION else choice.source])
    models = {name: (one.ids, held[name]) for name, one in vocabularies.items()}
    plan = align(result.ids, rows, models, dict(choice.tokens))
    changed = {name: aligned(name, states, axes, held, plan) for name in states}
    moved = frozenset(tensor for tensor in axes if changed[BASE].entries[tensor] is not base.entries[tensor])
    return Fitted(
        changed.pop(BASE),
        changed,
        TokenizerFiles(result, vocabularies[BASE], source, (rows, held[BASE]), moved),
        (*_told(choice, result, plan, vocabularies, held), *notes),
    )


def _read(states: States) -> dict[str, Vocabulary]:
    """Read the tokenizer of each model."""
    found: dict[str, Vocabulary] = {}

    def read(name: str, state: LazyStateDict) -> None:
        folder = folder_of(state)
        if state.is_task_vector and (folder is None or not (folder / TOKENIZER).is_file()):
            return
        found[name] = read_vocabulary(folder, name, state.path)

    together(*(partial(read, name, state) for name, state in states.items()))
    return {name: found.get(name, found[BASE]) for name in states}


def _result(
    choice: TokenizerChoice, vocabularies: Mapping[str, Vocabulary]
) -> tuple[Vocabulary, Vocabulary, list[str]]:
    """Return the vocabulary whose files are copied, the merged one, and notes."""
    base = vocabularies[BASE]
    if choice.source == UNION:
        result, notes = union(base, {name: one for name, one in vocabularies.items() if name != BASE})
        return base, result, notes
    if choice.source not in vocabularies:
        raise unknown_name("source of the tokenizer", choice.source, (UNION, *vocabularies))
    return vocabularies[choice.source], vocabularies[choice.source], []


def _told(
    choice: TokenizerChoice,
    result: Vocabulary,
    plan: Alignment,
    vocabularies: Mapping[str, Vocabulary],
    held: Mapping[str, int],
) -> list[str]:
    kind = "the union" if choice.source == UNION else f"that of '{choice.source}'"
    notes = [f"vocabulary: {kind}, {len(result.ids)} tokens in {plan.rows} rows; the base has {held[BASE]} rows"]
    for name, one in vocabularies.items():
        lacking = [token for token, row in result.ids.items() if one.ids.get(token, held[name]) >= held[name]]
        dropped = sum(token not in result.ids for token in one.ids)
        if lacking:
            some = ", ".join(f"'{token}'" for token in lacking[:3]) + ", …" * (len(lacking) > 3)
            notes.append(f"'{name}' lacks {len(lacking)} of its tokens ({some}): their embeddings there are others'")
        if dropped:
            notes.append(f"{dropped} of the {len(one.ids)} tokens of '{name}' are not in it and are left out")
        moved = sum(result.ids[token] != row for token, row in one.ids.items() if token in result.ids)
        if moved:
            notes.append(f"{moved} tokens of '{name}' stand in other rows there and are aligned")
    return notes
