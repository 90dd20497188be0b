"""Read a data set with Hugging Face's `datasets`: the real data sets by name, others by id, or a local folder."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mergeflow.data.locations import Location
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.hub import load_splits
from mergeflow.modalities.vision.image_columns import find_columns
from mergeflow.modalities.vision.sources import DEFAULT_TEMPLATES
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS, clip_class_names, find_real_task


def open_hub(task_name: str, place: str, seed: int, root: Path, columns: Mapping[str, str] | None = None) -> RawTask:
    """Open a data set of the Hugging Face hub as a task; `datasets` downloads it to its own cache once.

    Splits named train, validation (val, valid, dev) and test are used, others are listed as ignored. Real data sets
    whose copy on the hub has bare numbers or truth values for labels get their class names by label.

    Args:
        place: `NAME[#CONFIG][@REVISION]`; NAME one of the real data sets, an id `owner/name`, or a local folder.
    """
    # An id of the hub is a path only where there is such a folder, which may have any name; an id has neither sign.
    address = str(root / place) if (root / place).is_dir() else place
    rest, _, revision = (address, "", "") if Path(address).is_dir() else address.partition("@")
    name, _, config = (rest, "", "") if Path(rest).is_dir() else rest.partition("#")
    task = find_real_task(name)
    if task is None and "/" not in name and not Path(name).is_dir():
        raise unknown_name("Hugging Face data set", name, REAL_TASKS)
    hub_id = task.hub_id if task else name
    renamed = task.hub_splits if task else {}
    parts, ignored = load_splits(hub_id, config or (task.hub_config if task else None), revision or None, renamed)
    numbered = task.hub_names if task else ()
    described = {
        split: find_columns(part.features.arrow_schema, f"hf:{address}, {split}", numbered, columns)
        for split, part in parts.items()
    }
    if len({str(description) for description in described.values()}) > 1:
        raise MergeflowError(f"hf:{address}: the splits differ in columns or class names: {described}.")
    image, label, names = next(iter(described.values()))
    rows = {split: _undecoded(part, image, label) for split, part in parts.items()}
    return RawTask(
        name=task_name,
        class_names=clip_class_names(task, names) if task else names,
        templates=task.templates if task else DEFAULT_TEMPLATES,
        splits={split: partial(_examples, part, image, label, split) for split, part in rows.items()},
        seed=seed,
        counts={split: len(part) for split, part in rows.items()},
        ignored_splits=ignored,
        keeps_conflicts=task is not None,
    )


def _undecoded(part: Any, image: str, label: str) -> Any:
    import datasets

    return part.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))


def _examples(part: Any, image: str, label: str, split: str) -> Iterator[Example]:
    for row, cells in enumerate(part):
        cell = cells[image]
        if cell is None or cells[label] is None:
            raise MergeflowError(
                f"{split}, row {row}: no {'image' if cell is None else 'label'}; every row needs both."
            )
        content, path = cell["bytes"], cell["path"] or f"{split}/{row:06d}"
        # Data sets made from a local folder hold only the path of each image.
        yield Example(content if content is not None else partial(_read, path), Path(path).name, int(cells[label]))


def _read(path: str) -> bytes:
    location = Location.open(path)
    return location.read(location.path)
