"""How images are prepared: every kind of source, the transforms, and decoding to one size."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mergeflow.data.address import Maker, Opener, drawn_by, open_source, rooted
from mergeflow.data.arrays import quoted
from mergeflow.data.decoding import Decoded, Decoding, Preparation
from mergeflow.data.locations import Location
from mergeflow.data.task import Example, Place, RawTask, Transform
from mergeflow.data.transforms import LABEL_TRANSFORMS, chance, number
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.tables import load_splits, parse_place
from mergeflow.modalities.vision.images import encode_png, pixel_digest, resize, to_rgb
from mergeflow.modalities.vision.sections import DataSection
from mergeflow.modalities.vision.sources import DEFAULT_TEMPLATES
from mergeflow.modalities.vision.sources.files import find_columns, image_schema, open_folder, open_loose, open_parquet
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS, clip_class_names, find_real_task
from mergeflow.modalities.vision.sources.torchvision import open_torchvision

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PARITY = ("even number", "odd number")


def rotate(value: str, class_names: Sequence[str] | None) -> Transform:
    """Turn every picture counter-clockwise about its centre, bilinear, at its own size; corners become black."""
    angle = number(value)
    if angle is None or not -360 <= angle <= 360:
        raise MergeflowError(f"found '{value}'; expected an angle in degrees from -360 to 360, such as 45 or -22.5.")
    turn = partial(_turned, angle=angle)

    def apply(example: Example, place: Place) -> Example:
        return replace(example, edits=(*example.edits, turn))

    return Transform("", class_names, apply)


def colour(value: str, class_names: Sequence[str] | None) -> Transform:
    """Make the coloured-parity task of digits: label 0 is even, 1 is odd; the digit's strokes are red or green.

    P(red | odd) = r and P(red | even) = 1 - r, drawn for each (seed, split, index).

    Args:
        value: r, from 0 to 1.
        class_names: of the task; each must name a number ("7", "handwritten digit seven"), in any order.

    Source: Arjovsky et al. 2019, "Invariant risk minimization" (coloured digits); without its noise in the labels.
    """
    ratio = number(value)
    if ratio is None or not 0 <= ratio <= 1:
        raise MergeflowError(f"found '{value}'; expected P(red | odd), a number from 0 to 1.")
    names = class_names or ()
    numbers = [_named_number(name) for name in names]
    other = [name for name, number in zip(names, numbers, strict=True) if number is None]
    if other or not names:
        raise MergeflowError(
            f"found {quoted(other) or 'no classes'}; expected classes that name a number, such as '7' or 'handwritten "
            "digit seven': use it on a source of digits."
        )
    odd = [bool(number and number % 2) for number in numbers]

    def apply(example: Example, place: Place) -> Example:
        is_odd = odd[example.label]
        red = chance("colour", place) < (ratio if is_odd else 1 - ratio)
        return replace(example, label=int(is_odd), edits=(*example.edits, partial(_coloured, channel=0 if red else 1)))

    return Transform("", PARITY, apply)


def _turned(rgb: Image.Image, angle: float) -> Image.Image:
    return rgb.rotate(angle, Image.Resampling.BILINEAR)


def _coloured(rgb: Image.Image, channel: int) -> Image.Image:
    """Put the brightness of a picture into one channel."""
    grey, dark = rgb.convert("L"), Image.new("L", rgb.size)
    return Image.merge("RGB", [grey if number == channel else dark for number in range(3)])


def _named_number(name: str) -> int | None:
    """Return the one number that a class name holds, in digits or as a word from zero to nine.

    Example:
        >>> _named_number("handwritten digit seven"), _named_number("12"), _named_number("a cat")
        (7, 12, None)
    """
    words = re.findall(r"\d+|" + "|".join(rf"\b{word}\b" for word in _WORDS), name.lower())
    if len(words) != 1:
        return None
    return int(words[0]) if words[0].isdecimal() else _WORDS.index(words[0])


TRANSFORMS: Mapping[str, Maker] = {**LABEL_TRANSFORMS, "rotate": rotate, "colour": colour}


def image_decoding(image_size: int) -> Decoding:
    """Describe how labelled images become the arrays `images` (uint8 [N, S, S, 3]) and `labels` (int64 [N]).

    Args:
        image_size: S in pixels, at least 1: the shorter side is resized to it, the longer one cropped at its centre.
    """
    if image_size < 1:
        raise MergeflowError(f"image_size is {image_size}; expected at least 1 pixel.")

    decode = partial(_decoded, image_size)
    return Decoding({"image_size": image_size}, decode, image_schema, size=3 * image_size**2 + 8)


def _decoded(image_size: int, example: Example, where: str) -> Decoded:
    """Read and decode one example and derive all that is stored of it.

    `images`, the pixels at S x S, and `labels`; the SHA-256 of the pixels at the original resolution; and for Parquet
    the encoded bytes (the source's own, or a PNG of a drawn or edited image).
    """
    try:
        raw = example.read()
    except OSError as error:
        raise MergeflowError(f"{where}: cannot read image '{example.path}': {error}. Restore the file.") from error
    rgb = to_rgb(raw, f"{where}: image '{example.path}'")
    digest = pixel_digest(rgb)
    rgb = example.edited(rgb)
    encoded = raw if isinstance(raw, bytes) and not example.edits else encode_png(rgb)
    arrays = {"images": resize(rgb, image_size), "labels": np.asarray(example.label, np.int64)}
    row = {"image": {"bytes": encoded, "path": example.path}, "label": example.label}
    return Decoded(arrays, digest, row, len(encoded))


def open_hub(task_name: str, place: str, seed: int, root: Path, columns: Mapping[str, str] | None = None) -> RawTask:
    """Open a data set of the Hugging Face hub as a task; `datasets` downloads it to its own cache once.

    Splits named train, validation (val, valid, dev) and test are used, others are listed as ignored. Real data sets
    whose copy on the hub has bare numbers or truth values for labels get their class names by label.

    Args:
        place: `NAME[#CONFIG][@REVISION]`; NAME one of the real data sets, an id `owner/name`, or a local folder.
    """
    name, config, revision = parse_place(place, root)
    task = find_real_task(name)
    if task is None and "/" not in name and not Path(name).is_dir():
        raise unknown_name("Hugging Face data set", name, REAL_TASKS)
    hub_id = task.hub_id if task else name
    renamed = task.hub_splits if task else {}
    parts, ignored = load_splits(hub_id, config or (task.hub_config if task else None), revision, renamed)
    numbered = task.hub_names if task else ()
    described = {
        split: find_columns(part.features.arrow_schema, f"hf:{place}, {split}", numbered, columns)
        for split, part in parts.items()
    }
    if len({str(description) for description in described.values()}) > 1:
        raise MergeflowError(f"hf:{place}: the splits differ in columns or class names: {described}.")
    import datasets  # `load_splits` says what to do where it is missing

    image, label, names = next(iter(described.values()))
    undecoded = datasets.Image(decode=False)
    rows = {split: part.select_columns([image, label]).cast_column(image, undecoded) for split, part in parts.items()}
    return RawTask(
        name=task_name,
        class_names=clip_class_names(task, names) if task else names,
        templates=task.templates if task else DEFAULT_TEMPLATES,
        splits={split: partial(_examples, part, image, label, split) for split, part in rows.items()},
        seed=seed,
        counts={split: len(part) for split, part in rows.items()},
        ignored_splits=ignored,
        keeps_conflicts=task is not None,
    )


def _examples(part: Any, image: str, label: str, split: str) -> Iterator[Example]:
    for row, cells in enumerate(part):
        cell = cells[image]
        if cell is None or cells[label] is None:
            raise MergeflowError(
                f"{split}, row {row}: no {'image' if cell is None else 'label'}; every row needs both."
            )
        content, path = cell["bytes"], cell["path"] or f"{split}/{row:06d}"
        # Data sets made from a local folder hold only the path of each image.
        yield Example(content if content is not None else partial(_read, path), Path(path).name, int(cells[label]))


def _read(path: str) -> bytes:
    location = Location.open(path)
    return location.read(location.path)


def open_images(
    task_name: str,
    source: str,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    root: str | Path | None = None,
) -> RawTask:
    """Open the images of one task; nothing is decoded yet.

    Args:
        task_name: task name; for `suite:` the name of one of its tasks, where the address does not name one.
        source: `KIND:ADDRESS`. Kinds: `suite:NAME[/TASK]` (embedded), `parquet:PATH_OR_URI`, `folder:PATH_OR_URI`,
            `torchvision:NAME[@ROOT]`, `hf:NAME[#CONFIG][@REVISION]`; the last two with a NAME of the 20 real data
            sets, `hf` also with any id. Transforms may follow: `?classes=5-9&rotate=45`.
        seed: decides which training images become the splits that the source lacks, and the chance in transforms.
        class_names: names that replace the source's own, in the order of the labels.
        templates: prompts with `{}` that replace the source's own. A Parquet or folder source has none: it gets CLIP's
            templates and class names when `task_name` is one of the real 20, else "a photo of a {}.".
        root: folder that relative paths in `source` start from; default the working folder.
    """
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


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how images become arrays at the section's size."""
    return image_decoding(section.image_size)


PREPARATION = Preparation(SOURCES, TRANSFORMS, decoding)
