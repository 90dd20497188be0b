"""Prepare a task: decode every example once, write Parquet and arrays, and record in a manifest what was done."""

import json
import os
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergeflow.data.arrays import FORMAT, FORMAT_VERSION, MANIFEST, SPLITS, label_error, quoted
from mergeflow.data.decoding import Decoded, Decoding
from mergeflow.data.guards import Copies, Faults, check_classes, check_filled
from mergeflow.data.splits import PlannedSplit, check_name, plan_splits
from mergeflow.data.task import Example, Place, Progress, RawTask, transformed
from mergeflow.data.writer import SplitWriter, disk_guard
from mergeflow.errors import MergeflowError

PROGRESS_EVERY = 64
_AHEAD = 64  # rows in work at most


def prepare_task(
    raw: RawTask,
    out_dir: str | Path,
    decoding: Decoding,
    seed: int | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Write a task's three splits in the prepared form and return the manifest.

    Files: per split `<split>.parquet` (the examples as they were before decoding), `<split>.<name>.npy` for each array
    of the modality; and `manifest.json`. On one machine the same source gives the same bytes.
    No content is in two splits: an example of test is removed from validation and train, one of validation from train
    (by the digests of the source's decoded content, before transforms); the manifest counts the removed ones.

    Args:
        out_dir: a scratch folder; made when missing. After an error its content is unfinished.
        seed: decides which examples become a split that the source lacks, and the chance in transforms; default
            `raw.seed`.
        progress: called as (split, examples done, examples in all or None).
        workers: decoding threads; default one per core, at most 8. The result does not depend on it.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    seed = raw.seed if seed is None else seed
    plans = plan_splits(raw, seed)
    if not raw.transforms:  # they may leave examples out, and how many is not known before
        _check_space(folder, plans, decoding.size)
    copies = Copies(raw, plans)
    faults = Faults(f"examples of task '{raw.name}' cannot be used")
    records: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 8)) as pool:
        for split, plan in plans.items():
            rows = _decode(raw, split, plan, seed, decoding, pool)
            expected = None if raw.transforms else plan.count
            writer = SplitWriter(folder, split, decoding.schema(raw.derived_names), expected)
            records[split] = _write_split(raw, split, plan, rows, writer, copies, faults, progress)
    faults.check()
    copies.check()
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "task": raw.name,
        "source": raw.source,
        "transforms": [transform.text for transform in raw.transforms],
        "seed": seed,
        "decoding": dict(decoding.settings),
        "class_names": list(raw.derived_names or ()),
        "templates": list(raw.templates or ()),
        "ignored_splits": list(raw.ignored_splits),
        "warnings": _warnings(raw, records, copies),
        "splits": {split: records[split] for split in SPLITS},
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    with disk_guard(folder / MANIFEST, lambda: f"{len(text.encode())} bytes more for the manifest"):
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


@dataclass(frozen=True)
class _Row:
    """An example on its way: its row in the source's split, and what became of it."""

    row: int
    source: Example
    label: int = 0
    decoded: Decoded | None = None  # None: a transform left it out
    fault: str = ""


def _decode(
    raw: RawTask, split: str, plan: PlannedSplit, seed: int, decoding: Decoding, pool: ThreadPoolExecutor
) -> Iterator[_Row]:
    def rows() -> Iterator[tuple[int, Example]]:
        row = -1
        for row, example in enumerate(raw.splits[plan.origin]()):
            if plan.rows is None or (row < len(plan.rows) and plan.rows[row]):
                yield row, example
        if plan.rows is not None and row + 1 != len(plan.rows):
            raise MergeflowError(
                f"task '{raw.name}': split '{plan.origin}' of {raw.source or 'the source'} listed {len(plan.rows)} "
                f"examples, then gave {row + 1}. The source changed while it was read: prepare the task again."
            )

    def decode(item: tuple[int, Example]) -> _Row:
        row, example = item
        where = f"task '{raw.name}', split {plan.origin}, row {row}"
        try:
            check_name(example.path, where)
            if not 0 <= example.label < len(raw.strata):
                raise label_error(f"{where} ('{example.path}')", example.label, raw.strata)
            derived = transformed(raw, example, Place(split, row, seed))
            if derived is None:
                return _Row(row, example)
            return _Row(row, example, derived.label, decoding.decode(derived, where))
        except MergeflowError as error:
            return _Row(row, example, fault=str(error))

    return _in_order(decode, rows(), pool)


def _in_order(function: Callable[[Any], _Row], items: Iterable[Any], pool: ThreadPoolExecutor) -> Iterator[_Row]:
    """Yield function(item) in the order of `items`, which are taken and computed at most `_AHEAD` ahead."""
    waiting: deque[Future[_Row]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _write_split(
    raw: RawTask,
    split: str,
    plan: PlannedSplit,
    rows: Iterator[_Row],
    writer: SplitWriter,
    copies: Copies,
    faults: Faults,
    progress: Progress | None,
) -> dict[str, Any]:
    removed, notes = Counter[str](), Counter[str]()
    per_class = np.zeros(len(raw.derived_names or ("",)), np.int64)
    done = left_out = 0
    with writer:
        for done, example in enumerate(rows, start=1):
            if example.fault:
                faults.add(example.fault)
            elif example.decoded is None:
                left_out += 1
            else:
                source = example.source
                first = copies.first_split(example.decoded.digest, split, example.row, source.label, source.path)
                if first != split:
                    removed[first] += 1
                elif not faults.count:  # after a fault the rest is read only to list more faults
                    writer.add(example.decoded, example.label)
                    per_class[example.label] += 1
                    notes.update([example.decoded.note] if example.decoded.note else [])
            if progress and done % PROGRESS_EVERY == 0:
                progress(split, done, plan.count)
    if progress and done % PROGRESS_EVERY:
        progress(split, done, plan.count)
    if not faults.count:
        check_filled(raw, split, done, left_out, writer.count)
    return {
        "count": writer.count,
        "per_class": per_class.tolist() if raw.class_names is not None else [],
        **writer.digests(),
        "carved_from": None if plan.origin == split else plan.origin,
        "left_out": left_out,
        "duplicates_removed": {other: removed[other] for other in SPLITS if other in removed},
        "repeats_within": writer.count - copies.distinct(split),
        **({"notes": dict(notes)} if notes else {}),
    }


def _warnings(raw: RawTask, records: Mapping[str, Mapping[str, Any]], copies: Copies) -> list[str]:
    warnings = [
        f"{split}: {count} of {record['count']} examples have {note}."
        for split, record in records.items()
        for note, count in record.get("notes", {}).items()
    ]
    if raw.class_names is None:
        return warnings
    warnings += check_classes(raw, {split: np.array(record["per_class"]) for split, record in records.items()})
    spelled: dict[str, list[str]] = {}
    for name in raw.class_names:
        spelled.setdefault(name.casefold(), []).append(name)
    if twice := [name for names in spelled.values() if len(names) > 1 for name in names]:
        warnings.append(f"classes whose names differ in upper and lower case alone: {quoted(twice, 10)}.")
    if re.fullmatch(r"(?=.*[.,])([+-]?\d+([.,]\d+)? )+", " ".join([*raw.class_names, ""])):
        named = quoted(raw.class_names, 10)
        warnings.append(f"classes that are decimal numbers: {named}. For a regression write numbers, not texts.")
    if copies.conflicts:
        warnings.append(
            f"examples that have the content of another under a different label: {copies.conflicts}; all are kept."
        )
    return warnings


def _check_space(folder: Path, plans: Mapping[str, PlannedSplit], size: int) -> None:
    """Refuse before any work when not even the arrays can fit; what Parquet takes is not known before reading."""
    needed = sum((plan.count or 0) * size for plan in plans.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MergeflowError(
            f"{folder}: no space left on the disk for the task: its arrays alone need {needed / 2**20:.0f} MiB, "
            f"{free / 2**20:.0f} MiB are free. Free some space or choose another folder."
        )
