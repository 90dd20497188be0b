"""Read a folder of images: one folder per class, with or without a folder per split above."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from mergeflow.data.locations import SPLIT_ALIASES, Location, split_of
from mergeflow.data.task import Example, RawTask, plain
from mergeflow.errors import MergeflowError

IMAGE_EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_LAYOUT = "FOLDER/CLASS/IMAGE, or FOLDER/train/CLASS/IMAGE with validation/ and test/ next to train/"

# (path parts from the root, label)
_Item = tuple[tuple[str, ...], int]


def open_folder(task_name: str, uri: str, templates: Sequence[str], seed: int) -> RawTask:
    """Open a folder of class folders as a task; the class names are the folder names, sorted.

    Args:
        uri: path or fsspec URI of the folder. When it holds a folder `train`, its folders are splits (train;
            validation, val or valid; test) and the class folders are below; else its folders are the classes.
        templates: prompts with `{}`.
    """
    location = Location.open(uri)
    if location.is_file():
        raise MergeflowError(f"task '{task_name}': '{uri}' is a file; expected a folder: {_LAYOUT}.")
    folders = location.list_folders()
    roots = _split_roots(location, [parts[0] for parts in folders if len(parts) == 1], task_name)
    depth = 1 if roots == {"train": ()} else 2
    classes = {
        split: sorted(parts[-1] for parts in folders if len(parts) == depth and parts[: depth - 1] == root)
        for split, root in roots.items()
    }
    names = classes["train"]
    if not names:
        raise MergeflowError(f"task '{task_name}': no class folders found in '{uri}'; expected {_LAYOUT}.")
    label = {plain(name): index for index, name in enumerate(names)}
    for split, in_split in classes.items():
        if extra := [name for name in in_split if plain(name) not in label]:
            raise MergeflowError(
                f"task '{task_name}': '{uri}' has class folders in {split} that train lacks: {', '.join(extra[:10])}. "
                "Add them to train or remove them."
            )
    items = _list_items(location, roots, label)
    return RawTask(
        name=task_name,
        class_names=names,
        templates=templates,
        splits={split: partial(_examples, location, items[split]) for split in roots},
        seed=seed,
        counts={split: len(items[split]) for split in roots},
        keys={split: partial(_keys, items[split]) for split in roots},
    )


def open_loose(task_name: str, uri: str, seed: int) -> RawTask:
    """Open every image below a folder, whatever its layout, as one split without classes."""
    location = Location.open(uri)
    items = [(parts, 0) for parts in location.list_files() if _is_image(parts)]
    if location.is_file() or not items:
        problem = "is a file" if location.is_file() else "has no images"
        raise MergeflowError(
            f"'{uri}' {problem}; expected a folder with images below it ({', '.join(IMAGE_EXTENSIONS)})."
        )
    splits, counts = {"train": partial(_examples, location, items)}, {"train": len(items)}
    return RawTask(task_name, None, None, splits, seed=seed, counts=counts)


def _is_image(parts: Sequence[str]) -> bool:
    return PurePosixPath(parts[-1]).suffix.lower() in IMAGE_EXTENSIONS


def _split_roots(location: Location, top: Sequence[str], task_name: str) -> dict[str, tuple[str, ...]]:
    """Return {split: path parts of its folder}; {"train": ()} when the top folders are classes."""
    splits = [name for name in top if split_of(name)]
    if not splits:
        return {"train": ()}
    roots: dict[str, tuple[str, ...]] = {}
    for name in top:
        split = split_of(name)
        if split is None or split in roots:
            raise MergeflowError(
                f"task '{task_name}': unsupported split folder '{name}' next to {', '.join(splits)} in "
                f"{location.path}; expected one folder for each of train, validation and test "
                f"(names: {', '.join(SPLIT_ALIASES)}). Remove or rename it."
            )
        roots[split] = (name,)
    if "train" not in roots:
        raise MergeflowError(
            f"task '{task_name}': {location.path} has split folders ({', '.join(splits)}) but no train; add train/."
        )
    return roots


def _list_items(
    location: Location, roots: dict[str, tuple[str, ...]], label: Mapping[str, int]
) -> dict[str, list[_Item]]:
    items: dict[str, list[_Item]] = {split: [] for split in roots}
    for parts in location.list_files():
        is_image = _is_image(parts)
        split = next((split for split, root in roots.items() if parts[: len(root)] == root), None)
        inner = parts[len(roots[split]) :] if split else parts
        if split and len(inner) > 1 and is_image:
            items[split].append((parts, label[plain(inner[0])]))
        elif is_image or len(inner) > 1:
            # Beside the class folders there may be a licence or a label list; inside them and for images there is
            # no telling what the person meant.
            expected = "a class folder around it" if is_image else f"an image ({', '.join(IMAGE_EXTENSIONS)})"
            raise MergeflowError(f"{location.join(parts)}: expected {expected}. Move or remove the file.")
    return items


def _examples(location: Location, items: Sequence[_Item]) -> Iterator[Example]:
    for parts, label in items:
        yield Example(partial(location.read, location.join(parts)), "/".join(parts), label)


def _keys(items: Sequence[_Item]) -> Iterator[tuple[str, int]]:
    for parts, label in items:
        yield "/".join(parts), label
