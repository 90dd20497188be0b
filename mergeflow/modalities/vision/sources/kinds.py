"""Every kind of source of labelled images, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mergeflow.data.address import Opener, drawn_by, open_source, rooted
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.sources import DEFAULT_TEMPLATES
from mergeflow.modalities.vision.sources.folder import open_folder, open_loose
from mergeflow.modalities.vision.sources.hub import open_hub
from mergeflow.modalities.vision.sources.parquet import open_parquet
from mergeflow.modalities.vision.sources.real_tasks import clip_class_names, find_real_task
from mergeflow.modalities.vision.sources.torchvision import open_torchvision
from mergeflow.modalities.vision.transforms import TRANSFORMS


def open_images(
    task_name: str,
    source: str,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    root: str | Path | None = None,
) -> RawTask:
    """Open the images of one task.

    Args:
        task_name: task name; for `suite:` the name of one of its tasks, where the address does not name one.
        source: `KIND:ADDRESS`. Kinds: `suite:NAME[/TASK]` (embedded), `parquet:PATH_OR_URI`, `folder:PATH_OR_URI`,
            `torchvision:NAME[@ROOT]`, `hf:NAME[#CONFIG][@REVISION]`; the last two with a NAME of the 20 real data
            sets (Cars, DTD, EuroSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN; CIFAR100, FER2013, Flowers102,
            OxfordIIITPet, PCAM, STL10; EMNIST, CIFAR10, Food101, FashionMNIST, RenderedSST2, KMNIST), `hf` also with
            any id. Transforms may follow: `?classes=5-9&rotate=45`.
        seed: decides which training images become the splits that the source lacks, and the chance in transforms.
        class_names: names that replace the source's own, in the order of the labels.
        templates: prompts with `{}` that replace the source's own. A Parquet or folder source has none: it gets CLIP's
            templates and class names when `task_name` is one of the real 20, else "a photo of a {}.".
        root: folder that relative paths in `source` start from; default the working folder.

    Returns:
        The task; nothing is decoded yet.

    Raises:
        MergeflowError: unknown kind, name or transform, a value out of range, missing path, wrong layout or schema.

    Example:
        >>> open_images("pets", "parquett:pets/")
        Traceback (most recent call last):
            ...
        mergeflow.errors.MergeflowError: unknown kind of data source 'parquett': did you mean 'parquet'? Known: folder, hf, parquet, suite, torchvision.
    """  # noqa: E501
    return open_source(task_name, source, SOURCES, TRANSFORMS, seed, class_names, templates, root)


def _open_files(
    opener: Callable[[str, str, Sequence[str], int], RawTask], task_name: str, place: str, seed: int, root: Path
) -> RawTask:
    task = find_real_task(task_name)
    raw = opener(task_name, rooted(place, root), task.templates if task else DEFAULT_TEMPLATES, seed)
    return replace(raw, class_names=clip_class_names(task, raw.strata), keeps_conflicts=True) if task else raw


def _open_parquet(
    task_name: str, place: str, seed: int, root: Path, columns: Mapping[str, str] | None = None
) -> RawTask:
    return _open_files(partial(open_parquet, chosen=columns), task_name, place, seed, root)


SOURCES: Mapping[str, Opener] = {
    "suite": drawn_by("suites.pocket.source"),
    "parquet": _open_parquet,
    "folder": partial(_open_files, open_folder),
    "torchvision": open_torchvision,
    "hf": open_hub,
}


def open_samples(source: str) -> RawTask:
    """Open images that are looked at without their labels: of a folder without classes, all images below it."""
    # suite:NAME has many tasks; its address names one after a slash.
    task = source.partition("?")[0].rpartition("/")[2].rpartition(":")[2]
    return open_source(task, source, {**SOURCES, "folder": _any_folder}, TRANSFORMS)


def _any_folder(task_name: str, place: str, seed: int, root: Path) -> RawTask:
    try:
        return SOURCES["folder"](task_name, place, seed, root)
    except MergeflowError:
        return open_loose(task_name, rooted(place, root), seed)
