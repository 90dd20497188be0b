"""Merge files into files: streaming, atomic, resumable, with the record that makes the result again."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

from mergeflow.checkpoints.checks import all_finite
from mergeflow.checkpoints.fingerprint import SCHEME, combine, matches
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import TIED
from mergeflow.checkpoints.writer import StreamWriter, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.adapters.job import AdapterJob
from mergeflow.merging.device import check_device
from mergeflow.merging.direction import settle
from mergeflow.merging.engine import BUFFER, Engine
from mergeflow.merging.files.card import model_card
from mergeflow.merging.files.folder import OutputFolder
from mergeflow.merging.files.inputs import Inputs, open_inputs
from mergeflow.merging.files.origin import BASE, another_base
from mergeflow.merging.files.output import Digests, copy_companions, identity_of, shard_file, write_index
from mergeflow.merging.files.place import RECORD
from mergeflow.merging.files.plan import Plan, check_target, make_plan, output_infos
from mergeflow.merging.files.recipe import AnyRecipe, Recipe, as_recipe
from mergeflow.merging.files.references import Resolve, fix_references
from mergeflow.merging.method import Stack
from mergeflow.merging.stacks import Stacks, Unit
from mergeflow.merging.vocabulary.templates import write_templates

Progress = Callable[[int, int], None]
"""Called with the bytes of inputs done and in all, from any thread, one call at a time."""


@dataclass(frozen=True)
class Merged:
    """What a merge made.

    Attributes:
        path: The file or folder.
        fingerprint: Of the result.
        inputs: Fingerprint per input.
        recipe: The complete recipe.
        seconds: Wall time.
        notes: What an adapter holds and loses, a line each.
        warnings: What to know of: settings, tokens, templates, licences of the inputs that differ.
    """

    path: Path
    fingerprint: str
    inputs: dict[str, str]
    recipe: Recipe
    seconds: float
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def merge(
    recipe: AnyRecipe,
    out: str | Path | None = None,
    progress: Progress | None = None,
    resume: bool = False,
    *,
    resolve: Resolve | None = None,
    workers: int | None = None,
    buffer: int = BUFFER,
    force: bool = False,
    scheme: str = SCHEME,
) -> Merged:
    """Merge the checkpoints of a recipe into a file or folder, reading and writing piece by piece.

    Args:
        recipe: A record, a mapping, or the path of a file; it is checked whole, with the headers of all files, before
            any weight is read.
        out: Where to write, in place of the recipe's `out`: a `.safetensors` file, or a folder.
        progress: Called as work proceeds.
        resume: Continue a sharded merge that was stopped, with those of its shards that are still as they were written;
            without it an unfinished one is started again.
        resolve: Turns references such as models:/name@alias into local paths; the version it means now is recorded.
        workers: Threads, by default one per core; the result does not depend on it.
        buffer: Bytes held at most beyond (experts + 3) × the largest tensor.
        force: Replace the output file even if mergeflow did not make it (never an input, never a folder).
        scheme: Of the fingerprints; a merge that is resumed keeps that of its journal.

    Returns:
        Path and fingerprints; the same stand in the file's metadata and in the model card beside it.

    Raises:
        MergeflowError: Anything wrong with the recipe or its files, NaN or infinity, a full disk, another merge at work
            on the same folder, a folder that holds files of others. Nothing half-written is left under the output's
            name.
    """
    began, recipe = time.monotonic(), as_recipe(recipe)
    if out is not None:
        recipe = recipe.model_copy(update={"out": str(out)})
    check_device(recipe.device)
    recipe = fix_references(recipe, resolve)
    with open_inputs(recipe, resolve) as inputs:
        target = check_target(recipe, inputs, force)
        plan = make_plan(recipe, inputs, buffer)
        on_read = _counted(progress, plan.bytes_read)
        notes: tuple[str, ...] = ()
        if recipe.adapter is not None:
            made = AdapterJob(recipe, inputs, plan, on_read, workers, buffer, scheme, _version()).write(target)
            result, digests, notes = made.fingerprint, made.inputs, made.notes
        else:
            job = _Job(recipe, inputs, plan, target, on_read, workers, buffer, scheme)
            single = target.suffix == ".safetensors"
            result, digests = job.into_file() if single else job.into_folder(resume)
        if progress is not None:
            progress(plan.bytes_read, plan.bytes_read)
    return Merged(target, result, digests, recipe, time.monotonic() - began, notes, inputs.warnings)


def _counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return what adds up bytes from any thread and tells of them, one call at a time."""
    done, lock = 0, Lock()

    def advance(count: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += count
                progress(min(done, total), total)

    return advance


class _Job:
    """One merge on its way from opened inputs to files."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        plan: Plan,
        target: Path,
        on_read: Callable[[int], None],
        workers: int | None,
        buffer: int,
        scheme: str,
    ) -> None:
        self.recipe, self.inputs, self.plan, self.target = recipe, inputs, plan, target
        self.infos = output_infos(inputs.base.infos, recipe.dtype)
        self.digests = Digests(scheme)
        stacks = Stacks(
            inputs.base, inputs.experts, inputs.model, recipe.device, on_piece=self.digests.add, on_read=on_read
        )
        self.engine = Engine(plan.call, stacks, workers, buffer)

    def _run(self, writer: StreamWriter, names: Iterable[str]) -> None:
        scale, dtypes = self.plan.call.scale, {name: info.dtype for name, info in self.infos.items()}

        def store(unit: Unit, stack: Stack | None, result: Any) -> None:
            if stack is None:
                return writer.write(unit.name, unit.start, result.to(dtypes[unit.name]))
            anchor, direction = result
            piece = settle(anchor.reshape(-1), direction.reshape(-1), scale, dtypes[unit.name]).cpu()
            if not all_finite(piece):
                raise MergeflowError(
                    f"tensor '{unit.name}' of the result overflows {dtypes[unit.name]}: "
                    "choose a wider dtype or a smaller scale."
                )
            return writer.write(unit.name, unit.start, piece)

        self.engine.run(store, names)
        self.digests.settle()

    def _input_fingerprints(self) -> dict[str, str]:
        states = {"base": self.inputs.base, **self.inputs.experts}
        found = {owner: self.digests.fingerprint(owner, state.infos) for owner, state in states.items()}
        for name, state in self.inputs.experts.items():
            taken = state.metadata.get(BASE)
            # A base with the rows of another vocabulary is not the file that task vectors were taken from.
            if not state.is_task_vector or not taken or self.inputs.tokenizer is not None:
                continue
            if not matches(self.inputs.base, taken, found["base"]):
                raise another_base(name, taken, found["base"])
        return found

    def _metadata(self, names: Iterable[str], result: str, inputs: Mapping[str, str]) -> dict[str, str]:
        chosen = set(names)
        notes = {name: first for name, first in self.inputs.model.tied.items() if name in chosen and first in chosen}
        found = {
            "format": "pt",
            "mergeflow.version": _version(),
            "mergeflow.recipe": self.recipe.record(),
            "mergeflow.fingerprint": result,
            "mergeflow.inputs": json.dumps(dict(inputs), ensure_ascii=False),
        }
        return {**found, TIED: json.dumps(notes)} if notes else found

    def into_file(self) -> tuple[str, dict[str, str]]:
        """Write one file and its card."""
        scheme = self.digests.scheme
        unknown = combine((), scheme)  # has the length of the fingerprints that take its place
        notes = self._metadata(self.infos, unknown, dict.fromkeys(("base", *self.inputs.experts), unknown))
        with StreamWriter(self.target, self.infos, notes, scheme) as writer:
            self.engine.first_passes()
            self._run(writer, self.infos)
            inputs = self._input_fingerprints()
            result = writer.fingerprint()
            writer.commit(self._metadata(self.infos, result, inputs))
        write_text(self.target.with_suffix(".md"), model_card(self.recipe, self.plan, result, inputs, _version()))
        return result, inputs

    def into_folder(self, resume: bool) -> tuple[str, dict[str, str]]:
        """Write a folder beside its final name, shard by shard, and rename it when it is whole."""
        count = len(self.plan.shards)
        shards = {shard_file(index, count): _only(self.infos, names) for index, names in enumerate(self.plan.shards)}
        identity = {"recipe": self.recipe.record(), "version": _version(), "inputs": identity_of(self.inputs.paths)}
        own: dict[str, str] = {}
        with OutputFolder(self.target) as folder:
            folder.begin(identity, shards, resume, self.digests.scheme)
            self.digests.scheme, self.digests.tensors = folder.scheme, folder.inputs
            pending = shards.keys() - folder.shards
            if pending:
                self.engine.first_passes()
            for file, infos in shards.items():
                if file in pending:
                    notes = self._shard_metadata(infos)
                    with StreamWriter(folder.partial / file, infos, notes, folder.scheme) as writer:
                        self._run(writer, infos)
                        writer.commit()
                        folder.finish(file, writer.digests(), self.digests.tensors)
                own.update(folder.shards[file])
            tensors = ((name, info.dtype, info.shape, own[name]) for name, info in sorted(self.infos.items()))
            result = combine(tensors, folder.scheme)
            inputs = self._input_fingerprints()
            self._complete(folder.partial, shards, result, inputs)
            folder.publish()
        return result, inputs

    def _shard_metadata(self, names: Iterable[str]) -> dict[str, str]:
        """A shard's own notes: fingerprints of the whole stand in the folder's record."""
        whole = self._metadata(names, "", {})
        return {key: value for key, value in whole.items() if key not in ("mergeflow.fingerprint", "mergeflow.inputs")}

    def _complete(
        self, partial: Path, shards: Mapping[str, Iterable[str]], result: str, inputs: dict[str, str]
    ) -> None:
        """Write all that a finished folder holds beside its shards."""
        write_index(partial, shards, self.plan.bytes_written)
        copy_companions(Path(self.inputs.base.path), partial, self.recipe.dtype)
        if self.inputs.tokenizer is not None:
            self.inputs.tokenizer.write(partial)
        if self.inputs.templates is not None:
            write_templates(self.inputs.templates, partial)
        record = {
            "version": _version(),
            "recipe": json.loads(self.recipe.record()),
            "fingerprint": result,
            "inputs": inputs,
            "files": sorted({RECORD, "README.md", *(path.name for path in partial.iterdir())}),
        }
        write_text(partial / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
        write_text(partial / "README.md", model_card(self.recipe, self.plan, result, inputs, _version()))


def _only(infos: Mapping[str, TensorInfo], names: Iterable[str]) -> dict[str, TensorInfo]:
    return {name: infos[name] for name in names}


def _version() -> str:
    try:
        return version("mergeflow")
    except PackageNotFoundError:
        return "unknown"
