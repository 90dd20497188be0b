"""Read the real eight from the folders that torchvision's data sets use."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from mergeflow.errors import MergeflowError
from mergeflow.vision.data.folder_source import open_folder
from mergeflow.vision.data.real_tasks import RealTask, clip_class_names, get_real_task
from mergeflow.vision.data.task import DEFAULT_TEMPLATES, Example, ImageInput, RawTask

DEFAULT_ROOT = "inputs/torchvision"


@dataclass(frozen=True)
class _Rows:
    """One split as a table: (path, label) by row, and how to read a row's image."""

    keys: Sequence[tuple[str, int]]
    read: Callable[[int], ImageInput]

    def examples(self) -> Iterator[Example]:
        for row, (path, label) in enumerate(self.keys):
            yield Example(partial(self.read, row), path, label)

    def list_keys(self) -> Iterator[tuple[str, int]]:
        return iter(self.keys)

    def only(self, wanted: set[str]) -> "_Rows":
        rows = [row for row, (path, _) in enumerate(self.keys) if path in wanted]
        return _Rows([self.keys[row] for row in rows], lambda row: self.read(rows[row]))


_Found = tuple[Sequence[str], dict[str, _Rows]]


def open_torchvision(task_name: str, address: str, seed: int) -> RawTask:
    """Open one of the real eight from a local torchvision folder; nothing is downloaded.

    Official splits are used as they are: train and test of Cars, GTSRB, MNIST and SVHN; train, val and test of
    partition 1 of DTD; partition 1 of SUN397 and torchgeo's lists of RESISC45 where their files are present. What is
    left (all of EuroSAT) is carved.

    Args:
        task_name: task name.
        address: `NAME[@ROOT]`, ROOT as given to torchvision, default `inputs/torchvision`. RESISC45, which torchvision
            lacks, is read from ROOT/NWPU-RESISC45/CLASS/*.jpg.
        seed: decides the carved splits.

    Raises:
        MergeflowError: unknown name, or files missing, damaged or incomplete under ROOT.
    """
    name, _, root = address.partition("@")
    task = get_real_task(name)
    folder = Path(root or DEFAULT_ROOT)
    try:
        names, splits = _READERS[task.name](folder)
    except MergeflowError:
        raise
    # torchvision raises RuntimeError, AssertionError, FileNotFoundError or a parser's error for the same thing.
    except Exception as error:
        raise _not_there(task, folder, error) from error
    return RawTask(
        name=task_name,
        class_names=clip_class_names(task, names),
        templates=task.templates,
        splits={split: rows.examples for split, rows in splits.items()},
        seed=seed,
        counts={split: len(rows.keys) for split, rows in splits.items()},
        keys={split: rows.list_keys for split, rows in splits.items()},
    )


def _not_there(task: RealTask, folder: Path, error: Exception) -> MergeflowError:
    ways = {
        "StanfordCars": "torchvision can no longer download it: put the original archives under stanford_cars/",
        "RESISC45": "put the original archive's class folders under NWPU-RESISC45/",
    }
    fetch = f"python -c \"import torchvision; torchvision.datasets.{task.name}('{folder}', download=True)\""
    if task.name in ("DTD", "GTSRB", "MNIST", "SVHN"):
        fetch += " (and the same for every other split)"
    return MergeflowError(
        f"{task.name} cannot be read from '{folder}' ({type(error).__name__}: {error}). "
        f"{ways.get(task.name, 'Download it with: ' + fetch)}, or use hf:{task.name}."
    )


def _files(dataset: Any, root: Path) -> _Rows:
    """Return the rows of a torchvision data set that was made with `loader=str`: its items are (path, label)."""
    items = ((Path(path), int(label)) for path, label in (dataset[row] for row in range(len(dataset))))
    return _file_rows(items, root)


def _file_rows(items: Iterator[tuple[Path, int]], root: Path) -> _Rows:
    # Sorted, because torchvision lists some folders in the order of the file system.
    keys = sorted((path.relative_to(root).as_posix(), label) for path, label in items)
    return _Rows(keys, lambda row: (root / keys[row][0]).read_bytes())


def _arrays(images: Any, labels: Any, split: str) -> _Rows:
    """Return the rows of a data set that torchvision holds as arrays: images uint8 [N, H, W] or [N, H, W, 3]."""
    keys = [(f"{split}/{row:06d}.png", int(label)) for row, label in enumerate(labels)]
    return _Rows(keys, lambda row: Image.fromarray(images[row]))


def _cars(root: Path) -> _Found:
    from torchvision.datasets import StanfordCars

    parts = {split: StanfordCars(root, split=split, loader=str) for split in ("train", "test")}
    rows = {split: _files(part, root / "stanford_cars") for split, part in parts.items()}
    return parts["train"].classes, rows


def _dtd(root: Path) -> _Found:
    from torchvision.datasets import DTD

    parts = {name: DTD(root, split=name, partition=1, loader=str) for name in ("train", "val", "test")}
    # torchvision numbers the classes of each split for itself.
    if len({tuple(part.classes) for part in parts.values()}) > 1:
        counts = {name: len(part.classes) for name, part in parts.items()}
        raise MergeflowError(f"DTD under '{root}': the label lists name different classes ({counts}); restore them.")
    rows = {name.replace("val", "validation"): _files(part, root / "dtd/dtd/images") for name, part in parts.items()}
    return parts["train"].classes, rows


def _eurosat(root: Path) -> _Found:
    from torchvision.datasets import EuroSAT

    dataset = EuroSAT(root, loader=str)
    return dataset.classes, {"train": _files(dataset, root / "eurosat/2750")}


def _gtsrb(root: Path) -> _Found:
    from torchvision.datasets import GTSRB

    numbers = [f"{label:05d}" for label in range(43)]
    training = root / "gtsrb/GTSRB/Training"
    found = sorted(folder.name for folder in training.iterdir() if folder.is_dir()) if training.is_dir() else numbers
    # torchvision labels the training folders in order, so that one missing folder would shift all labels after it.
    if found != numbers:
        raise MergeflowError(f"'{training}': found {len(found)} class folders; expected 00000 to 00042. Restore them.")
    base = root / "gtsrb/GTSRB"
    parts = {split: GTSRB(root, split=split)._samples for split in ("train", "test")}
    return numbers, {s: _file_rows(((Path(p), int(c)) for p, c in items), base) for s, items in parts.items()}


def _mnist(root: Path) -> _Found:
    from torchvision.datasets import MNIST

    parts = {"train": MNIST(root, train=True), "test": MNIST(root, train=False)}
    rows = {split: _arrays(part.data.numpy(), part.targets.tolist(), split) for split, part in parts.items()}
    return parts["train"].classes, rows


def _resisc45(root: Path) -> _Found:
    raw = open_folder("RESISC45", str(root / "NWPU-RESISC45"), DEFAULT_TEMPLATES, 0)
    base = root / "NWPU-RESISC45"
    rows = _file_rows(((base / path, label) for path, label in raw.list_keys("train")), base)
    lists = {split: root / f"resisc45-{name}.txt" for split, name in _RESISC45_LISTS.items()}
    if not all(path.exists() for path in lists.values()):
        return raw.class_names, {"train": rows}
    # The lists name only files; the class folder is the file's name without its number.
    wanted = {
        split: {f"{line.rsplit('_', 1)[0]}/{line}" for line in path.read_text().split()}
        for split, path in lists.items()
    }
    return raw.class_names, _select(rows, wanted, base)


def _sun397(root: Path) -> _Found:
    from torchvision.datasets import SUN397

    dataset = SUN397(root, loader=str)
    base = root / "SUN397"
    rows = _files(dataset, base)
    for folder in (base, base / "Partitions"):
        lists = {"train": folder / "Training_01.txt", "test": folder / "Testing_01.txt"}
        if all(path.exists() for path in lists.values()):
            wanted = {
                split: {line.strip().lstrip("/") for line in path.read_text().splitlines() if line.strip()}
                for split, path in lists.items()
            }
            return dataset.classes, _select(rows, wanted, base)
    return dataset.classes, {"train": rows}


def _svhn(root: Path) -> _Found:
    from torchvision.datasets import SVHN

    parts = {split: SVHN(root, split=split) for split in ("train", "test")}
    rows = {split: _arrays(part.data.transpose(0, 2, 3, 1), part.labels, split) for split, part in parts.items()}
    return [str(digit) for digit in range(10)], rows


def _select(rows: _Rows, wanted: dict[str, set[str]], base: Path) -> dict[str, _Rows]:
    """Return the rows of every official list; a list that names a file that is not there is an error."""
    there = {path for path, _ in rows.keys}
    for split, paths in wanted.items():
        if missing := sorted(paths - there):
            raise MergeflowError(
                f"'{base}': the official {split} list names {len(missing)} images that are not there, such as "
                f"'{missing[0]}'. Restore them, or remove the lists to have splits carved."
            )
    return {split: rows.only(paths) for split, paths in wanted.items()}


_RESISC45_LISTS = {"train": "train", "validation": "val", "test": "test"}
_READERS: dict[str, Callable[[Path], _Found]] = {
    "StanfordCars": _cars,
    "DTD": _dtd,
    "EuroSAT": _eurosat,
    "GTSRB": _gtsrb,
    "MNIST": _mnist,
    "RESISC45": _resisc45,
    "SUN397": _sun397,
    "SVHN": _svhn,
}
