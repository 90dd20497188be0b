"""Labelled images in files: folders of class folders, and Parquet in the image convention of Hugging Face."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mergeflow.data.address import checked_columns
from mergeflow.data.locations import SPLIT_ALIASES, Location, list_shards, split_of
from mergeflow.data.task import Example, RawTask, plain
from mergeflow.errors import MergeflowError

METADATA_KEY = b"huggingface"
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
EXPECTED = (
    "one image column of type struct<bytes: binary, path: string>, one integer label column, and ClassLabel names "
    "for it in the schema metadata under 'huggingface'"
)


def image_schema(class_names: Sequence[str] | None) -> pa.Schema:
    """Return the schema that `datasets` reads back as {image: Image(), label: ClassLabel(names)}."""
    features = {"image": {"_type": "Image"}, "label": {"names": list(class_names or ()), "_type": "ClassLabel"}}
    metadata = json.dumps({"info": {"features": features}}, ensure_ascii=False)
    return pa.schema([("image", IMAGE_TYPE), ("label", pa.int64())], metadata={METADATA_KEY: metadata.encode()})


def find_columns(
    schema: pa.Schema, where: str, numbered: Sequence[str] = (), chosen: Mapping[str, str] | None = None
) -> tuple[str, str, list[str]]:
    """Return (image column, label column, class names) of a schema in the convention.

    A column that the metadata declares as Image or ClassLabel wins; among several, one named `image` or `label`.

    Args:
        numbered: class names by label for data whose labels are bare numbers or truth values; else there is an error.
        chosen: the names of columns that are chosen, by what they are: `image`, `label`.
    """
    chosen = checked_columns(schema.names, where, chosen or {}, ("image", "label"))
    features = _features(schema, where)
    declared = {kind: [n for n, f in features.items() if _is(f, kind)] for kind in ("Image", "ClassLabel")}

    def is_label(column: pa.DataType) -> bool:
        return pa.types.is_integer(column) or (bool(numbered) and pa.types.is_boolean(column))

    images = declared["Image"] or [field.name for field in schema if _is_image_type(field.type)]
    labels = declared["ClassLabel"] or [field.name for field in schema if is_label(field.type)]
    image = chosen.get("image") or _choose(images, "image")
    label = chosen.get("label") or _choose(labels, "label")
    wrong = None
    if image is None or image not in schema.names or not _is_image_type(schema.field(image).type):
        wrong = "no single image column"
    elif label is None or label not in schema.names or not is_label(schema.field(label).type):
        wrong = "no single integer label column"
    elif label not in declared["ClassLabel"] and not numbered:
        wrong = f"no ClassLabel names for column '{label}'"
    if wrong or image is None or label is None:
        fields = ", ".join(f"{field.name}: {field.type}" for field in schema) or "no columns"
        raise MergeflowError(
            f"{where}: {wrong}. Columns found: {fields}. Expected: {EXPECTED}. Choose columns by "
            "`?image=NAME&label=NAME`, or write the file with datasets' to_parquet or push_to_hub."
        )
    return image, label, [*map(str, features[label]["names"] if label in declared["ClassLabel"] else numbered)]


def _features(schema: pa.Schema, where: str) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        return {}
    try:
        features = json.loads(raw)["info"]["features"]
    except (ValueError, KeyError, TypeError) as error:
        raise MergeflowError(
            f"{where}: the schema metadata under 'huggingface' is not readable ({error!r}). Expected: {EXPECTED}."
        ) from error
    return features if isinstance(features, dict) else {}


def _is(feature: Any, kind: str) -> bool:
    if not isinstance(feature, dict) or feature.get("_type") != kind:
        return False
    return kind != "ClassLabel" or isinstance(feature.get("names"), list)


def _is_image_type(column: pa.DataType) -> bool:
    if not pa.types.is_struct(column):
        return False
    fields = {field.name: field.type for field in column}
    return "path" in fields and fields.get("bytes") in (pa.binary(), pa.large_binary())


def _choose(names: Sequence[str], preferred: str) -> str | None:
    if len(names) == 1:
        return names[0]
    return preferred if preferred in names else None


IMAGE_EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_LAYOUT = "FOLDER/CLASS/IMAGE, or FOLDER/train/CLASS/IMAGE with validation/ and test/ next to train/"

_Item = tuple[tuple[str, ...], int]  # path parts from the root, label


def open_folder(task_name: str, uri: str, templates: Sequence[str], seed: int) -> RawTask:
    """Open a folder of class folders as a task; the class names are the folder names, sorted.

    Args:
        uri: path or fsspec URI of the folder. When it holds a folder `train`, its folders are splits (train;
            validation, val or valid; test) and the class folders are below; else its folders are the classes.
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


_BATCH_ROWS = 16


def open_parquet(
    task_name: str, uri: str, templates: Sequence[str], seed: int, chosen: Mapping[str, str] | None = None
) -> RawTask:
    """Open a folder of Parquet shards, or one Parquet file, as a task.

    Args:
        uri: path or fsspec URI. A folder holds shards named after their split (also val, valid, dev), directly, in
            `data/` or in one folder per split. One file is a training split from which the others are carved.
    """
    location = Location.open(uri)
    shards = list_shards(location, task_name)
    columns: dict[str, tuple[str, str, list[str]]] = {}
    counts: dict[str, int] = {}
    for split, paths in shards.items():
        for path in paths:
            with _parquet(location, path) as file:
                columns[path] = find_columns(file.schema_arrow, path, chosen=chosen)
                counts[split] = counts.get(split, 0) + file.metadata.num_rows
    first = shards["train"][0] if "train" in shards else next(iter(columns))
    for path, in_file in columns.items():
        if in_file != columns[first]:
            raise MergeflowError(
                f"{path}: columns and class names are {in_file}, but those of {first} are {columns[first]}. "
                "All shards of a task must agree: write them again together."
            )
    image, label, class_names = columns[first]
    return RawTask(
        name=task_name,
        class_names=class_names,
        templates=templates,
        splits={split: partial(_parquet_examples, location, paths, image, label) for split, paths in shards.items()},
        seed=seed,
        counts=counts,
        keys={split: partial(_parquet_keys, location, paths, image, label) for split, paths in shards.items()},
    )


@contextmanager
def _parquet(location: Location, path: str) -> Iterator[pq.ParquetFile]:
    try:
        # Buffered, not pre-buffered: memory stays at a few pages whatever the size of the row groups.
        with location.open_file(path) as stream:
            yield pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
    except (pa.ArrowInvalid, pa.ArrowIOError, pa.ArrowNotImplementedError) as error:
        raise MergeflowError(
            f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}). It may be truncated: download or "
            "write it again."
        ) from error


def _batches(location: Location, paths: Sequence[str], columns: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for path in paths:
        with _parquet(location, path) as file:
            row = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                yield path, row, batch.to_pydict()
                row += batch.num_rows


def _parquet_examples(location: Location, paths: Sequence[str], image: str, label: str) -> Iterator[Example]:
    for path, start, batch in _batches(location, paths, [image, label]):
        for row, (cell, value) in enumerate(zip(batch[image], batch[label], strict=True), start=start):
            if value is None or cell is None or cell["bytes"] is None:
                missing = "label" if value is None else "image bytes"
                raise MergeflowError(
                    f"{path}, row {row}: no {missing}. Expected every row to hold a label and the image itself; "
                    "a snapshot that only names image files must be written again with the images embedded."
                )
            yield Example(cell["bytes"], _name(cell, path, row), value)


def _parquet_keys(location: Location, paths: Sequence[str], image: str, label: str) -> Iterator[tuple[str, int]]:
    for path, start, batch in _batches(location, paths, [f"{image}.path", label]):
        for row, (cell, value) in enumerate(zip(batch[image], batch[label], strict=True), start=start):
            yield _name(cell, path, row), -1 if value is None else value


def _name(cell: dict[str, Any] | None, path: str, row: int) -> str:
    """Return the image's own path, or its place in the shard when it has none."""
    return (cell and cell["path"]) or f"{path.rsplit('/', 1)[-1]}#{row}"
