"""The address of a data source, `KIND:PLACE[?TRANSFORM=VALUE[&...]]`, and opening it."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from mergeflow.application import make_importable
from mergeflow.data.task import Example, RawTask, Transform
from mergeflow.errors import MergeflowError, unknown_name

# (task name, place, seed, folder that relative paths start from) -> the task; nothing is decoded yet. An opener of
# tables has a parameter `columns` too: the names of the columns by what they are, `{"text": "body"}`.
Opener: TypeAlias = Callable[..., RawTask]
# (value, class names so far) -> the transform; raises a MergeflowError that says what the value must be.
Maker: TypeAlias = Callable[[str, Sequence[str] | None], Transform]

_KIND = re.compile(r"([A-Za-z][\w-]*):(?!//)")
# Parts of an address that say something of the whole source, and the values that each takes.
_CONFLICTS, _VALIDATION = "conflicts", "validation"
OF_THE_SOURCE = {_CONFLICTS: ("keep",), _VALIDATION: ("join", "drop")}
COLUMNS = ("image", "text", "text_pair", "label")  # which column of a table is which


@dataclass(frozen=True)
class Address:
    """A source, cut into its parts."""

    kind: str
    place: str  # what is between the kind and the transforms
    transforms: tuple[tuple[str, str], ...] = ()  # (name, value), in order

    @property
    def paths(self) -> list[str]:
        """The files and folders that a reader may open for it, up to the first wildcard.

        That is PLACE, ROOT where it is `NAME@ROOT`, and `inputs/KIND` where it is a name alone.
        """
        name, at, root = self.place.partition("@")
        paths = [self.place, *([root] if at else [default_root(self.kind)] if self.kind and "/" not in name else [])]
        return [re.sub(r"/?[^/]*[*?\[].*", "", path) for path in paths]


def default_root(kind: str) -> str:
    """Return the folder in which a kind of source keeps files whose place the address leaves out."""
    return f"inputs/{kind}"


def parse_address(source: str) -> Address:
    """Cut a source into kind, place and transforms; a `?` that belongs to the place is written `%3F`.

    Example:
        >>> parse_address("torchvision:MNIST?rotate=45&fraction=.1")
        Address(kind='torchvision', place='MNIST', transforms=(('rotate', '45'), ('fraction', '.1')))
        >>> parse_address("inputs/pets").kind
        ''
    """
    match = _KIND.match(source)
    kind, rest = (match[1], source[match.end() :]) if match else ("", source)
    place, _, query = rest.partition("?") if kind else (rest, "", "")
    pairs = [part.partition("=") for part in query.split("&")] if query else []
    return Address(kind, place.replace("%3F", "?"), tuple((name, value) for name, _, value in pairs))


def rooted(place: str, root: Path) -> str:
    """Return a path with `root` before it where it is relative; a URI as it is.

    Example:
        >>> rooted("raw/pets", Path("project")), rooted("s3://bucket/pets", Path("project"))
        ('project/raw/pets', 's3://bucket/pets')
    """
    return place if "://" in place else str(root / place)


def open_source(
    task_name: str,
    source: str,
    openers: Mapping[str, Opener],
    transforms: Mapping[str, Maker],
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    root: str | Path | None = None,
) -> RawTask:
    """Open the data of one task.

    Args:
        source: `KIND:PLACE`, or with transforms `KIND:PLACE?rotate=45&fraction=.1`, applied from left to right.
        openers, transforms: that the modality knows, by name.
        seed: decides which training examples become the splits that the source lacks, and the chance in transforms.
        class_names: names that replace the source's own, in the order of the labels.
        templates: prompts with `{}` that replace the source's own.
        root: folder that relative paths in `source` start from; default the working folder. The manifest records
            `source` as it was given, so that it does not depend on where a project lies.
    """
    address = parse_address(source)
    kind = address.kind or source
    if kind not in openers:
        raise unknown_name("kind of data source", kind, openers)
    if not address.kind or not address.place:
        raise MergeflowError(f"task '{task_name}': source '{source}' has no address; expected '{kind}:ADDRESS'.")
    raw = replace(_opened(task_name, address, openers[address.kind], seed, Path(root or "")), source=source)
    if templates is not None:
        raw = replace(raw, templates=tuple(templates))
    if class_names is not None:
        if len(class_names) != len(raw.strata):
            raise MergeflowError(
                f"task '{task_name}': {len(class_names)} class names given, but {source} has {len(raw.strata)} "
                f"classes ('{raw.strata[0]}' to '{raw.strata[-1]}'). Give one name for each."
            )
        raw = replace(raw, class_names=tuple(class_names))
    raw, faults = derived(raw, transforms)
    if faults:
        raise MergeflowError("\n".join(f"task '{task_name}', source '{source}', {fault}" for fault in faults))
    return raw


def _opened(task_name: str, address: Address, opener: Opener, seed: int, root: Path) -> RawTask:
    """Open the task at a place, with the columns that the address chooses if it is a table."""
    columns = {name: value for name, value in address.transforms if name in COLUMNS}
    if not columns:
        return opener(task_name, address.place, seed, root)
    if fault := column_fault(address, opener):
        raise MergeflowError(f"task '{task_name}': {fault}.")
    return opener(task_name, address.place, seed, root, columns=columns)


def column_fault(address: Address, opener: Opener) -> str | None:
    """Say that an address chooses columns of what is no table; None where it does not."""
    column = next((name for name, _ in address.transforms if name in COLUMNS), None)
    if column is None or "columns" in signature(opener).parameters:
        return None
    return f"{address.kind}: is no table, so `{column}=` chooses nothing"


def checked_columns(
    names: Sequence[str], where: str, chosen: Mapping[str, str], roles: Collection[str]
) -> Mapping[str, str]:
    """Return the chosen columns of a table by what they are; all are there. Messages call the table `where`."""
    for role, name in chosen.items():
        if role not in roles or (role == "text_pair" and "text" not in chosen):
            expected = "choose `text` too" if role in roles else f"expected {' or '.join(roles)}"
            raise MergeflowError(f"{where}: `{role}={name}` chooses no column here; {expected}.")
        if name not in names:
            raise MergeflowError(f"{where}: {unknown_name('column', name, names)}")
    if len(set(chosen.values())) < len(chosen):
        raise MergeflowError(f"{where}: {' and '.join(chosen)} are one column; expected columns that differ.")
    return chosen


def derived(raw: RawTask, makers: Mapping[str, Maker]) -> tuple[RawTask, list[str]]:
    """Return a task with the transforms of its source's address, and every fault in them."""
    faults = []
    for name, value in parse_address(raw.source).transforms:
        if name in COLUMNS:
            continue
        try:
            if value not in OF_THE_SOURCE.get(name, (value,)):
                raise MergeflowError(f"found '{value}'; expected {' or '.join(map(repr, OF_THE_SOURCE[name]))}.")
            if name == _CONFLICTS:
                raw = replace(raw, keeps_conflicts=True)
            elif name == _VALIDATION:
                raw = _without_validation(raw, joined=value == "join")
            elif name not in makers:
                raise unknown_name("transform", name, [*makers, *OF_THE_SOURCE, *COLUMNS])
            else:
                made = replace(makers[name](value, raw.derived_names), text=f"{name}={value}")
                raw = replace(raw, transforms=(*raw.transforms, made))
        except MergeflowError as error:
            faults.append(f"{name}={value}: {error}")
    return raw, faults


def _without_validation(raw: RawTask, joined: bool) -> RawTask:
    """Return the task without the source's validation split, so that one is carved from train."""
    parts = [part for part in ("train", "validation") if part in raw.splits and (joined or part == "train")]

    def examples() -> Iterator[Example]:
        return chain.from_iterable(raw.splits[part]() for part in parts)

    def keys() -> Iterator[tuple[str, int]]:
        return chain.from_iterable(map(raw.list_keys, parts))

    splits = {"train": examples, **{split: read for split, read in raw.splits.items() if split == "test"}}
    listed = {"train": keys, **{split: read for split, read in raw.keys.items() if split == "test"}}
    counts = {split: count for split, count in raw.counts.items() if split == "test"}
    if all(part in raw.counts for part in parts):
        counts["train"] = sum(raw.counts[part] for part in parts)
    ignored = sorted({*raw.ignored_splits, *(set(raw.splits) - {*parts, "test"})})
    return replace(raw, splits=splits, keys=listed, counts=counts, ignored_splits=ignored)


def drawn_by(module: str) -> Opener:
    """Return the opener of a kind `suite:`, whose module is imported when a task of it is first opened."""

    def open_drawn(task: str, place: str, seed: int, root: Path) -> RawTask:
        make_importable()
        raw: RawTask = import_module(module).open_suite(task, place, seed, root)
        return raw

    return open_drawn
