"""How texts and questions are prepared: every kind of source, and tokens."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mergeflow.data.address import Maker, Opener, checked_columns, drawn_by, rooted
from mergeflow.data.arrays import quoted
from mergeflow.data.decoding import Decoded, Decoding, Preparation
from mergeflow.data.locations import Location, decoded, split_of
from mergeflow.data.task import Example, RawTask, Transform
from mergeflow.data.transforms import LABEL_TRANSFORMS
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.sections import DataSection
from mergeflow.modalities.causal.tokenizer import CausalTokenizer, load_tokenizer
from mergeflow.modalities.tables import lines_table, open_hub, open_rows, parquet_table, without_test

# Every tokenizer gives at most one token a byte, or a few more; a longer piece would waste less of its row, but hold
# more of a text together that is left out as a copy of another split's.
PIECE = 512
# Pieces that go to one split together where a split is carved: what is held out is a whole passage of about 8 KiB.
SECTION = 16


def pieces(text: str, limit: int = PIECE) -> Iterator[str]:
    """Cut a text before white space, so that a tokenizer which puts it before a word gives the whole text's tokens.

    A piece has at most `limit` bytes in UTF-8, at least 4.

    Example:
        >>> list(pieces("one two three", 8))
        ['one two', ' three']
    """
    start = 0
    while start < len(text):
        end = start + len(text[start : start + limit].encode()[:limit].decode(errors="ignore"))
        if end < len(text):
            spaces = (at for at in range(end, start, -1) if text[at].isspace() and not text[at - 1].isspace())
            end = next(spaces, end)
        yield text[start:end]
        start = end


# (name, text) of each document of a split, in the same order each time.
Documents = Callable[[], Iterator[tuple[str, str]]]


# A task without classes is judged by a correlation unless it says otherwise; scores here are shares of right answers.
ACCURACY = Transform("metric=accuracy", None)


def text_task(task: str, splits: Mapping[str, Documents], seed: int) -> RawTask:
    """Make a task of documents."""
    examples = {split: partial(_examples, documents) for split, documents in splits.items()}
    return RawTask(task, None, None, examples, seed=seed, transforms=(ACCURACY,))


def _examples(documents: Documents) -> Iterator[Example]:
    """Yield the pieces of documents; a section of a document has one path, so that it stays together when carved."""
    for number, (name, text) in enumerate(documents()):
        if not text.strip():
            raise MergeflowError(f"{name} is empty: give it some words, or remove it.")
        parts = list(pieces(checked(text, name)))
        starts = list(accumulate(map(len, parts), initial=0))
        for place, piece in enumerate(parts):
            section = place // SECTION
            if place % SECTION == 0:  # one more piece on both sides: there a tokenizer falls into step with the whole
                first = starts[max(place - 1, 0)]
                around = text[first : starts[min(place + SECTION + 1, len(parts))]]
            within = {"around": around, "at": starts[place] - first}
            yield Example({"text": piece, "document": number, "place": place, **within}, f"{name}#{section}")


def checked(text: str, name: str) -> str:
    """Return a text that UTF-8 can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MergeflowError(
            f"{name} has the character {text[error.start]!r} at {error.start}, half of a pair that UTF-8 cannot write: "
            "remove it."
        ) from None
    return text


ROW = PIECE + 16  # tokens of a piece; some tokenizers begin a text with one of their own
MOST_CHOICES = 16


def causal_decoding(tokenizer: CausalTokenizer, block: int) -> Decoding:
    """Return how examples become arrays.

    A piece of a text, its part of the whole text's tokens: `ids` (int32 [N, 528], the end token behind the piece's),
    `lengths` (int32 [N]), `documents` and `places` (int64 [N], which document, and which of its pieces).
    A question: `ids` (int32 [N, 2 · block], the question's tokens and then those of each choice), `ends`
    (int32 [N, 17], where the question and each choice end), `answers` (int64 [N]).
    """
    encode = lru_cache(maxsize=16)(tokenizer.encode_with_starts)

    def decode(example: Example, where: str) -> Decoded:
        content: Mapping[str, Any] = example.read()
        try:
            if "choices" in content:
                return _decoded_question(content, tokenizer, block)
            return _decoded_piece(content, encode(content["around"]), tokenizer.end)
        except MergeflowError as error:
            raise MergeflowError(f"{where} ('{example.path}'): {error}") from None

    settings = {"tokenizer": tokenizer.digest, "block": block, "end": tokenizer.end}
    settings |= {} if tokenizer.prefix is None else {"start": tokenizer.prefix}
    return Decoding(settings, decode, causal_schema, 4 * max(ROW, 2 * block) + 80)


def _decoded_piece(content: Mapping[str, Any], encoded: tuple[list[int], np.ndarray], end: int) -> Decoded:
    text, at, (ids, starts) = content["text"], content["at"], encoded
    first, last = np.searchsorted(starts, [at, at + len(text)])
    ids = ids[first : None if at + len(text) == len(content["around"]) else last]
    if len(ids) >= ROW:  # one place is for the token that ends a document
        raise MergeflowError(
            f"{len(ids)} tokens for a piece of {len(text.encode())} bytes; expected less than {ROW}. Choose a "
            "tokenizer that takes texts as they are."
        )
    arrays = {
        "ids": _filled(ids, ROW, end),
        "lengths": np.asarray(len(ids), np.int32),
        "documents": np.asarray(content["document"], np.int64),
        "places": np.asarray(content["place"], np.int64),
    }
    cells = {"text": text, "choices": None, "answer": None, "document": content["document"]}
    return Decoded(arrays, hashlib.sha256(text.encode()).digest(), cells, len(text))


def _decoded_question(content: Mapping[str, Any], tokenizer: CausalTokenizer, block: int) -> Decoded:
    text, choices, answer = content["text"], list(content["choices"]), content["answer"]
    _check_question(text, choices, answer)
    asked, answers = _tokens_of(text, choices, tokenizer)
    longest, together = len(tokenizer.begun(asked)) + max(map(len, answers)), len(asked) + sum(map(len, answers))
    if not asked or longest > block or together > 2 * block:
        raise MergeflowError(
            f"{longest} tokens with its longest choice and {together} with all; expected at least one of the question, "
            f"at most data.block = {block} and 2 · {block}. Nothing of a question is cut: raise data.block."
        )
    ends = np.cumsum([len(asked), *map(len, answers)])
    arrays = {
        "ids": _filled([*asked, *(token for answer in answers for token in answer)], 2 * block, tokenizer.end),
        "ends": np.concatenate([ends, np.full(MOST_CHOICES + 1 - len(ends), ends[-1])]).astype(np.int32),
        "answers": np.asarray(answer, np.int64),
    }
    digest = hashlib.sha256(json.dumps([text, choices]).encode()).digest()
    cells = {"text": text, "choices": choices, "answer": answer, "document": None}
    return Decoded(arrays, digest, cells, len(text) + sum(map(len, choices)))


def _check_question(text: str, choices: Sequence[str], answer: int) -> None:
    if not text.strip() or not all(choice.strip() for choice in choices):
        raise MergeflowError("its question or one of its choices is empty: give it some words, or remove the row.")
    if not 2 <= len(choices) <= MOST_CHOICES:
        raise MergeflowError(f"{len(choices)} choices found; expected 2 to {MOST_CHOICES}.")
    if not 0 <= answer < len(choices):
        raise MergeflowError(f"its answer is {answer}; expected the number of a choice, 0 to {len(choices) - 1}.")


def _tokens_of(text: str, choices: Sequence[str], tokenizer: CausalTokenizer) -> tuple[list[int], list[list[int]]]:
    """Return a question's tokens and each choice's: joined, they are the tokens of the joined text.

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
    """Return the schema of both kinds of example; the columns of the other kind are empty."""
    texts, number = pa.string(), pa.int64()
    return pa.schema([("text", texts), ("choices", pa.list_(texts)), ("answer", number), ("document", number)])


_ENDINGS = (".txt", ".md")
_ABOUT = ("", ".json", ".yaml", ".yml", ".toml", ".cff")  # of files that tell about texts: LICENSE, metadata.json


def open_folder(task: str, place: str, seed: int, root: Path) -> RawTask:
    """Open a text file, or a folder of them, as a task.

    Args:
        place: path or URI. Files named after splits (train.txt), or in folders that are, make these; others are all of
            the training split, from which validation and test are carved, section by section of about 8 KiB.
    """
    location = Location.open(rooted(place, root))
    if location.is_file():
        return text_task(task, {"train": partial(_documents, location, ((),))}, seed)
    endings = {parts: PurePosixPath(parts[-1]).suffix.lower() for parts in location.list_files()}
    if others := ["/".join(parts) for parts, ending in endings.items() if ending not in (*_ENDINGS, *_ABOUT)]:
        raise MergeflowError(
            f"task '{task}': {location.path} holds {quoted(others)}, which is not read as text. Name texts .txt or "
            ".md, and move other files elsewhere."
        )
    files = [parts for parts, ending in endings.items() if ending in _ENDINGS]
    splits: dict[str | None, list[tuple[str, ...]]] = {}
    for parts in files:
        splits.setdefault(split_of(parts[0].partition(".")[0]), []).append(parts)
    if not files or (len(splits) > 1 and None in splits):
        content = "no .txt or .md file"
        if files:
            plain = quoted(["/".join(parts) for parts in splits[None]])
            content = f"{plain} and files of {', '.join(sorted(filter(None, splits)))}"
        raise MergeflowError(
            f"task '{task}': {location.path} holds {content}; expected text files, or folders or files named train "
            "and, where there are, validation and test."
        )
    documents = {split or "train": partial(_documents, location, tuple(parts)) for split, parts in splits.items()}
    return text_task(task, documents, seed)


def _documents(location: Location, files: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, str]]:
    for parts in files:
        path = location.join(parts) if parts else location.path
        name = "/".join(parts) or path.rsplit("/", 1)[-1]
        yield name, decoded(location.read(path), path)


TEXTS = ("text", "content")
QUESTIONS = ("question", "context", "ctx", "prompt")
CHOICES = ("choices", "endings", "options")
ANSWERS = ("answer", "label")


def task_of(
    task: str,
    tables: Mapping[str, pa.Table],
    where: Mapping[str, str],
    seed: int,
    ignored: Sequence[str] = (),
    selected: Mapping[str, str] | None = None,
) -> RawTask:
    """Make a task of tables: of texts, or of questions if there is a column of choices."""
    if not selected and "test" in tables and _is_secret(tables["test"], where["test"]):
        tables, where, ignored = without_test(tables, where, ignored, "answers")
    columns_of = {split: _columns(table.column_names, where[split], selected or {}) for split, table in tables.items()}
    if len({len(columns) for columns in columns_of.values()}) > 1:
        raise MergeflowError(f"task '{task}': some splits have texts and some questions. Make them two tasks.")
    read = _texts if len(columns_of["train"]) == 1 else _questions
    rows: dict[str, Any] = {split: partial(read, tables[split], columns_of[split], where[split]) for split in tables}
    if read is _texts:
        return replace(text_task(task, rows, seed), ignored_splits=tuple(ignored))
    counts, unused = {split: table.num_rows for split, table in tables.items()}, tuple(ignored)
    return RawTask(task, None, None, rows, seed=seed, counts=counts, ignored_splits=unused, transforms=(ACCURACY,))


def _is_secret(table: pa.Table, where: str) -> bool:
    """Return whether the data set keeps all answers of a table's questions secret."""
    columns = _columns(table.column_names, where, {})
    if len(columns) < 3 or not table.num_rows:
        return False
    return all(answer in ("", None, -1, "-1") for answer in pc.unique(table[columns[2]]).to_pylist())


def _columns(names: Sequence[str], where: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return the column of texts; or those of the question, its choices and the answer."""
    if checked_columns(names, where, chosen, ("text",)):
        return (chosen["text"],)
    groups = [[name for name in group if name in names] for group in (QUESTIONS, CHOICES, ANSWERS)]
    texts = [name for name in TEXTS if name in names]
    if groups[1] and all(len(group) == 1 for group in groups):
        return tuple(group[0] for group in groups)
    if len(texts) == 1 and not groups[1]:
        return (texts[0],)
    raise MergeflowError(
        f"{where}: found the columns {quoted(names, 10) or '(none)'}; expected one of texts (text or content), or "
        "three: the question (question, context, ctx or prompt), its choices (choices, endings or options) and the "
        "number of the right one from 0 (answer or label). Rename the columns, or choose the texts: `?text=NAME`."
    )


def _texts(table: pa.Table, columns: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
    """Yield the rows that have words; corpora of lines, such as WikiText, have blank ones between paragraphs."""
    (column,) = columns
    texts = table[column].to_pylist()
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise MergeflowError(f"{where}, row {row}: {column} is {text!r}; expected a text.")
        if text.strip():
            yield f"{where}:{row}", text
    blank = sum(not text.strip() for text in texts)
    if texts and blank == len(texts):
        raise MergeflowError(f"{where}: each row's {column} is empty: give them some words.")
    if blank:
        warnings.warn(f"{where}: {blank} of {len(texts)} rows are blank and left out.", stacklevel=2)


def _questions(table: pa.Table, columns: Sequence[str], where: str) -> Iterator[Example]:
    cells = (table[column].to_pylist() for column in columns)
    for row, (question, choices, answer) in enumerate(zip(*cells, strict=True)):
        name = f"{where}:{row}"
        listed = choices if isinstance(choices, list) else [None]
        if not all(isinstance(text, str) for text in (question, *listed)):
            raise MergeflowError(
                f"{name}: {columns[0]} is {question!r} and {columns[1]} {choices!r}; expected a text and a list "
                "of texts."
            )
        if not str(answer).isdecimal():
            raise MergeflowError(f"{name}: {columns[2]} is {answer!r}; expected the number of a choice, from 0.")
        texts = [checked(text, name) for text in (question, *choices)]
        yield Example({"text": texts[0], "choices": texts[1:], "answer": int(answer)}, name)


SOURCES: Mapping[str, Opener] = {
    "folder": open_folder,
    "jsonl": partial(open_rows, task_of, partial(lines_table, names={*TEXTS, *QUESTIONS, *CHOICES, *ANSWERS}), "jsonl"),
    "parquet": partial(open_rows, task_of, parquet_table, "parquet"),
    "hf": partial(open_hub, task_of),
    "suite": drawn_by("suites.books.source"),
}


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how texts and questions become arrays of tokens."""
    return causal_decoding(load_tokenizer(section.tokenizer, root), section.block)


TRANSFORMS: Mapping[str, Maker] = {"fraction": LABEL_TRANSFORMS["fraction"]}
PREPARATION = Preparation(SOURCES, TRANSFORMS, decoding)
