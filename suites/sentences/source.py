"""The source kind `suite:`: a task of an embedded suite of sentences, written on the spot."""

from functools import partial
from pathlib import Path

from mergeflow.data.task import RawTask, Transform
from mergeflow.errors import unknown_name
from mergeflow.modalities.metrics import ACCURACY
from mergeflow.modalities.text.preparation import judged_by
from mergeflow.modalities.text.tokenizer import PAIRS
from suites.sentences.suite import get_text_suite


def open_suite(task_name: str, place: str, seed: int, root: Path) -> RawTask:
    """Open a task of an embedded suite.

    Args:
        place: `NAME` or `NAME/TASK`; without TASK it is the suite's task of that name.
    """
    suite_name, _, named = place.partition("/")
    tasks = get_text_suite(suite_name).tasks
    if (named or task_name) not in tasks:
        raise unknown_name(f"task of suite {suite_name}", named or task_name, tasks)
    task = tasks[named or task_name]
    marks = [Transform(PAIRS, task.class_names)] if task.pair else []
    marks += [] if task.metric == ACCURACY else [judged_by(task.metric, task.class_names)]
    return RawTask(
        task_name,
        task.class_names,
        None,
        {split: partial(task.draw, split) for split in task.counts},
        seed=seed,
        counts=dict(task.counts),
        transforms=tuple(marks),
    )
