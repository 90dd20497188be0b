"""From a row of texts to what is stored of it: the tokens, once and for all, and the texts as they were."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mergeflow.data.decoding import Decoded, Decoding
from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.tokenizer import TextTokenizer


def text_decoding(tokenizer: TextTokenizer) -> Decoding:
    """Return how rows become arrays.

    These are `ids` (int32 [N, L], the tokens and padding behind them), `lengths` (int32 [N]), where the encoder takes
    them `segments` (uint8 [N, L]), and `labels` (int64 [N]) of classes or `targets` (float64 [N]).
    """

    def decode(example: Example, where: str) -> Decoded:
        row: Mapping[str, Any] = example.read()
        try:
            return _decoded(row, example.label, tokenizer)
        except MergeflowError as error:
            raise MergeflowError(f"{where} ('{example.path}'): {error}") from None

    size = tokenizer.max_length * (5 if tokenizer.segments else 4) + 12
    return Decoding(tokenizer.settings, decode, text_schema, size)


def _decoded(row: Mapping[str, Any], label: int, tokenizer: TextTokenizer) -> Decoded:
    text, pair = row["text"], row.get("text_pair")
    encoding = tokenizer.encode(text, pair)
    ids = np.full(tokenizer.max_length, tokenizer.pad, np.int32)
    ids[: len(encoding.ids)] = encoding.ids
    arrays = {"ids": ids, "lengths": np.asarray(len(encoding.ids), np.int32)}
    if tokenizer.segments:
        segments = arrays["segments"] = np.zeros(tokenizer.max_length, np.uint8)
        segments[: len(encoding.segments)] = encoding.segments
    score = row.get("score")
    arrays |= {"labels": np.asarray(label, np.int64)} if score is None else {"targets": np.asarray(score, np.float64)}
    digest = hashlib.sha256(json.dumps([text, pair]).encode()).digest()
    cells = {"text": text, "text_pair": pair, "label": label if score is None else score}
    note = f"more than {tokenizer.max_length} tokens; what is beyond was cut" if encoding.cut else ""
    return Decoded(arrays, digest, cells, len(text) + len(pair or ""), note)


def text_schema(class_names: Sequence[str] | None) -> pa.Schema:
    """Return the schema that `datasets` reads back as texts with a ClassLabel, or with a number.

    Example:
        >>> text_schema(None).field("label").type
        DataType(double)
    """
    texts = {name: {"dtype": "string", "_type": "Value"} for name in ("text", "text_pair")}
    plain = {"dtype": "float64", "_type": "Value"}
    label = plain if class_names is None else {"names": list(class_names), "_type": "ClassLabel"}
    metadata = json.dumps({"info": {"features": {**texts, "label": label}}}, ensure_ascii=False)
    kind = pa.float64() if class_names is None else pa.int64()
    fields = [("text", pa.string()), ("text_pair", pa.string()), ("label", kind)]
    return pa.schema(fields, metadata={b"huggingface": metadata.encode()})
