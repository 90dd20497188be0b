"""Which columns of a table are the texts and the label, and what the labels are: class names or numbers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mergeflow.data.address import checked_columns
from mergeflow.data.arrays import quoted
from mergeflow.data.task import Example, RawTask, plain
from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.judging import of_pairs

PAIRS = (
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
    """Return which columns are texts and which is the label.

    Args:
        chosen: the names of columns by what they are: `text`, `text_pair`, `label`; the names say it of the others.

    Example:
        >>> find_columns(["idx", "sentence1", "sentence2", "label"], "rte.tsv")
        Columns(text='sentence1', pair='sentence2', label='label')
    """
    chosen = checked_columns(names, where, chosen or {}, ("text", "text_pair", "label"))
    labels = [chosen["label"]] if "label" in chosen else [name for name in LABELS if name in names]
    if "text" in chosen and labels:
        return Columns(chosen["text"], chosen.get("text_pair"), labels[0])
    texts = set(names) - {chosen.get("label")}
    pairs = [pair for pair in PAIRS if set(pair) <= texts]
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
    """Return the task that tables of rows amount to.

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
        transforms=(of_pairs(names),) if chosen.pair else (),
        **more,
    )


def _check_types(table: pa.Table, columns: Columns, where: str) -> None:
    """Refuse texts that are none, and labels that have parts."""
    for name in filter(None, (columns.text, columns.pair)):
        kind = table.schema.field(name).type
        if not _is_text(kind):
            raise MergeflowError(f"{where}: the column '{name}' holds values of the type {kind}; expected texts.")
    kind = table.schema.field(columns.label).type
    if pa.types.is_nested(kind):
        raise MergeflowError(
            f"{where}: the column '{columns.label}' holds values of the type {kind}; "
            "expected one class or number a row."
        )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    )


def without_test(
    tables: Mapping[str, pa.Table], where: Mapping[str, str], ignored: Sequence[str], secret: str
) -> tuple[dict[str, pa.Table], dict[str, str], list[str]]:
    """Return tables, places and ignored splits without a test split of which a data set keeps something to itself.

    Args:
        secret: what is kept, in the plural.
    """
    remaining, named, test_note = dict(tables), dict(where), f"test (its {secret} are secret)"
    del remaining["test"]
    if "validation" in remaining:
        remaining["test"], named["test"] = remaining.pop("validation"), named["validation"]
        test_note += ", for which validation stands"
    return remaining, named, [*ignored, test_note]


def _class_names(table: pa.Table, label: str) -> list[str] | None:
    """Return the names of the classes in label order; None where labels are numbers."""
    kind = table.schema.field(label).type
    if pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0):
        return None
    declared = _declared(table.schema).get(label, {})
    if isinstance(declared, dict) and declared.get("_type") == "ClassLabel" and declared.get("names"):
        return [str(name) for name in declared["names"]]
    return [_name(value) for value in sorted(pc.unique(table[label]).drop_null().to_pylist())]


def _declared(schema: pa.Schema) -> Mapping[str, Any]:
    raw = (schema.metadata or {}).get(b"huggingface")
    features = (json.loads(raw).get("info") or {}).get("features") if raw else None
    return features if isinstance(features, dict) else {}


def _name(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _labels(table: pa.Table, label: str, names: Sequence[str] | None, where: str) -> np.ndarray:
    """Return each row's label: the number of its class, or its number."""
    values = table[label].to_pylist()
    empty = [row for row, value in enumerate(values) if value is None or not str(value).strip()]
    if empty:
        raise MergeflowError(f"{where}, row {empty[0]}: no {label} ({len(empty)} such rows). Every row needs one.")
    if names is None:
        wrong = [
            row
            for row, value in enumerate(values)
            if not isinstance(value, int | float | Decimal) or not isfinite(value)
        ]
        if wrong:
            raise MergeflowError(
                f"{where}, row {wrong[0]}: {label} {values[wrong[0]]!r} is not a finite number, as those of a "
                "regression are. Correct it, or remove the row."
            )
        return np.array(values, np.float64)
    declared = _declared(table.schema).get(label, {})
    if isinstance(declared, dict) and declared.get("names"):
        return np.array(values, np.int64)  # prepare names the rows whose label has no name
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
        content: dict[str, Any] = {"text": _text(text)} | ({"text_pair": _text(pair)} if columns.pair else {})
        if labels.dtype.kind == "f":
            yield Example(content | {"score": float(label)}, f"{where}:{row}")
        else:
            yield Example(content, f"{where}:{row}", int(label))


def _text(value: Any) -> str:
    return "" if value is None else str(value)  # an empty text is refused where it is decoded, with its row


def _keys(labels: np.ndarray, where: str) -> Iterator[tuple[str, int]]:
    for row, label in enumerate(labels):
        yield f"{where}:{row}", int(label)
