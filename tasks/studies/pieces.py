"""Pieces of a study's measuring: kept until the study is complete, so that a killed study goes on where it was."""

import copyreg
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.plugins import PRIVATE
from mergeflow.processes import worker_pool
from mergeflow.search.candidates import score_all
from mergeflow.search.line import best_on_line, line
from tasks.project.devices import device_names
from tasks.project.parameters import params_of
from tasks.project.stage import Stage, StageIO
from tasks.project.writing import write_atomically
from tasks.studies.inputs import Accuracy, StudyInputs
from tasks.studies.rows import Row

Opened = TypeVar("Opened")


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


class Once(Generic[Opened]):
    """What is made when it is first asked for, and goes to another process as it is then.

    Args:
        make: makes it.

    Example:
        >>> words = Once(lambda: print("made") or ["a", "b"])
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


def _unpacked(made: bytes) -> Once[Any]:
    return Once(partial(pickle.loads, made))


def kept(io: StageIO, name: str, measure: Callable[[], Row]) -> Row:
    """Return `measure()`, or what it returned before a kill.

    Args:
        io: the stage's files; its scratch folder keeps the pieces until the stage is complete.
        name: of the piece, unique within the stage.
        measure: gives a row of JSON values; called only where the piece is not kept.
    """
    path = _piece(io, name)
    if not path.exists():
        write_atomically(path, json.dumps(measure()))
    row: Row = json.loads(path.read_text())
    return row


def kept_side_by_side(io: StageIO, measures: Mapping[str, Callable[[], Row]], what: str = "pieces") -> list[Row]:
    """Return what `kept` returns for every piece; those that are not kept are measured by `run.workers` processes.

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
    return _kept_in_turn(io, measures, what)


def _kept_in_turn(io: StageIO, measures: Mapping[str, Callable[[], Row]], what: str) -> list[Row]:
    found = []
    for done, (name, measure) in enumerate(measures.items()):
        io.report(what, done, len(measures))
        found.append(kept(io, name, measure))
    return found


def _piece(io: StageIO, name: str) -> Path:
    return io.scratch / "pieces" / f"{name}.json"


def kept_by_seed(io: StageIO, seeds: Sequence[int], measure: Callable[[int], Row], name: str = "seed") -> list[Row]:
    """Return `measure(seed)` of every seed, each kept as the piece `NAME_SEED`.

    Args:
        io: the stage's files.
        seeds: in the order of the rows.
        measure: gives the row of a seed, wherever it is unpickled.
        name: of the pieces, and of what progress counts.
    """
    return kept_all(io, {f"{name}_{seed}": partial(measure, seed) for seed in seeds}, name)


def kept_by_run(inputs: StudyInputs, names: Iterable[str], measure: Callable[[str, int], Row]) -> list[Row]:
    """Return `measure(name, seed)` of every seed of every run, each kept as the piece `NAME_SEED`.

    Args:
        inputs: the study's inputs.
        names: of training runs, in the order of the rows.
        measure: gives the row of a run's seed, wherever it is unpickled.
    """
    asked = [(name, seed) for name in names for seed in inputs.run(name).seeds]
    measures = {f"{name}_{seed}": partial(measure, name, seed) for name, seed in asked}
    return kept_all(inputs.io, measures, "runs and seeds")


def kept_all(io: StageIO, measures: Mapping[str, Callable[[], Row]], what: str) -> list[Row]:
    """Keep the pieces side by side on the processor, one after the other on a device, which is held for one of them.

    Args: As of `kept_side_by_side`.
    """
    keep = kept_side_by_side if device_names(io.params.run.device) == ["cpu"] else _kept_in_turn
    return keep(io, measures, what)


@dataclass(frozen=True)
class ChosenScale:
    """The scale chosen on validation.

    Attributes:
        args: the method's arguments with the scale.
        validation: accuracy per task.
        test: accuracy per task; empty where it was not asked for.
        tried: how many scales were scored.
    """

    args: dict[str, Any]
    validation: Accuracy
    test: Accuracy
    tried: int


def choose_scale(
    inputs: StudyInputs,
    scorer: CandidateScorer,
    method: str,
    scales: Sequence[float],
    start: float,
    args: Mapping[str, Any] | None = None,
    test: bool = True,
) -> ChosenScale:
    """Choose a method's scale on validation, walking the grid from `start` both ways; look at test once.

    Args:
        inputs: the study's inputs.
        scorer: what merges and scores; of `inputs.blind()` where nothing else needs it.
        method: a name of the catalog.
        scales: the grid, rising.
        start: where to begin; the nearest scale is taken.
        args: the method's other arguments.
        test: whether to look at test.
    """
    found = list(score_all(method, line("scale", scales, start, args), scorer.candidate, mean))
    best = best_on_line(found, "scale")
    accuracy = inputs.accuracy(scorer.merge(best.call), "test") if test else {}
    return ChosenScale(best.varied, best.scores, accuracy, len(found))


def grid(low: float, high: float, step: float) -> list[float]:
    """Return low, low + step, … high.

    Args:
        low: the first value.
        high: the last, a whole number of steps above.
        step: > 0.

    Example:
        >>> grid(0.8, 1.0, 0.05)
        [0.8, 0.85, 0.9, 0.95, 1.0]
    """
    return [round(low + step * index, 10) for index in range(round((high - low) / step) + 1)]
