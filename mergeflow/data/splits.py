"""The standard split: what a source lacks is carved from its training examples, the same way every time."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergeflow.data.arrays import label_error
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError

CARVED_FRACTION = 0.1
CARVED_LIMIT = 5000


@dataclass(frozen=True)
class PlannedSplit:
    """Where a split's examples come from."""

    origin: str
    rows: np.ndarray | None  # bool [rows of origin], True for those that belong here; None means all
    count: int | None  # examples before duplicates are removed; None when the source does not know


def plan_splits(raw: RawTask, seed: int) -> dict[str, PlannedSplit]:
    """Plan the splits train, validation and test.

    A split that the source lacks is carved from `train`: 10 %, at most 5000 images, stratified by class, chosen by
    SHA-256 of (seed, split, path). An example therefore keeps its side when others join the source, up to the
    counts. Transforms come later: a task and those derived from it have the same split. Test comes first: the order
    in which duplicates are decided.
    """
    lacking = [split for split in ("test", "validation") if split not in raw.splits]
    planned = {split: PlannedSplit(split, None, raw.counts.get(split)) for split in raw.splits}
    if not lacking:
        return {split: planned[split] for split in ("test", "validation", "train")}
    keys = list(raw.list_keys("train"))
    for path, _ in keys:
        check_name(path, f"task '{raw.name}'")
    labels = np.fromiter((label for _, label in keys), np.int64, len(keys))
    _check_carvable(raw, labels)
    quotas = carve_quotas(np.bincount(labels, minlength=len(raw.strata)))
    train = np.ones(len(keys), bool)
    for split in lacking:
        # Of what is free all but one example of a class may go, so that train keeps every class.
        free = np.bincount(labels[train], minlength=len(raw.strata))
        quota = np.minimum(quotas, np.maximum(free - 1, 0))
        rows = _carve(keys, labels, train, quota, f"{seed}/{split}")
        planned[split] = PlannedSplit("train", rows, int(rows.sum()))
        train &= ~rows
    planned["train"] = PlannedSplit("train", train, int(train.sum()))
    return {split: planned[split] for split in ("test", "validation", "train")}


def check_name(path: str, where: str) -> None:
    """Refuse a file's name whose bytes are no UTF-8: neither a digest nor Parquet can take it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise MergeflowError(f"{where}: the file name {path!a} is not UTF-8. Rename the file.") from None


def carve_quotas(class_counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return how many examples of each class, [C], a carved split takes of the n_c of the source's training split.

    quota_c = floor(f n_c), f = min(0.1, 5000 / sum_c n_c); at least 1 where the class has two examples or more.

    Example:
        >>> carve_quotas([100, 15, 2, 1]).tolist()
        [10, 1, 1, 0]
    """
    counts = np.asarray(class_counts, np.int64)
    fraction = min(CARVED_FRACTION, CARVED_LIMIT / max(int(counts.sum()), 1))
    # The epsilon keeps floor(0.1 * 10) at 1 whatever the rounding of the product.
    quotas = np.floor(fraction * counts + 1e-9).astype(np.int64)
    quotas = np.where(counts >= 2, np.maximum(quotas, 1), 0)
    while quotas.sum() > CARVED_LIMIT:
        quotas[quotas.argmax()] -= 1
    return quotas


def _carve(
    keys: Sequence[tuple[str, int]], labels: np.ndarray, free: np.ndarray, quotas: np.ndarray, salt: str
) -> np.ndarray:
    chosen = np.zeros(len(keys), bool)
    for label, quota in enumerate(quotas):
        # Paths need not be distinct; the row breaks ties.
        rows = np.flatnonzero(free & (labels == label))
        ranked = sorted((hashlib.sha256(f"{salt}/{keys[row][0]}".encode()).digest(), row) for row in rows.tolist())
        chosen[[row for _, row in ranked[:quota]]] = True
    return chosen


def _check_carvable(raw: RawTask, labels: np.ndarray) -> None:
    if not len(labels):
        raise MergeflowError(
            f"task '{raw.name}': split 'train' of {raw.source or 'the source'} is empty; add examples."
        )
    outside = np.flatnonzero((labels < 0) | (labels >= len(raw.strata)))
    if len(outside):
        row = int(outside[0])
        raise label_error(f"task '{raw.name}', split train, row {row}", int(labels[row]), raw.strata)
