"""Prepare a task: decode every image once, write Parquet and arrays, and say in a manifest what was done."""

import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.data.images import DecodedExample, decode_example
from mergeflow.modalities.vision.data.splits import PlannedSplit, label_error, plan_splits
from mergeflow.modalities.vision.data.store import FORMAT, FORMAT_VERSION, MANIFEST
from mergeflow.modalities.vision.data.task import SPLITS, Example, Progress, RawTask
from mergeflow.modalities.vision.data.writer import SplitWriter, disk_guard

T = TypeVar("T")
R = TypeVar("R")

PROGRESS_EVERY = 64


def prepare_task(
    raw: RawTask,
    out_dir: str | Path,
    image_size: int,
    seed: int | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Write a task's three splits in the prepared form and return the manifest.

    Files: per split `<split>.parquet` (the original encoded images), `<split>.images.npy` (uint8 [N, S, S, 3]),
    `<split>.labels.npy` (int64 [N]); and `manifest.json`. On one machine the same source gives the same bytes.
    No picture is in two splits: one that is in test leaves validation and train, one that is in validation leaves
    train (equality of the SHA-256 of decoded pixels at the original resolution); the manifest counts what left.

    Args:
        raw: the task, from `open_source`.
        out_dir: a scratch folder; made when missing. After an error its content is unfinished.
        image_size: S, pixels, at least 1.
        seed: decides which images become a split that the source lacks; default `raw.seed`.
        progress: called as (split, images done, images in all or None).
        workers: decoding threads; default one per core, at most 8. The result does not depend on it.

    Returns:
        The manifest, as `load_manifest` reads it.

    Raises:
        MergeflowError: empty task or split, training class without images, label outside the class names, undecodable
            image, full disk.
    """
    if image_size < 1:
        raise MergeflowError(f"task '{raw.name}': image_size is {image_size}; expected at least 1 pixel.")
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    seed = raw.seed if seed is None else seed
    plans = plan_splits(raw, seed)
    _check_space(folder, plans, image_size)
    seen: dict[bytes, str] = {}
    records: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 8)) as pool:
        for split, plan in plans.items():
            decoded = _decode(raw, split, plan, image_size, pool)
            writer = SplitWriter(folder, split, raw.class_names, image_size, plan.count)
            records[split] = _write_split(raw, split, plan, decoded, writer, seen, progress)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "task": raw.name,
        "source": raw.source,
        "seed": seed,
        "image_size": image_size,
        "class_names": list(raw.class_names),
        "templates": list(raw.templates),
        "ignored_splits": list(raw.ignored_splits),
        "splits": {split: records[split] for split in SPLITS},
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    with disk_guard(folder / MANIFEST, lambda: f"{len(text.encode())} bytes more for the manifest"):
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def _decode(
    raw: RawTask, split: str, plan: PlannedSplit, image_size: int, pool: ThreadPoolExecutor
) -> Iterator[DecodedExample]:
    def rows() -> Iterator[tuple[int, Example]]:
        row = -1
        for row, example in enumerate(raw.splits[plan.origin]()):
            if plan.rows is None or (row < len(plan.rows) and plan.rows[row]):
                yield row, example
        if plan.rows is not None and row + 1 != len(plan.rows):
            raise MergeflowError(
                f"task '{raw.name}': split '{plan.origin}' of {raw.source or 'the source'} listed {len(plan.rows)} "
                f"images, then gave {row + 1}. The source changed while it was read: prepare the task again."
            )

    def decode(item: tuple[int, Example]) -> DecodedExample:
        row, example = item
        where = f"task '{raw.name}', split {plan.origin}, row {row}"
        if not 0 <= example.label < len(raw.class_names):
            raise label_error(f"{where} ('{example.path}')", example.label, raw.class_names)
        return decode_example(example, image_size, where)

    return map_ordered(decode, rows(), pool)


def map_ordered(
    function: Callable[[T], R], items: Iterable[T], pool: ThreadPoolExecutor, ahead: int = 64
) -> Iterator[R]:
    """Yield function(item) in the order of `items`, computed by the pool at most `ahead` items ahead.

    Example:
        >>> with ThreadPoolExecutor(2) as pool:
        ...     list(map_ordered(lambda x: x * x, range(4), pool))
        [0, 1, 4, 9]
    """
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
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
    decoded: Iterator[DecodedExample],
    writer: SplitWriter,
    seen: dict[bytes, str],
    progress: Progress | None,
) -> dict[str, Any]:
    removed: Counter[str] = Counter()
    done = 0
    with writer:
        for done, example in enumerate(decoded, start=1):
            first = seen.setdefault(example.digest, split)
            if first != split:
                removed[first] += 1
            else:
                writer.add(example)
            if progress and done % PROGRESS_EVERY == 0:
                progress(split, done, plan.count)
    if progress and done % PROGRESS_EVERY:
        progress(split, done, plan.count)
    repeated = len(writer.labels) - sum(1 for owner in seen.values() if owner == split)
    per_class = np.bincount(np.array(writer.labels, np.int64), minlength=len(raw.class_names))
    _check_filled(raw, split, done, per_class)
    return {
        "count": len(writer.labels),
        "per_class": per_class.tolist(),
        **writer.digests(),
        "carved_from": None if plan.origin == split else plan.origin,
        "duplicates_removed": {other: removed[other] for other in SPLITS if other in removed},
        "repeats_within": repeated,
    }


def _check_filled(raw: RawTask, split: str, done: int, per_class: np.ndarray) -> None:
    source = raw.source or "the source"
    if not done:
        raise MergeflowError(f"task '{raw.name}': split '{split}' of {source} is empty; add images to it.")
    if not per_class.sum():
        raise MergeflowError(
            f"task '{raw.name}': all {done} images of split '{split}' of {source} are also in a split that comes "
            "before it (test, then validation, then train). Remove the copies from the source."
        )
    empty = [f"'{name}'" for name, images in zip(raw.class_names, per_class, strict=True) if not images]
    if split == "train" and empty:
        raise MergeflowError(
            f"task '{raw.name}': {len(empty)} of {len(per_class)} classes have no training image in {source}: "
            f"{', '.join(empty[:10])}{' ...' if len(empty) > 10 else ''}. Add images or remove the classes."
        )


def _check_space(folder: Path, plans: Mapping[str, PlannedSplit], image_size: int) -> None:
    """Refuse before any work when not even the arrays can fit; what Parquet takes is not known before reading."""
    needed = sum((plan.count or 0) * 3 * image_size**2 for plan in plans.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MergeflowError(
            f"{folder}: no space left on the disk for the task: its arrays alone need {needed / 2**20:.0f} MiB, "
            f"{free / 2**20:.0f} MiB are free. Free some space or choose another folder."
        )
