"""Which steps of a recipe are computed as they are read and which are written first, and where."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.fingerprint import matches
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.engine import treats_elements_alone
from mergeflow.merging.files.inputs import Inputs
from mergeflow.merging.files.lock import lock_file
from mergeflow.merging.files.mixture import Mixture
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.step_fields import Slices, step_named

_RECORD = "steps.json"


def steps_to_write(recipe: Recipe, inputs: Inputs) -> tuple[str, ...]:
    """Return the steps whose results must be files, each after those it reads.

    A step is computed as it is read where that computes nothing twice: its result is read once, in pieces that its
    method can make one by one. Else its result is written first.

    Args:
        recipe: The recipe.
        inputs: Its inputs, opened with no step written.
    """
    steps = dict(recipe.steps or ())
    reads = {name: [found for path in step.paths() if (found := step_named(path))] for name, step in steps.items()}
    order = [name for name in TopologicalSorter(reads).static_order() if name in steps]
    readers: dict[str, Recipe | Slices | Mixture] = {"": recipe, **steps}
    written: list[str] = []
    times = {"": 1}  # how often a reader's own result is read
    # What an adapter is made of is read again for what it stores whole.
    again = {"": 1 if recipe.adapter is None else 2}
    for name in reversed(order):
        read, alone = 0, True
        for reader, step in readers.items():
            count = _count(step, name)
            if count:
                read += count * _passes(reader, step, times, inputs) * again.get(reader, 1)
                alone &= _fit(inputs, name, reader, step)
        times[name] = read
        step = steps[name]
        # Files of a tokenizer of its own lie beside its weights.
        if isinstance(step, Recipe) and (read > 1 or not alone or step.tokenizer is not None):
            written.append(name)
    return tuple(reversed(written))


def _count(step: Recipe | Slices | Mixture, name: str) -> int:
    """Return how often a reader reads a step's result when it reads its inputs once."""
    if not isinstance(step, Slices):
        return sum(step_named(path) == name for path in step.paths())
    blocks = [one.layers for one in step if step_named(one.model) == name]
    apart = all(a and b and (a[1] <= b[0] or b[1] <= a[0]) for at, a in enumerate(blocks) for b in blocks[:at])
    return min(len(blocks), 1) if apart else len(blocks)


def _passes(reader: str, step: Recipe | Slices | Mixture, times: Mapping[str, int], inputs: Inputs) -> int:
    """Return how often a reader reads its inputs."""
    if not isinstance(step, Recipe):
        return times[reader]
    model = inputs.model if reader == "" else inputs.steps[reader].inputs.model
    return 1 + sum(one.only is None for one in step.call().method.passes(step.call().arguments, model.dtype))


def _fit(inputs: Inputs, name: str, reader: str, step: Recipe | Slices | Mixture) -> bool:
    """Whether a step's method makes what its reader asks for, blocks or whole tensors, without work done twice."""
    if name not in inputs.steps:
        return True
    made = inputs.steps[name].inputs
    whole = [key for key in made.model.shapes if not treats_elements_alone(made.call, made.model, key)]
    if not isinstance(step, Recipe):
        return not whole
    found = inputs if reader == "" else inputs.steps[reader].inputs
    shapes = found.model.shapes
    return all(key in shapes and not treats_elements_alone(found.call, found.model, key) for key in whole)


class StepFolder:
    """The temporary folder beside an output that holds the results of steps; a merge that ends well removes it.

    Attributes:
        path: The folder.
        finished: Of each step that is done, all that it was made of, its fingerprint and its inputs' ones.
    """

    def __init__(self, target: Path) -> None:
        self.path = Path(os.path.abspath(target)).parent / f".{target.name}.steps"
        self.finished: dict[str, dict[str, Any]] = {}

    def begin(self, resume: bool) -> None:
        """Make the folder; of a stopped merge to resume the steps that are done stay.

        Raises:
            MergeflowError: The folder's place is taken by what no merge made, or cannot be written.
        """
        record = self.path / _RECORD
        empty = self.path.is_dir() and not any(self.path.iterdir())
        if os.path.lexists(self.path) and not (record.is_file() or empty):
            raise MergeflowError(f"'{self.path}', where results of steps belong, was not made by a merge: move it.")
        try:
            if resume and record.is_file():
                self.finished = dict(json.loads(record.read_bytes()))
            elif self.path.exists():
                shutil.rmtree(self.path)
        except (OSError, ValueError, TypeError):
            shutil.rmtree(self.path, ignore_errors=True)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MergeflowError(f"cannot write '{self.path}': {error.strerror}. Choose another place.") from None
        self._record()

    def kept(self, name: str, identity: Mapping[str, Any]) -> bool:
        """Whether a step's result is there, made of the same, with the bits that were written."""
        known = self.finished.get(name, {})
        if known.get("identity") != dict(identity):
            return False
        try:
            with open_checkpoint(self.path / name) as state:
                return matches(state, known["fingerprint"])
        except MergeflowError:
            return False

    def finish(self, name: str, identity: Mapping[str, Any], result: str, inputs: Mapping[str, str]) -> None:
        """Record that a step is done.

        Args:
            name: The step.
            identity: All that its result depends on, as JSON values.
            result: The result's fingerprint.
            inputs: Fingerprints of what was read, by name.
        """
        self.finished[name] = {"identity": dict(identity), "fingerprint": result, "inputs": dict(inputs)}
        self._record()

    def _record(self) -> None:
        write_text(self.path / _RECORD, json.dumps(self.finished))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def step_folder(target: Path, resume: bool) -> Iterator[StepFolder]:
    """The folder of an output's steps, locked for one merge at a time.

    Raises:
        MergeflowError: Another merge is at work on the same output, or something else has the folder's name.
    """
    folder = StepFolder(target)
    lock = folder.path.with_name(f"{folder.path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = lock_file(lock)
    except OSError as error:
        raise MergeflowError(f"cannot write '{lock}': {error.strerror}. Choose another place.") from None
    if held is None:
        raise MergeflowError(f"another merge is at work on '{target}': wait for it, or choose another place (--out).")
    try:
        folder.begin(resume)
        yield folder
    finally:
        lock.unlink(missing_ok=True)
        os.close(held)
