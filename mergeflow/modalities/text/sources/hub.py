"""Texts of the Hugging Face hub, read with `datasets`; the tasks of GLUE have their own figures."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mergeflow.data.task import RawTask
from mergeflow.modalities.hub import load_tables, parse_place
from mergeflow.modalities.text.judging import judged_by
from mergeflow.modalities.text.sources.columns import task_of

# Of GLUE: the figure of each task, and what stands for validation. Where two figures are usual, the first of the two.
GLUE = {"cola": "matthews", "mrpc": "f1", "qqp": "f1", "stsb": "pearson"}
_MATCHED = {"validation_matched": "validation", "test_matched": "test"}


def open_hub(task: str, place: str, seed: int, root: Path, columns: Mapping[str, str] | None = None) -> RawTask:
    """Open a data set of the hub, or a local folder, as a task; `datasets` downloads it to its own cache once.

    Splits named train, validation (val, valid, dev) and test are used, others are listed as ignored. GLUE keeps the
    labels of its test splits secret, so its validation split is test, and validation is carved from train.

    Args:
        place: `OWNER/NAME[#CONFIG][@REVISION]`, or a local folder.
    """
    source = parse_place(place, root)
    is_glue = source.name.rpartition("/")[2] == "glue"
    tables, ignored = load_tables(source, _MATCHED if is_glue else {})
    raw = task_of(
        task, tables, {split: f"{place}, {split}" for split in tables}, seed, ignored, columns, keeps_conflicts=is_glue
    )
    metric = GLUE.get(source.config or "") if is_glue else None
    if metric is None:
        return raw
    return replace(raw, transforms=(*raw.transforms, judged_by(metric, raw.class_names)))
