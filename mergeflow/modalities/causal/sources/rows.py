"""Rows of texts, or of questions with choices, in JSON lines, Parquet and data sets of the hub."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mergeflow.data.address import Opener, checked_columns
from mergeflow.data.arrays import quoted
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.sources.texts import ACCURACY, checked, text_task
from mergeflow.modalities.hub import load_tables, parse_place
from mergeflow.modalities.text.sources.columns import without_test
from mergeflow.modalities.text.sources.files import lines_table, open_rows, parquet_table

TEXTS = ("text", "content")
QUESTIONS, CHOICES, ANSWERS = (
    ("question", "context", "ctx", "prompt"),
    ("choices", "endings", "options"),
    ("answer", "label"),
)


def task_of(
    task: str,
    tables: Mapping[str, pa.Table],
    where: Mapping[str, str],
    seed: int,
    ignored: Sequence[str] = (),
    selected: Mapping[str, str] | None = None,
) -> RawTask:
    """Return the task that tables of rows amount to: of texts, or of questions where there is a column of choices.

    Args:
        selected: the column of texts, as {"text": NAME}.
    """
    if not selected and "test" in tables and _is_secret(tables["test"], where["test"]):
        tables, where, ignored = without_test(tables, where, ignored, "answers")
    columns_of = {split: _columns(table.column_names, where[split], selected or {}) for split, table in tables.items()}
    if len({len(columns) for columns in columns_of.values()}) > 1:
        raise MergeflowError(f"task '{task}': some splits have texts and some questions. Make them two tasks.")
    if len(columns_of["train"]) == 1:
        documents = {
            split: partial(_texts, table, columns_of[split][0], where[split]) for split, table in tables.items()
        }
        return _with_ignored(text_task(task, documents, seed), ignored)
    rows = {split: partial(_questions, table, columns_of[split], where[split]) for split, table in tables.items()}
    counts = {split: table.num_rows for split, table in tables.items()}
    raw = RawTask(task, None, None, rows, seed=seed, counts=counts, transforms=(ACCURACY,))
    return _with_ignored(raw, ignored)


def _is_secret(table: pa.Table, where: str) -> bool:
    """Whether a table has questions of which a data set keeps all answers for itself."""
    columns = _columns(table.column_names, where, {})
    if len(columns) < 3 or not table.num_rows:
        return False
    return all(answer in ("", None, -1, "-1") for answer in pc.unique(table[columns[2]]).to_pylist())


def _with_ignored(raw: RawTask, ignored: Sequence[str]) -> RawTask:
    return replace(raw, ignored_splits=tuple(ignored))


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


def _texts(table: pa.Table, column: str, where: str) -> Iterator[tuple[str, str]]:
    for row, text in enumerate(table[column].to_pylist()):
        if not isinstance(text, str):
            raise MergeflowError(f"{where}, row {row}: {column} is {text!r}; expected a text.")
        yield f"{where}:{row}", text


def _questions(table: pa.Table, columns: Sequence[str], where: str) -> Iterator[Example]:
    cells = (table[column].to_pylist() for column in columns)
    for row, (question, choices, answer) in enumerate(zip(*cells, strict=True)):
        name = f"{where}:{row}"
        if (
            not isinstance(question, str)
            or not isinstance(choices, list)
            or not all(isinstance(c, str) for c in choices)
        ):
            raise MergeflowError(
                f"{name}: {columns[0]} is {question!r} and {columns[1]} {choices!r}; expected a text and a list "
                "of texts."
            )
        if not str(answer).isdecimal():
            raise MergeflowError(f"{name}: {columns[2]} is {answer!r}; expected the number of a choice, from 0.")
        texts = [checked(text, name) for text in (question, *choices)]
        yield Example({"text": texts[0], "choices": texts[1:], "answer": int(answer)}, name)


def open_hub(task: str, place: str, seed: int, root: Path, columns: Mapping[str, str] | None = None) -> RawTask:
    """Open a data set of the hub, or a local folder, as a task; `datasets` downloads it to its own cache once.

    Args:
        place: `OWNER/NAME[#CONFIG][@REVISION]`, or a local folder.
    """
    tables, ignored = load_tables(parse_place(place, root), {})
    return task_of(task, tables, {split: f"{place}, {split}" for split in tables}, seed, ignored, columns)


ROWS: Mapping[str, Opener] = {
    "jsonl": partial(open_rows, task_of, partial(lines_table, names={*TEXTS, *QUESTIONS, *CHOICES, *ANSWERS}), "jsonl"),
    "parquet": partial(open_rows, task_of, parquet_table, "parquet"),
    "hf": open_hub,
}
