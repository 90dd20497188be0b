"""Experts that somebody published: checkpoints that a run of studies/params.yaml names are taken without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint
from mergeflow.errors import MergeflowError


def take_experts(root: Path, pattern: str, tasks: Sequence[str], seed: int, base: Path, folder: Path) -> None:
    """Write `experts/<task>` below `folder` from checkpoints in any format that `mergeflow merge` reads.

    Args:
        root: the project, which the pattern is relative to.
        pattern: a path with `{task}`, and `{seed}` if there is more than one seed.
        tasks: names.
        seed: the seed asked for.
        base: checkpoint of θ0, whose tensors the experts must have.
        folder: where the result is built.

    Raises:
        MergeflowError: listing every checkpoint that is not there, or does not have the base's names and shapes.
    """
    paths = {task: root / pattern.format(task=task, seed=seed) for task in tasks}
    with open_checkpoint(base) as state:
        wanted = {name: tuple(info.shape) for name, info in state.infos.items()}
    faults = [fault for task, path in paths.items() for fault in _faults(task, path, wanted)]
    if faults:
        raise MergeflowError(
            f"checkpoints: {pattern} cannot be the experts of this project:\n  " + "\n  ".join(faults) + "\nName one "
            "checkpoint for each task, fine-tuned from the project's base, with the base's names of tensors."
        )
    for task, path in paths.items():
        write_checkpoint(folder / "experts" / task / layout.MODEL_FILE, read_state(path))


def _faults(task: str, path: Path, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    try:
        with open_checkpoint(path) as state:
            found = {name: tuple(info.shape) for name, info in state.infos.items()}
    except MergeflowError as error:
        return [f"{task}: {error}"]
    faults = []
    if missing := sorted(wanted.keys() - found.keys()):
        faults.append(f"{task}: {path} lacks {len(missing)} tensors of the base, among them {missing[0]}")
    if more := sorted(found.keys() - wanted.keys()):
        faults.append(f"{task}: {path} has {len(more)} tensors that the base lacks, among them {more[0]}")
    return faults + [
        f"{task}: {name} has shape {found[name]}, the base's has {shape}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
