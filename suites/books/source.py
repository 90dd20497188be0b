"""The source kind `suite:`: a task of the embedded corpus of books, written on the spot."""

from functools import partial
from pathlib import Path

from mergeflow.data.arrays import SPLITS
from mergeflow.data.task import RawTask
from mergeflow.errors import unknown_name
from mergeflow.modalities.causal.preparation import text_task
from suites.books.suite import NAME, documents, tasks


def open_suite(task: str, place: str, seed: int, root: Path) -> RawTask:
    """Open a task of an embedded corpus.

    Args:
        place: `NAME` or `NAME/TASK`; without TASK it is the corpus's task of that name.
    """
    name, _, named = place.partition("/")
    if name != NAME:
        raise unknown_name("suite of causal models", name, [NAME])
    if (named or task) not in tasks():
        raise unknown_name(f"task of suite {name}", named or task, tasks())
    return text_task(task, {split: partial(documents, named or task, split) for split in SPLITS}, seed)
