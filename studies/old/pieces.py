"""What the studies that are still folders call the caching by."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from studies.lab.caching import Lazy as Once
from studies.lab.caching import cached as kept
from studies.lab.caching import cached_all as kept_all
from studies.lab.caching import cached_in_processes as kept_side_by_side
from studies.lab.inputs import ChosenScale, Laboratory, choose_scale, grid
from studies.old.rows import Row
from tasks.project.stage import StageIO

__all__ = [
    "ChosenScale",
    "Once",
    "choose_scale",
    "grid",
    "kept",
    "kept_all",
    "kept_by_run",
    "kept_by_seed",
    "kept_side_by_side",
]


def kept_by_seed(io: StageIO, seeds: Sequence[int], measure: Callable[[int], Row], name: str = "seed") -> list[Row]:
    """Return `measure(seed)` of every seed, each kept as the piece `NAME_SEED`.

    Args:
        io: the stage's files.
        seeds: in the order of the rows.
        measure: gives the row of a seed, wherever it is unpickled.
        name: of the pieces, and of what progress counts.
    """
    return kept_all(io, {f"{name}_{seed}": partial(measure, seed) for seed in seeds}, name)


def kept_by_run(inputs: Laboratory, names: Iterable[str], measure: Callable[[str, int], Row]) -> list[Row]:
    """Return `measure(name, seed)` of every seed of every run, each kept as the piece `NAME_SEED`.

    Args:
        inputs: the study's inputs.
        names: of training runs, in the order of the rows.
        measure: gives the row of a run's seed, wherever it is unpickled.
    """
    asked = [(name, seed) for name in names for seed in inputs.run(name).seeds]
    measures = {f"{name}_{seed}": partial(measure, name, seed) for name, seed in asked}
    return kept_all(inputs.io, measures, "runs and seeds")
