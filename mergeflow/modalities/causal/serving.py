"""Serve a registered causal model: a text in, its continuation out."""

from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION
from mergeflow.modalities.causal.generation import continued
from mergeflow.modalities.causal.model import LanguageModule
from mergeflow.modalities.causal.sections import ModelSection
from mergeflow.modalities.causal.tokenizer import CausalTokenizer
from mergeflow.modalities.served import Columns, Loaded, Served
from mergeflow.modalities.serving import check_columns, read_rows


def _answer(loaded: Loaded, columns: Columns) -> dict[str, list[Any]]:
    check_columns(columns, ["text", "task"])
    tokenizer = CausalTokenizer.of_record(loaded.record)
    how = ModelSection.model_validate_json(loaded.record[SECTION]).generation
    module = loaded.model.module
    assert isinstance(module, LanguageModule)
    room = module.positions - len(tokenizer.begun([]))
    prompts, _ = read_rows(
        loaded.heads, columns, ["text"], lambda row: _prompt(row["text"], tokenizer, room), "answered"
    )
    written = continued(module, list(map(tokenizer.begun, prompts)), how, tokenizer.end)
    return {"continuation": list(map(tokenizer.decode_further, prompts, written))}


def _prompt(text: Any, tokenizer: CausalTokenizer, room: int) -> list[int]:
    if not isinstance(text, str):
        raise MergeflowError(f"its text is of the type {type(text).__name__}; expected a text.")
    ids = tokenizer.encode(text)
    if not text.strip() or not ids:
        raise MergeflowError("its text is empty: give it some words.")
    if len(ids) >= room:
        raise MergeflowError(f"its text has {len(ids)} tokens; the model takes at most {room - 1}: shorten it.")
    return ids


SERVED = Served(
    inputs=lambda decoding: {"text": "text"},
    outputs={"continuation": "text"},
    example=lambda decoding: {"text": "a text"},
    answer=_answer,
    packages=("transformers", "tokenizers"),
    rows=1,
)
