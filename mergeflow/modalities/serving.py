"""Registered models, read back to answer requests; training imports none of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.heads import Head, read_head
from mergeflow.modalities.sections import SECTIONS
from mergeflow.modalities.served import SERVED, WEIGHTS, Columns, Loaded
from mergeflow.schema import validated

_ROWS_NAMED = 10


def read_model(folder: Path, device: torch.device) -> Loaded:
    """Return the model in a registered version's folder."""
    config = json.loads((folder / "model.json").read_text())
    name = config["model"]["modality"]
    modality = MODALITIES.get(name)
    section: Any = validated(SECTIONS.get(name).model, config["model"], f"{folder / 'model.json'}, model")
    record: dict[str, str] = config.get("record", {})
    model = modality.build(section, record)
    with open_checkpoint(folder / WEIGHTS) as state:
        model.load(state)
    model.module.eval().to(device)
    heads = {task: read_head(folder / file) for task, file in config["heads"].items()}
    names = config["class_names"]
    class_names = {task: names[task] if head is None else head.class_names for task, head in heads.items()}
    return Loaded(modality, model, heads, class_names, config["decoding"], record, device, section)


def classify(
    loaded: Loaded,
    columns: Columns,
    inputs: Sequence[str],
    read: Callable[[Mapping[str, Any]], Any],
    batch: Callable[[list[Any]], Any] = lambda rows: torch.from_numpy(np.stack(rows)),
    optional: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Answer each row with a class of its task, or with a number for a task of numbers.

    Args:
        read: a row's inputs to what is put into a batch; it raises a MergeflowError for inputs that cannot be read.
        batch: what was read of some rows to what the module takes.
        optional: further columns that an example is read from, None where they are missing.

    Returns:
        `label` (class name, or number) and `probabilities` (class name to probability; nothing for a number), in the
        rows' order.
    """
    check_columns(columns, [*inputs, "task"])
    columns = {**{name: [None] * len(columns["task"]) for name in optional}, **columns}
    examples, tasks = read_rows(loaded.heads, columns, [*inputs, *optional], read)
    labels: list[str] = []
    probabilities: list[dict[str, float]] = []
    rows = SERVED.get(loaded.modality.name).rows
    for start in range(0, len(tasks), rows):
        with torch.inference_mode():
            features = loaded.model.module(batch(examples[start : start + rows]).to(loaded.device))
        features = (features.float() if features.dtype.itemsize < 4 else features).cpu()
        for row, task in enumerate(tasks[start : start + rows]):
            head, feature = loaded.heads[task], features[row : row + 1]
            outputs = (feature if head is None else head(feature))[0].double()
            if not outputs.isfinite().all():
                raise MergeflowError(f"row {start + row}: the model's answer is no finite number: send smaller inputs.")
            names = list(loaded.class_names[task])
            if not names:
                labels.append(f"{outputs.item():.9g}")  # nine digits distinguish any two float32 numbers
                probabilities.append({})
                continue
            chances = torch.softmax(outputs, dim=0).tolist()
            names += [f"output {k}" for k in range(len(names), len(chances))]  # other tasks have classes for these
            labels.append(names[int(np.argmax(chances))])
            probabilities.append(dict(zip(names, chances, strict=True)))
    return {"label": labels, "probabilities": probabilities}


def check_columns(columns: Columns, wanted: Sequence[str]) -> None:
    """Refuse a request that lacks columns."""
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise MergeflowError(f"the input lacks the column(s) {', '.join(missing)}; expected {', '.join(wanted)}.")


def read_rows(
    heads: Mapping[str, Head | None],
    columns: Columns,
    inputs: Sequence[str],
    read: Callable[[Mapping[str, Any]], Any],
    done: str = "classified",
) -> tuple[list[Any], list[str]]:
    """Return the inputs and the task of each row; a message says that rows cannot be `done`, as "answered"."""
    examples, wrong, tasks = [], [], list(columns["task"])
    for row, values in enumerate(zip(*(columns[name] for name in inputs), strict=True)):
        try:
            if not isinstance(tasks[row], str) or tasks[row] not in heads:
                raise _unknown_task(tasks[row], heads)
            examples.append(read(dict(zip(inputs, values, strict=True))))
        except MergeflowError as error:
            wrong.append(f"row {row}: {error}")
    if wrong:
        more = f" And {len(wrong) - _ROWS_NAMED} more." if len(wrong) > _ROWS_NAMED else ""
        named = " ".join(wrong[:_ROWS_NAMED])
        raise MergeflowError(f"{len(wrong)} of {len(tasks)} rows cannot be {done}. {named}{more}")
    return examples, tasks


def _unknown_task(task: Any, heads: Mapping[str, Any]) -> MergeflowError:
    """Return the error for a task that a caller misspelt; it does not repeat what a caller may have sent on purpose."""
    nearest = get_close_matches(task, heads, n=1, cutoff=0.5) if isinstance(task, str) and len(task) < 100 else []
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return MergeflowError(f"unknown task: {hint}Known: {', '.join(sorted(heads))}.")
