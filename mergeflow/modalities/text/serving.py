"""Serve a registered text model: a text or two in, a label and probabilities out."""

import json
import math
from collections.abc import Mapping
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.modalities.served import Columns, Loaded, Served
from mergeflow.modalities.serving import classify
from mergeflow.modalities.text.modality import TokenBatch, stack
from mergeflow.modalities.text.tokenizer import PAIRS, Encoded, TextTokenizer


def _answer(loaded: Loaded, columns: Columns) -> dict[str, list[Any]]:
    settings, transforms = loaded.decoding, json.loads(loaded.record.get("transforms", "{}"))
    tokenizer = TextTokenizer(loaded.record["tokenizer"], settings["pad"], settings["segments"], settings["max_length"])

    def read(row: Mapping[str, Any]) -> Encoded:
        text, pair = row["text"], row["text_pair"]
        if isinstance(pair, float) and math.isnan(pair):  # how a table says that a cell is empty
            pair = None
        if not isinstance(text, str) or not isinstance(pair, str | None):
            wrong = text if not isinstance(text, str) else pair
            raise MergeflowError(f"its text is of the type {type(wrong).__name__}; expected a text.")
        _check_number(row["task"], PAIRS in transforms.get(row["task"], ()), pair)
        return tokenizer.encode(text, pair)

    def batch(rows: list[Encoded]) -> TokenBatch:
        segments = [row.segments for row in rows] if tokenizer.segments else None
        return stack([row.ids for row in rows], segments, tokenizer.pad)[:]

    return classify(loaded, columns, ["text"], read, batch, optional=["text_pair", "task"])


def _check_number(task: str, paired: bool, pair: str | None) -> None:
    if paired and pair is None:
        raise MergeflowError(f"task '{task}' is about two texts, but text_pair is missing; give both.")
    if pair is not None and not paired:
        raise MergeflowError(f"task '{task}' is about one text, but a text_pair is given; leave it out.")


SERVED = Served(
    inputs=lambda decoding: {"text": "text", "text_pair": "optional text"},
    outputs={"label": "text", "probabilities": "shares"},
    example=lambda decoding: {"text": "a text"} | ({"text_pair": "another"} if PAIRS in decoding["transforms"] else {}),
    answer=_answer,
    packages=("transformers", "tokenizers"),
)
