"""Validate params.yaml before a run changes anything."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from mergeflow.data.address import COLUMNS, Address, column_fault, derived, parse_address
from mergeflow.data.decoding import Preparation
from mergeflow.data.locations import Location, list_shards
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging import configure
from mergeflow.merging.catalog import METHODS
from mergeflow.modalities.preparing import find_preparation
from mergeflow.modalities.vision.sources.real_tasks import get_real_task
from mergeflow.schema import refusal
from mergeflow.search.candidates import grid_of
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph
from tasks.project.parameters import Params, load_params
from tasks.project.stage import INPUTS, covers

BASE = "base"  # the stage that makes the base


def validate_params(root: Path) -> Params:
    """Read and validate params.yaml with the sources of its tasks, as far as their addresses say; no data are read."""
    path = root / "params.yaml"
    read_yaml(path)  # first: a file that cannot be read is told before what it would name
    METHODS.names()  # a file that cannot be loaded is told once, not for each method in params.yaml
    params = load_params(path)
    preparation = find_preparation(params.lookup("model.modality"))
    graph = load_graph(root)
    faults = [
        f"tasks.{task}: {fault}"
        for task, source in params.tasks.items()
        for fault in source_faults(task, source, preparation, None if graph[f"prepare@{task}"].frozen else root)
    ] + list(_sweep_faults(params))
    if not graph[BASE].frozen:
        faults += _base_faults(params, root)
    if faults:
        raise refusal(path.name, faults)
    return params


def source_faults(task: str, source: str, preparation: Preparation, root: Path | None) -> Iterator[str]:
    """Yield what keeps a task's data from being prepared; without a root only what its address says by itself."""
    address = parse_address(source)
    kinds = ", ".join(sorted(preparation.sources))
    if not address.kind:
        yield f"'{source}' does not begin with its kind: write KIND:{source}, with one of the kinds {kinds}"
    elif address.kind not in preparation.sources:
        yield str(unknown_name("kind of data source", address.kind, preparation.sources))
    elif not address.place:
        yield f"'{source}' has no address; expected '{address.kind}:ADDRESS'"
    elif root and _is_missing(address.paths[0], root, path=address.kind in _PATHS):
        yield f"'{address.place}': no such file or folder"
    elif fault := column_fault(address, preparation.sources[address.kind]) or _unknown_column(task, address, root):
        yield fault
    else:
        yield from _option_faults(task, address, source, preparation, root)


def _unknown_column(task: str, address: Address, root: Path | None) -> str | None:
    """Say that an address chooses a column that local files lack: their head is read, of JSON Lines what it takes."""
    chosen = [name for role, name in address.transforms if role in COLUMNS]
    if not root or not chosen or address.kind not in _TABLES or "://" in address.place:
        return None
    try:
        location = Location.open(str(root / address.place))
        path = list_shards(location, task, address.kind)["train"][0]
        with location.open_file(path) as stream:
            names = _TABLES[address.kind](stream, chosen)
    except (MergeflowError, OSError, ValueError, TypeError, NotImplementedError, csv.Error):
        return None  # the stage says what is wrong with the files
    return next(
        (f"{Path(path).name}: {unknown_name('column', name, names)}" for name in chosen if name not in names), None
    )


def _of_parquet(stream: IO[bytes], chosen: Sequence[str]) -> Sequence[str]:
    from pyarrow.parquet import read_schema

    return list(read_schema(stream).names)


def _of_lines(stream: IO[bytes], chosen: Sequence[str]) -> Sequence[str]:
    """Return the keys of rows until all that are chosen were there: a row may lack some."""
    names: dict[str, None] = {}
    for line in stream:
        names |= dict.fromkeys(json.loads(line.decode("utf-8-sig")) if line.strip() else ())
        if names.keys() >= set(chosen):
            break
    return list(names)


def _of_csv(stream: IO[bytes], chosen: Sequence[str]) -> Sequence[str]:
    from mergeflow.modalities.tables import separator

    head = stream.readline().decode("utf-8-sig")
    return next(csv.reader([head], delimiter=separator(head)), [])


def _of_tsv(stream: IO[bytes], chosen: Sequence[str]) -> Sequence[str]:
    return stream.readline().decode("utf-8-sig").rstrip("\r\n").split("\t")


# The names of a file's columns by its kind: (stream, chosen ones) -> names.
_TABLES = {"parquet": _of_parquet, "jsonl": _of_lines, "csv": _of_csv, "tsv": _of_tsv}
_PATHS = ("folder", "parquet", "jsonl", "csv", "tsv")  # kinds whose place is a path or a URI
# Classes that a source may have which is not opened: none, two, ten, many. An option is wrong if it is for all of them.
_CLASSES = (None, *(tuple(map(str, range(count))) for count in (10_000, 2, 10)))


def _option_faults(
    task: str, address: Address, source: str, preparation: Preparation, root: Path | None
) -> Iterator[str]:
    """Yield what is wrong with a name of drawn or real data, and with the values of an address's options."""
    names: Sequence[Sequence[str] | None] = _CLASSES
    try:
        if root and address.kind == "torchvision":
            get_real_task(address.place.partition("@")[0])
        elif root and address.kind == "suite":  # it draws examples on demand: opening it reads nothing
            names = [preparation.sources["suite"](task, address.place, 0, root).class_names]
    except MergeflowError as error:
        yield str(error)
        return
    faults: list[str] = []
    for classes in names:
        raw = RawTask(task, classes, None, {"train": lambda: iter(())}, source=source)
        faults = derived(raw, preparation.transforms)[1]
        if not faults:
            return
    yield from faults


def check_base(root: Path, params: Params) -> None:
    """Refuse a base that the stage `base` could not make, as far as its names and settings say."""
    from mergeflow.modalities.catalog import MODALITIES  # here, because it imports torch

    check = MODALITIES.get(params.lookup("model.modality")).check_base
    try:
        if check is not None:
            check(params.model, params.data, root)
    except MergeflowError as error:
        raise MergeflowError(f"params.yaml, model and data: {error}") from None


def _base_faults(params: Params, root: Path) -> Iterator[str]:
    """Yield which paths of the base and of its tokenizer lead nowhere."""
    for section in ("model", "data"):
        for key, value in params.lookup_json(section).items():
            if isinstance(value, str) and _is_missing(value, root):
                yield f"{section}.{key}: '{value}': no such file or folder"


def _sweep_faults(params: Params) -> Iterator[str]:
    """Yield which methods no stage can merge by: a stage has the experts' weights, all of them, and nothing else."""
    for name, grid in params.sweep.items():
        method, count = METHODS.get(name), len(params.tasks)
        if method.given:
            statistics = ", ".join(statistic.name for statistic in method.given)
            yield (
                f"sweep.{name}: it goes by statistics of examples ({statistics}), "
                "which no stage takes: leave it out, and merge by it with a recipe (`mergeflow docs sweep`)"
            )
        least, most = method.experts
        if count < least or (most is not None and count > most):
            yield f"sweep.{name}: it takes {_some(least, 'expert')}, and params.yaml has {_some(count, 'task')}"
        for args in grid_of(name, grid):
            try:
                configure(name, args).arguments.check_experts(count)
            except MergeflowError as error:
                yield f"sweep.{name}: {error}"


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _is_missing(place: str, root: Path, path: bool = False) -> bool:
    """Whether the place is surely a path where nothing is; what other places mean, their readers alone know.

    Args:
        path: Whether it is one wherever it is no URI.
    """
    surely = (path and "://" not in place) or covers(INPUTS, place) or place.startswith(("/", "./", "../"))
    return surely and not (root / place).exists()
