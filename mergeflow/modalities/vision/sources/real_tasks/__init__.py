"""The real data sets of the 8-, 14- and 20-task benchmarks: where they are, what their classes are called.

Class names and templates are those of CLIP's published prompt lists, so that zero-shot heads are comparable with the
literature's; the three data sets that are not in those lists have the 20-task benchmark's. Names that data sets give
as folder names are put into words.

Source: Radford et al. 2021 (prompts); Ilharco et al. 2023 (8 tasks); Wang et al. 2024, "Localizing Task Information
for Improved Model Merging and Compression" (14 and 20 tasks).
"""

from collections.abc import Mapping

from mergeflow.errors import unknown_name
from mergeflow.modalities.vision.sources.real_tasks.eight import EIGHT
from mergeflow.modalities.vision.sources.real_tasks.fourteen import SIX_OF_FOURTEEN
from mergeflow.modalities.vision.sources.real_tasks.task import RealTask, clip_class_names, plain
from mergeflow.modalities.vision.sources.real_tasks.twenty import SIX_OF_TWENTY

__all__ = ["REAL_TASKS", "RealTask", "clip_class_names", "find_real_task", "get_real_task"]

_TASKS = (*EIGHT, *SIX_OF_FOURTEEN, *SIX_OF_TWENTY)
REAL_TASKS: Mapping[str, RealTask] = {task.name: task for task in _TASKS}
_BY_NAME = {plain(name): task for task in _TASKS for name in (task.name, task.hub_id, *task.aliases)}


def find_real_task(name: str) -> RealTask | None:
    """Return the real task of a name, alias or hub id, whatever its case and hyphens; None for any other name.

    Example:
        >>> find_real_task("stanford-cars").name, find_real_task("tanganke/dtd").name, find_real_task("my-own")
        ('StanfordCars', 'DTD', None)
    """
    return _BY_NAME.get(plain(name))


def get_real_task(name: str) -> RealTask:
    """Return the real task of a name, alias or hub id.

    Raises:
        MergeflowError: an unknown name; the message has the nearest known one.
    """
    task = find_real_task(name)
    if task is None:
        raise unknown_name("real data set", name, REAL_TASKS)
    return task
