"""What a registered causal model takes and answers: a text in, its continuation out."""

from collections.abc import Mapping
from typing import Any

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.causal.generation import continued
from mergeflow.modalities.causal.model import LanguageModule
from mergeflow.modalities.causal.sections import ModelSection
from mergeflow.modalities.causal.tokenizer import CausalTokenizer
from mergeflow.modalities.recorded import SECTION
from mergeflow.modalities.served import Columns, Served
from mergeflow.modalities.serving import Loaded

_ROWS_NAMED = 10


def _answer(loaded: Loaded, columns: Columns) -> dict[str, list[Any]]:
    missing = [name for name in ("text", "task") if name not in columns]
    if missing:
        raise MergeflowError(f"the input lacks the column(s) {', '.join(missing)}; expected text, task.")
    tokenizer = CausalTokenizer(loaded.record["tokenizer"], int(loaded.record["end"]))
    how = ModelSection.model_validate_json(loaded.record[SECTION]).generation
    prompts, wrong = [], []
    for row, (text, task) in enumerate(zip(columns["text"], columns["task"], strict=True)):
        try:
            prompts.append(_prompt(text, task, loaded.heads, tokenizer))
        except MergeflowError as error:
            wrong.append(f"row {row}: {error}")
    if wrong:
        more = f" And {len(wrong) - _ROWS_NAMED} more." if len(wrong) > _ROWS_NAMED else ""
        told = " ".join(wrong[:_ROWS_NAMED])
        raise MergeflowError(f"{len(wrong)} of {len(columns['text'])} rows cannot be answered. {told}{more}")
    module = loaded.model.module
    assert isinstance(module, LanguageModule)
    return {"continuation": [tokenizer.decode(ids) for ids in continued(module, prompts, how, tokenizer.end)]}


def _prompt(text: Any, task: Any, tasks: Mapping[str, Any], tokenizer: CausalTokenizer) -> list[int]:
    if not isinstance(task, str) or task not in tasks:
        raise unknown_name("task", str(task), tasks)
    if not isinstance(text, str):
        raise MergeflowError(f"{text!r} is of the type {type(text).__name__}; expected a text.")
    ids = tokenizer.encode(text)
    if not text.strip() or not ids:
        raise MergeflowError("its text is empty: give it some words.")
    return ids


SERVED = Served(
    inputs=lambda decoding: {"text": "text"},
    outputs={"continuation": "text"},
    example=lambda decoding: {"text": "a text"},
    answer=_answer,
    packages=("transformers", "tokenizers"),
)
