"""Pieces of a study's measuring: kept until the study is complete, so that a killed study goes on where it was."""

import copyreg
import json
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import as_completed
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from mergeflow.checkpoints.writer import write_atomically
from mergeflow.plugins import PRIVATE
from mergeflow.processes import worker_pool
from tasks.project.devices import device_names
from tasks.project.parameters import params_of
from tasks.project.stage import Stage, StageIO

Opened = TypeVar("Opened")
Piece = dict[str, Any]
"""JSON values of one piece of measuring."""


def _packed(io: StageIO) -> tuple[Callable[..., StageIO], tuple[Any, ...]]:
    """Say how the files of a stage go to another process: there they report nothing and hold no device."""
    params = io.params.model_dump()  # their class is made for the project's modality, and has no module
    return _stage_io, (io.stage, io.root, io.scratch, params, io.studies, io.withheld)


def _stage_io(
    stage: Stage, root: Path, scratch: Path, params: dict[str, Any], studies: Any, withheld: tuple[str, ...]
) -> StageIO:
    own = params_of(params["model"]).model_validate(params)
    return StageIO(stage, root, scratch, own, studies, withheld=withheld)


copyreg.pickle(StageIO, _packed)


class Lazy(Generic[Opened]):
    """What is made when it is first asked for, and goes to another process as it is then.

    Args:
        make: makes it.

    Example:
        >>> words = Lazy(lambda: print("made") or ["a", "b"])
        >>> words(), words()
        made
        (['a', 'b'], ['a', 'b'])
    """

    def __init__(self, make: Callable[[], Opened]) -> None:
        self._make = cache(make)
        # As bytes: torch would put tensors into shared memory, of which a container has little. Every piece has them.
        self._packed = cache(lambda: pickle.dumps(self()))

    def __call__(self) -> Opened:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._packed(),)


def _unpacked(made: bytes) -> Lazy[Any]:
    return Lazy(partial(pickle.loads, made))


def cached(io: StageIO, name: str, measure: Callable[[], Piece]) -> Piece:
    """Return `measure()`, or what it returned before a kill.

    Args:
        io: the stage's files; its scratch folder keeps the pieces until the stage is complete.
        name: of the piece, unique within the stage.
        measure: gives a row of JSON values; called only where the piece is not kept.
    """
    path = _piece(io, name)
    if not path.exists():
        write_atomically(path, json.dumps(measure()))
    row: Piece = json.loads(path.read_text())
    return row


def cached_in_processes(io: StageIO, measures: Mapping[str, Callable[[], Piece]], what: str = "pieces") -> list[Piece]:
    """Return what `cached` returns for every piece; those that are not kept are measured by `run.workers` processes.

    What lies in the project's own folder, which no other process can import by name, is measured here in turn.

    Args:
        io: the stage's files and parameters.
        measures: by the piece's name, what measures it; a process gets it pickled. No result depends on the others.
        what: what progress counts.
    """
    missing = [name for name in measures if not _piece(io, name).exists()]
    workers = min(io.params.run.workers, len(missing))
    if workers > 1 and not any(PRIVATE.encode() in pickle.dumps(measures[name]) for name in missing):
        with worker_pool(workers) as pool:
            names = {pool.submit(measures[name]): name for name in missing}
            try:
                for future in as_completed(names):
                    write_atomically(_piece(io, names.pop(future)), json.dumps(future.result()))
                    io.report(what, len(measures) - len(names), len(measures))
            finally:
                pool.shutdown(cancel_futures=True)
    return _cached_in_turn(io, measures, what)


def _cached_in_turn(io: StageIO, measures: Mapping[str, Callable[[], Piece]], what: str) -> list[Piece]:
    found = []
    for done, (name, measure) in enumerate(measures.items()):
        io.report(what, done, len(measures))
        found.append(cached(io, name, measure))
    return found


def _piece(io: StageIO, name: str) -> Path:
    return io.scratch / "pieces" / f"{name}.json"


def cached_all(io: StageIO, measures: Mapping[str, Callable[[], Piece]], what: str) -> list[Piece]:
    """Keep the pieces side by side on the processor, one after the other on a device, which is held for one of them.

    Args: As of `cached_in_processes`.
    """
    keep = cached_in_processes if device_names(io.params.run.device) == ["cpu"] else _cached_in_turn
    return keep(io, measures, what)
