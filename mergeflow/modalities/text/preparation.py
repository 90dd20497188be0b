"""How texts are prepared: every kind of source, transforms of labels, the choice of a figure, and tokens."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from math import isfinite
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mergeflow.data.address import Maker, Opener, checked_columns, drawn_by
from mergeflow.data.arrays import quoted
from mergeflow.data.decoding import Decoded, Decoding, Preparation
from mergeflow.data.task import Example, RawTask, Transform, plain
from mergeflow.data.transforms import LABEL_TRANSFORMS
from mergeflow.errors import MergeflowError
from mergeflow.modalities.metrics import METRICS, find_metric
from mergeflow.modalities.tables import (
    Chosen,
    class_labels,
    lines_table,
    open_hub,
    open_rows,
    parquet_table,
    parse_place,
    separator,
    without_test,
)
from mergeflow.modalities.text.sections import DataSection
from mergeflow.modalities.text.tokenizer import PAIRS, TextTokenizer, load_tokenizer


def judged_by(value: str, class_names: Sequence[str] | None) -> Transform:
    """Judge the task by a figure; its examples stay as they are."""
    metric = find_metric(value)
    numbers = metric is not None and METRICS[value].numbers
    if numbers != (class_names is None):
        kind = "numbers" if class_names is None else "classes"
        fitting = [name for name, metric in METRICS.items() if metric.numbers is (class_names is None)]
        raise MergeflowError(
            f"found '{value}', but this task's labels are {kind}; expected one of {', '.join(fitting)}."
        )
    if value == "f1" and class_names is not None and len(class_names) != 2:
        raise MergeflowError(
            f"found 'f1', which is of two classes, but the task has {len(class_names)}; expected macro_f1, or two "
            "classes kept before it (?classes=0,1&metric=f1)."
        )
    return Transform(f"metric={value}", class_names)


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
    """Return the schema that `datasets` reads back as texts with a ClassLabel, or with a number."""
    texts = {name: {"dtype": "string", "_type": "Value"} for name in ("text", "text_pair")}
    plain = {"dtype": "float64", "_type": "Value"}
    label = plain if class_names is None else {"names": list(class_names), "_type": "ClassLabel"}
    metadata = json.dumps({"info": {"features": {**texts, "label": label}}}, ensure_ascii=False)
    kind = pa.float64() if class_names is None else pa.int64()
    fields = [("text", pa.string()), ("text_pair", pa.string()), ("label", kind)]
    return pa.schema(fields, metadata={b"huggingface": metadata.encode()})


COLUMN_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
)
SINGLES = ("text", "sentence", "content")
LABELS = ("label", "score")
_EXPECTED = (
    "a column 'text', 'sentence' or 'content', or two of a pair (text and text_pair, sentence1 and sentence2, "
    "question1 and question2, premise and hypothesis, question and sentence), and one 'label' or 'score'"
)


@dataclass(frozen=True)
class Columns:
    """The names of the columns; `pair` is None where examples are one text each."""

    text: str
    pair: str | None
    label: str


def find_columns(names: Sequence[str], where: str, chosen: Mapping[str, str] | None = None) -> Columns:
    """Return which columns are texts and which is the label; those that are not chosen are told by their names."""
    chosen = checked_columns(names, where, chosen or {}, ("text", "text_pair", "label"))
    labels = [chosen["label"]] if "label" in chosen else [name for name in LABELS if name in names]
    if "text" in chosen and labels:
        return Columns(chosen["text"], chosen.get("text_pair"), labels[0])
    texts = set(names) - {chosen.get("label")}
    pairs = [pair for pair in COLUMN_PAIRS if set(pair) <= texts]
    singles = [name for name in SINGLES if name in texts and not any(name in pair for pair in pairs)]
    if len(pairs) + len(singles) != 1 or not labels:
        wrong = "no label" if not labels else ("no text" if not pairs and not singles else "more than one text or pair")
        raise MergeflowError(
            f"{where}: {wrong} found among the columns {quoted(names, 10) or '(none)'}; expected {_EXPECTED}. "
            "Rename the columns, or name them behind the source: `?text=NAME&label=NAME`."
        )
    text, pair = pairs[0] if pairs else (singles[0], None)
    return Columns(text, pair, labels[0])


def task_of(
    task: str,
    tables: Mapping[str, pa.Table],
    where: Mapping[str, str],
    seed: int,
    ignored: Sequence[str] = (),
    selected: Mapping[str, str] | None = None,
    **more: Any,
) -> RawTask:
    """Make a task of tables.

    Labels are classes where they are texts, whole numbers, truth values, or named by the metadata; they are numbers
    where they are floating-point, or decimal with places behind the point. A test split whose labels are all -1 is one
    whose labels are kept secret: it is left out, and validation becomes test.
    """
    columns = {split: find_columns(table.column_names, where[split], selected) for split, table in tables.items()}
    if len(set(columns.values())) > 1:
        listing = "; ".join(f"{split}: {split_columns}" for split, split_columns in columns.items())
        raise MergeflowError(f"task '{task}': the splits differ in their columns: {listing}. Give all the same.")
    chosen = columns["train"]
    for split, table in tables.items():
        _check_types(table, chosen, where[split])
    if "test" in tables and pc.unique(tables["test"][chosen.label]).to_pylist() == [-1]:
        tables, where, ignored = without_test(tables, where, ignored, "labels")
    names = _class_names(tables["train"], chosen.label)
    labels = {split: _labels(table, chosen.label, names, where[split]) for split, table in tables.items()}
    if names is None and len(np.unique(labels["train"])) == 1:
        raise MergeflowError(
            f"{where['train']}: every {chosen.label} is {labels['train'][0]}; expected numbers that differ, for a "
            "correlation judges the task. Correct them, or write whole numbers for classes."
        )
    return RawTask(
        task,
        names,
        None,
        {split: partial(_examples, table, chosen, labels[split], where[split]) for split, table in tables.items()},
        seed=seed,
        counts={split: table.num_rows for split, table in tables.items()},
        keys={split: partial(_keys, labels[split], where[split]) for split in tables} if names is not None else {},
        ignored_splits=ignored,
        transforms=(Transform(PAIRS, names),) if chosen.pair else (),
        **more,
    )


def _check_types(table: pa.Table, columns: Columns, where: str) -> None:
    """Refuse texts that are none, and labels that have parts."""
    for name in filter(None, (columns.text, columns.pair)):
        kind = table.schema.field(name).type
        if not _is_text(kind):
            raise MergeflowError(f"{where}: the column '{name}' holds values of the type {kind}; expected texts.")
    kind = table.schema.field(columns.label).type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise MergeflowError(
            f"{where}: the column '{columns.label}' holds values of the type {kind}; "
            "expected one class or number a row."
        )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def _class_names(table: pa.Table, label: str) -> list[str] | None:
    """Return the names of the classes in label order; None where labels are numbers."""
    kind = table.schema.field(label).type
    if pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0):
        return None
    values = sorted(pc.unique(table[label]).drop_null().to_pylist())
    return class_labels(table.schema).get(label) or [_name(value) for value in values]


def _name(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _labels(table: pa.Table, label: str, names: Sequence[str] | None, where: str) -> np.ndarray:
    """Return each row's label: the number of its class, or its number."""
    values = table[label].to_pylist()
    empty = [row for row, value in enumerate(values) if value is None or not str(value).strip()]
    if empty:
        raise MergeflowError(f"{where}, row {empty[0]}: no {label} ({len(empty)} such rows). Every row needs one.")
    if names is None:
        for row, value in enumerate(values):
            if not isinstance(value, int | float | Decimal) or not isfinite(value):
                raise MergeflowError(
                    f"{where}, row {row}: {label} {value!r} is not a finite number, as those of a regression are. "
                    "Correct it, or remove the row."
                )
        return np.array(values, np.float64)
    declared = class_labels(table.schema).get(label, [])
    if declared == names:
        return np.array(values, np.int64)  # prepare names the rows whose label has no name
    values = [declared[value] if value in range(len(declared)) else value for value in values]
    number = {plain(name): index for index, name in enumerate(names)}
    unknown = [row for row, value in enumerate(values) if plain(_name(value)) not in number]
    if unknown:
        raise MergeflowError(
            f"{where}, row {unknown[0]}: {label} {values[unknown[0]]!r} is not a label of train, which are "
            f"{quoted(names, 10)} ({len(unknown)} such rows). Correct it, or add examples of it to train."
        )
    return np.array([number[plain(_name(value))] for value in values], np.int64)


def _examples(table: pa.Table, columns: Columns, labels: np.ndarray, where: str) -> Iterator[Example]:
    texts = table[columns.text].to_pylist()
    pairs = table[columns.pair].to_pylist() if columns.pair else [None] * len(texts)
    for row, (text, pair, label) in enumerate(zip(texts, pairs, labels, strict=True)):
        # A text that is missing is empty: it is refused where it is decoded, with its row.
        content: dict[str, Any] = {"text": text or ""} | ({"text_pair": pair or ""} if columns.pair else {})
        if labels.dtype.kind == "f":
            yield Example(content | {"score": float(label)}, f"{where}:{row}")
        else:
            yield Example(content, f"{where}:{row}", int(label))


def _keys(labels: np.ndarray, where: str) -> Iterator[tuple[str, int]]:
    for row, label in enumerate(labels):
        yield f"{where}:{row}", int(label)


_TEXTS = {*SINGLES, *(name for pair in COLUMN_PAIRS for name in pair)}


def _separated(stream: IO[bytes], chosen: Chosen, delimiter: str, quotes: bool) -> pa.Table:
    import pyarrow.csv as pv

    texts = {*_TEXTS, *(name for role, name in chosen.items() if role != "label")}
    labels = {*LABELS, chosen.get("label")} - {*texts}
    content = stream.read()
    head = content.decode().partition("\n")[0]  # pyarrow takes a label in another encoding for bytes
    if delimiter == ",":
        delimiter = separator(head)

    quote_char = '"' if quotes else False
    parsing = pv.ParseOptions(delimiter=delimiter, quote_char=quote_char, newlines_in_values=quotes)

    def read(as_written: Iterable[str], point: str = ".") -> pa.Table:
        types = dict.fromkeys(as_written, pa.string())
        converting = pv.ConvertOptions(column_types=types, strings_can_be_null=False, decimal_point=point)
        table = pv.read_csv(pa.BufferReader(content), parse_options=parsing, convert_options=converting)
        return table.select([number for number, name in enumerate(table.column_names) if name])

    def kinds(table: pa.Table) -> list[tuple[str, pa.DataType]]:
        return [(field.name, field.type) for field in table.schema if field.name in labels]

    table = read(texts)  # they stay texts where all of a file look like numbers, or like "null"
    if table.num_columns == 1 and not table.column_names[0].isidentifier():
        signs = "tabs" if delimiter == "\t" else "commas"
        raise pa.ArrowInvalid(f"{table.column_names[0]!r} is its one column; expected names with {signs} between them")
    if delimiter == ";" and any(pa.types.is_string(kind) for _, kind in kinds(table)):
        with_commas = read(texts, ",")
        table = with_commas if any(pa.types.is_floating(kind) for _, kind in kinds(with_commas)) else table
    guessed = [name for name, kind in kinds(table) if not (pa.types.is_string(kind) or pa.types.is_boolean(kind))]
    if not guessed or len(guessed) > len(set(guessed)):  # columns of one name are refused later
        return table
    written = read({*texts, *guessed})
    return table if all(_are_numbers(table[name], written[name]) for name in guessed) else written


def _are_numbers(values: pa.ChunkedArray, written: pa.ChunkedArray) -> bool:
    """Whether cells that read as numbers are no more than that: `01` is another class than `1`, and `+1` is a class.

    Times and dates are classes as they are written.
    """
    pairs = zip(values.to_pylist(), written.to_pylist(), strict=True)
    cells = [(value, cell.strip()) for value, cell in pairs if value is not None]
    if pa.types.is_integer(values.type):
        return all(cell == str(value) for value, cell in cells)
    # Whole numbers that no integer holds are classes too.
    return pa.types.is_floating(values.type) and not all(cell.lstrip("+-").isdecimal() for _, cell in cells)


# Of GLUE: the figure of each task, and what stands for validation. Where two figures are usual, the first of the two.
GLUE = {"cola": "matthews", "mrpc": "f1", "qqp": "f1", "stsb": "pearson"}
_MATCHED = {"validation_matched": "validation", "test_matched": "test"}


def open_texts_of_hub(
    task: str, place: str, seed: int, root: Path, columns: Mapping[str, str] | None = None
) -> RawTask:
    """Open a data set as `open_hub` does; GLUE with its figures, and with copies that have several labels.

    GLUE keeps the labels of its test splits secret, so its validation split is test, and validation is carved from
    train.
    """
    source = parse_place(place, root)
    if source.name.rpartition("/")[2] != "glue":
        return open_hub(task_of, task, place, seed, root, columns)
    raw = open_hub(partial(task_of, keeps_conflicts=True), task, place, seed, root, columns, _MATCHED)
    metric = GLUE.get(source.config or "")
    return replace(raw, transforms=(*raw.transforms, judged_by(metric, raw.class_names))) if metric else raw


SOURCES: Mapping[str, Opener] = {
    "parquet": partial(open_rows, task_of, parquet_table, "parquet"),
    "jsonl": partial(open_rows, task_of, partial(lines_table, names={*_TEXTS, *LABELS}), "jsonl"),
    "csv": partial(open_rows, task_of, partial(_separated, delimiter=",", quotes=True), "csv"),
    "tsv": partial(open_rows, task_of, partial(_separated, delimiter="\t", quotes=False), "tsv"),
    "hf": open_texts_of_hub,
    "suite": drawn_by("suites.sentences.source"),
}


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how texts become arrays of tokens."""
    return text_decoding(load_tokenizer(section.tokenizer, root, section.max_length))


TRANSFORMS: Mapping[str, Maker] = {**LABEL_TRANSFORMS, "metric": judged_by}
PREPARATION = Preparation(SOURCES, TRANSFORMS, decoding)
