"""From a piece of a text, or a question with choices, to what is stored of it: the tokens, and the text as it was."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mergeflow.data.decoding import Decoded, Decoding
from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.sources.texts import PIECE
from mergeflow.modalities.causal.tokenizer import CausalTokenizer

ROW = PIECE + 16  # tokens of a piece; some tokenizers begin a text with one of their own
CHOICES = 16


def causal_decoding(tokenizer: CausalTokenizer, block: int) -> Decoding:
    """Return how examples become arrays.

    A piece of a text: `ids` (int32 [N, 528], the end token behind the piece's), `lengths` (int32 [N]), `documents` and
    `places` (int64 [N], which document, and which of its pieces).
    A question: `ids` (int32 [N, 2 · block], the question's tokens and then those of each choice), `ends`
    (int32 [N, 17], where the question and each choice end), `answers` (int64 [N]).
    """

    def decode(example: Example, where: str) -> Decoded:
        content: Mapping[str, Any] = example.read()
        try:
            if "choices" in content:
                return _decoded_question(content, tokenizer, block)
            return _decoded_piece(content, tokenizer)
        except MergeflowError as error:
            raise MergeflowError(f"{where} ('{example.path}'): {error}") from None

    settings = {"tokenizer": tokenizer.digest, "block": block, "end": tokenizer.end}
    return Decoding(settings, decode, causal_schema, 4 * max(ROW, 2 * block) + 80)


def _decoded_piece(content: Mapping[str, Any], tokenizer: CausalTokenizer) -> Decoded:
    text = content["text"]
    ids = tokenizer.encode_further(text) if content["place"] else tokenizer.encode(text)
    if len(ids) >= ROW:  # one place is for the token that ends a document
        raise MergeflowError(
            f"{len(ids)} tokens for a piece of {len(text.encode())} bytes; expected less than {ROW}. Choose a "
            "tokenizer that takes texts as they are."
        )
    arrays = {
        "ids": _filled(ids, ROW, tokenizer.end),
        "lengths": np.asarray(len(ids), np.int32),
        "documents": np.asarray(content["document"], np.int64),
        "places": np.asarray(content["place"], np.int64),
    }
    cells = {"text": text, "choices": None, "answer": None, "document": content["document"]}
    return Decoded(arrays, hashlib.sha256(text.encode()).digest(), cells, len(text))


def _decoded_question(content: Mapping[str, Any], tokenizer: CausalTokenizer, block: int) -> Decoded:
    text, choices, answer = content["text"], list(content["choices"]), content["answer"]
    _check_question(text, choices, answer)
    asked, answers = _asked_and_told(text, choices, tokenizer)
    longest, together = len(asked) + max(map(len, answers)), len(asked) + sum(map(len, answers))
    if not asked or longest > block or together > 2 * block:
        raise MergeflowError(
            f"{longest} tokens with its longest choice and {together} with all; expected at least one of the question, "
            f"at most data.block = {block} and 2 · {block}. Nothing of a question is cut: raise data.block."
        )
    ends = np.cumsum([len(asked), *map(len, answers)])
    arrays = {
        "ids": _filled([*asked, *(token for answer in answers for token in answer)], 2 * block, tokenizer.end),
        "ends": np.concatenate([ends, np.full(CHOICES + 1 - len(ends), ends[-1])]).astype(np.int32),
        "answers": np.asarray(answer, np.int64),
    }
    digest = hashlib.sha256(json.dumps([text, choices]).encode()).digest()
    cells = {"text": text, "choices": choices, "answer": answer, "document": None}
    return Decoded(arrays, digest, cells, len(text) + sum(map(len, choices)))


def _check_question(text: str, choices: Sequence[str], answer: int) -> None:
    if not text.strip() or not all(choice.strip() for choice in choices):
        raise MergeflowError("its question or one of its choices is empty: give it some words, or remove the row.")
    if not 2 <= len(choices) <= CHOICES:
        raise MergeflowError(f"{len(choices)} choices found; expected 2 to {CHOICES}.")
    if not 0 <= answer < len(choices):
        raise MergeflowError(f"its answer is {answer}; expected the number of a choice, 0 to {len(choices) - 1}.")


def _asked_and_told(text: str, choices: Sequence[str], tokenizer: CausalTokenizer) -> tuple[list[int], list[list[int]]]:
    """Return a question's tokens, and those of each choice behind them: together they are the tokens of both texts.

    A token that holds the question's end and a choice's beginning, as of a blank and the word behind it, is the
    choice's.
    """
    asked = tokenizer.encode(text)
    wholes = [tokenizer.encode(_joined(text, choice)) for choice in choices]
    if short := [choice for choice, whole in zip(choices, wholes, strict=True) if whole == asked[: len(whole)]]:
        raise MergeflowError(
            f"the choice '{short[0]}' adds no token to its question: write the question's end otherwise."
        )
    alike = [len(set(tokens)) == 1 for tokens in zip(asked, *wholes, strict=False)]
    shared = [*alike, False].index(False)
    return asked[:shared], [whole[shared:] for whole in wholes]


def _joined(text: str, choice: str) -> str:
    return text + choice if choice[0].isspace() or text[-1].isspace() else f"{text} {choice}"


def _filled(ids: Sequence[int], size: int, end: int) -> np.ndarray:
    row = np.full(size, end, np.int32)
    row[: len(ids)] = ids
    return row


def causal_schema(class_names: Sequence[str] | None) -> pa.Schema:
    """Return the schema of both kinds of example; the columns of the other kind are empty.

    Example:
        >>> causal_schema(None).names
        ['text', 'choices', 'answer', 'document']
    """
    fields = [
        ("text", pa.string()),
        ("choices", pa.list_(pa.string())),
        ("answer", pa.int64()),
        ("document", pa.int64()),
    ]
    return pa.schema(fields)
