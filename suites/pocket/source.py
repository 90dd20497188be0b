"""The source kind `suite:`: a task of an embedded suite, drawn on the spot."""

from functools import partial
from pathlib import Path

from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError, unknown_name
from suites.pocket import get_suite, suite_names


def open_suite(task_name: str, place: str, seed: int, root: Path) -> RawTask:
    """Open a task of an embedded suite.

    Args:
        place: `NAME` or `NAME/TASK`; without TASK it is the suite's only one, or the one called `task_name`.
        seed: decides the carved splits; suites have all three.
    """
    suite_name, _, named = place.partition("/")
    tasks = get_suite(suite_name).tasks
    wanted = named or (next(iter(tasks)) if len(tasks) == 1 else task_name)
    if wanted not in tasks:
        for larger in suite_names():
            if wanted in get_suite(larger).tasks:
                raise MergeflowError(
                    f"task '{wanted}': suite {suite_name} has {len(tasks)} tasks and not this one; it is in "
                    f"{larger}: write suite:{larger}{f'/{wanted}' if named else ''}."
                )
        if wanted == suite_name:  # samples without a task, which have the name of their source
            raise MergeflowError(
                f"suite {suite_name} has {len(tasks)} tasks: name one, suite:{suite_name}/{min(tasks)}."
            )
        raise unknown_name(f"task of suite {suite_name}", wanted, tasks)
    task = tasks[wanted]
    return RawTask(
        name=task_name,
        class_names=tuple(task.class_names),
        templates=tuple(task.templates),
        splits={split: partial(task.draw, split) for split in task.counts},
        seed=seed,
        counts=dict(task.counts),
    )
