"""Open a data source by its address."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.vision.data.folder_source import open_folder
from mergeflow.modalities.vision.data.hub_source import open_hub
from mergeflow.modalities.vision.data.parquet_source import open_parquet
from mergeflow.modalities.vision.data.real_tasks import clip_class_names, find_real_task
from mergeflow.modalities.vision.data.task import DEFAULT_TEMPLATES, RawTask
from mergeflow.modalities.vision.data.torchvision_source import DEFAULT_ROOT, open_torchvision

_Opener = Callable[[str, str, int], RawTask]


def open_source(
    task_name: str,
    source: str,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    root: str | Path | None = None,
) -> RawTask:
    """Open the data of one task.

    Args:
        task_name: task name; for `suite:` the name of one of its tasks.
        source: `KIND:ADDRESS`. Kinds: `suite:NAME` (embedded), `parquet:PATH_OR_URI`, `folder:PATH_OR_URI`,
            `torchvision:NAME[@ROOT]`, `hf:NAME[#CONFIG][@REVISION]`; the last two with a NAME of the 20 real data
            sets (Cars, DTD, EuroSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN; CIFAR100, FER2013, Flowers102,
            OxfordIIITPet, PCAM, STL10; EMNIST, CIFAR10, Food101, FashionMNIST, RenderedSST2, KMNIST), `hf` also with
            any id.
        seed: decides which training images become the splits that the source lacks.
        class_names: names that replace the source's own, in the order of the labels.
        templates: prompts with `{}` that replace the source's own. A Parquet or folder source has none: it gets CLIP's
            templates and class names when `task_name` is one of the real 20, else "a photo of a {}.".
        root: folder that relative paths in `source` start from; default the working folder. The manifest records
            `source` as it was given, so that it does not depend on where a project lies.

    Returns:
        The task; nothing is decoded yet.

    Raises:
        MergeflowError: unknown kind or name, missing path, wrong layout or schema.

    Example:
        >>> open_source("pets", "parquett:pets/")
        Traceback (most recent call last):
            ...
        mergeflow.errors.MergeflowError: unknown kind of data source 'parquett': did you mean 'parquet'? Known: folder, hf, parquet, suite, torchvision.
    """  # noqa: E501
    kind, separator, address = source.partition(":")
    openers = _openers()
    if kind not in openers:
        raise unknown_name("kind of data source", kind, openers)
    if not separator or not address:
        raise MergeflowError(f"task '{task_name}': source '{source}' has no address; expected '{kind}:ADDRESS'.")
    raw = replace(openers[kind](task_name, _below(kind, address, root), seed), source=source)
    if templates is not None:
        raw = replace(raw, templates=tuple(templates))
    if class_names is not None:
        if len(class_names) != len(raw.class_names):
            raise MergeflowError(
                f"task '{task_name}': {len(class_names)} class names given, but {source} has {len(raw.class_names)} "
                f"classes ('{raw.class_names[0]}' to '{raw.class_names[-1]}'). Give one name for each."
            )
        raw = replace(raw, class_names=tuple(class_names))
    return raw


def _openers() -> dict[str, _Opener]:
    return {
        "suite": _open_suite,
        "parquet": partial(_open_files, open_parquet),
        "folder": partial(_open_files, open_folder),
        "torchvision": open_torchvision,
        "hf": open_hub,
    }


def _below(kind: str, address: str, root: str | Path | None) -> str:
    """Return the address with a relative path in it taken from `root`."""
    if root is None or kind == "suite" or "://" in address:
        return address
    if kind == "torchvision":
        name, _, path = address.partition("@")
        return f"{name}@{Path(root) / (path or DEFAULT_ROOT)}"
    path = str(Path(root) / address)
    # An address of the hub is a path only when there is such a folder.
    return path if kind != "hf" or Path(path).is_dir() else address


def _open_files(
    opener: Callable[[str, str, Sequence[str], int], RawTask], task_name: str, address: str, seed: int
) -> RawTask:
    task = find_real_task(task_name)
    raw = opener(task_name, address, task.templates if task else DEFAULT_TEMPLATES, seed)
    return replace(raw, class_names=clip_class_names(task, raw.class_names)) if task else raw


def _open_suite(task_name: str, suite_name: str, seed: int) -> RawTask:
    # Imported here because suites build on Example.
    from mergeflow.suites import get_suite, suite_names

    tasks = get_suite(suite_name).tasks
    if task_name not in tasks:
        for larger in suite_names():
            if task_name in get_suite(larger).tasks:
                raise MergeflowError(
                    f"task '{task_name}': suite {suite_name} has {len(tasks)} tasks and not this one; it is in "
                    f"{larger}: write suite:{larger}."
                )
        raise unknown_name(f"task of suite {suite_name}", task_name, tasks)
    task = tasks[task_name]
    return RawTask(
        name=task_name,
        class_names=tuple(task.class_names),
        templates=tuple(task.templates),
        splits={split: partial(task.draw, split) for split in task.counts},
        seed=seed,
        counts=dict(task.counts),
    )
