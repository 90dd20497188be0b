"""Merge files into files: streaming, atomic, resumable, with the record that makes the result again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from mergeflow.checkpoints.fingerprint import combine, matches
from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import BASE, infos_of_file
from mergeflow.checkpoints.writer import StreamWriter, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.adapters.job import AdapterJob, Made
from mergeflow.merging.execution.direction import cast, settled
from mergeflow.merging.execution.engine import BUFFER, Engine
from mergeflow.merging.execution.reader import Stacks, Unit
from mergeflow.merging.files.card import model_card, published, write_licences
from mergeflow.merging.files.output import (
    RECORD,
    Digests,
    OutputFolder,
    copy_companions,
    fingerprint_of,
    identity_of,
    output_infos,
    shard_file,
    tie_notes,
    untie,
    weights_stem,
    write_index,
)
from mergeflow.merging.files.parts import (
    Part,
    PartOf,
    Record,
    check_parts,
    describe,
    fingerprint_too,
    joined_inputs,
    read_parts,
    take_parts,
)
from mergeflow.merging.files.plan import (
    Inputs,
    Plan,
    another_base,
    check_target,
    choose_device,
    make_plan,
    open_inputs,
    step_folder,
    twice,
)
from mergeflow.merging.files.recipe import AnyRecipe, Recipe, Resolve, as_recipe, fix_references
from mergeflow.merging.files.steps import PREFIX
from mergeflow.merging.method import Stack
from mergeflow.merging.preflight import counter_findings
from mergeflow.version import version

Progress = Callable[[int, int], None]
"""Called with the bytes of inputs done and in all, from any thread, one call at a time."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Attributes:
        inputs: Fingerprint per input.
        notes: What an adapter holds and loses, and what was done to make the inputs fit each other, a line each.
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
    part: str | None = None,
    join: str | Path | Sequence[str | Path] = (),
    fill: Fill | None = None,
) -> Merged:
    """Merge the checkpoints of a recipe into a file or folder, reading and writing piece by piece.

    Args:
        recipe: A record, a mapping, or the path of a file; it is checked whole, with the headers of all files, before
            any weight is read.
        out: Where to write instead of the recipe's `out`: a `.safetensors` file, or a folder.
        progress: Called with the bytes that are read and those to read.
        resume: Continue a stopped sharded merge and keep its finished shards; without it an unfinished merge starts
            again.
        resolve: Turns references such as models:/name@alias into local paths; the version it means now is recorded.
        workers: Threads, by default one per core; the result does not depend on it.
        buffer: Bytes held at most beyond base, task vectors and workspace of the largest tensor that is treated whole.
        force: Replace the output file even if mergeflow did not make it (never an input, never a folder).
        part: Such as "2/4": write the second quarter of the result's files only, into `OUT.part-2-of-4`, so that four
            machines merge at once. Each reads what its files need, and everything where the method looks at the whole
            model first.
        join: The folders of all parts, or one that holds them: their files, verified, become the result; nothing is
            merged again.
        fill: Has the folder's shards merged on other machines and puts them there; what it leaves is merged here.

    Returns:
        Path and fingerprints, which are also in the file's metadata and in the model card next to it.

    Raises:
        MergeflowError: Anything wrong with the recipe or its files, NaN or infinity, a full disk, another merge at work
            on the same folder, a folder that holds files of others. Nothing half-written is left under the output's
            name.
    """
    began, recipe = time.monotonic(), as_recipe(recipe)
    if out is not None:
        recipe = recipe.model_copy(update={"out": str(out)})
    some, joined = Part.parse(part) if part is not None else None, find_parts(join, recipe.out or "")
    elsewhere = bool(joined) or fill is not None  # nothing is merged here
    if some is not None or elsewhere:
        check_parts(recipe, some, joined)
    recipe = fix_references(recipe, resolve)
    recipe, chosen = (recipe, ()) if elsewhere else choose_device(recipe, resolve)
    with open_inputs(recipe, resolve) as inputs:
        target = check_target(recipe if some is None else some.recipe(recipe), inputs, force)
        plan = make_plan(recipe, inputs, buffer, workers=workers)
        on_read = counted(progress, plan.bytes_read)
        device = "cpu" if elsewhere else recipe.device
        job = Job(recipe, inputs, plan, target, on_read, workers, buffer, device=device)

        def finish(opened: Inputs, fingerprints: dict[str, str]) -> Made:
            if recipe.adapter is not None:
                return AdapterJob(recipe, opened, plan, on_read, workers, buffer, fingerprints).write(target)
            last = job if opened is inputs else job.like(recipe, opened, plan, target, fingerprints)
            return last.run(resume, some, joined, fill)

        made = after_steps(job, resolve, resume, finish) if plan.written else finish(inputs, {})
        if progress is not None:
            progress(plan.bytes_read, plan.bytes_read)
        all_inputs = (inputs, *(step.inputs for step in inputs.steps.values()))
        counters = [note.text for each in all_inputs for note in counter_findings(each.base, each.experts)]
    seconds = time.monotonic() - began
    experts = {name: made.inputs[name] for name in inputs.experts if name in made.inputs}
    warnings = tuple(dict.fromkeys((*inputs.warnings, *counters, *twice(experts))))
    return Merged(
        target, made.fingerprint, made.inputs, recipe, seconds, (*chosen, *made.notes, *inputs.notes), warnings
    )


def find_parts(places: str | Path | Sequence[str | Path], out: str) -> list[Path]:
    """Return the folders of parts: those named, or in a folder that is no part all that belong to `out`."""
    parts: list[Path] = []
    for place in map(Path, [places] if isinstance(places, str | Path) else places):
        inside = [] if (place / RECORD).exists() else sorted(place.glob(f"{Path(out).name}.part-*-of-*"))
        parts += inside or [place]
    return parts


def counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a callback that sums bytes from any thread and reports the sum, one call at a time."""
    done, lock = 0, Lock()

    def advance(count: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += count
                progress(min(done, total), total)

    return advance


class Job:
    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        plan: Plan,
        target: Path,
        on_read: Callable[[int], None],
        workers: int | None,
        buffer: int,
        fingerprints: Mapping[str, str] | None = None,
        device: str | None = None,
        record: str | None = None,
    ) -> None:
        """Take a merge whose inputs are open.

        Args:
            fingerprints: Fingerprints of inputs that are known already, by name.
            record: What the result's files say of the recipe, where its paths are here others than in the recipe.
        """
        self.recipe, self.inputs, self.plan, self.target = recipe, inputs, plan, target
        self.given_fingerprints = dict(fingerprints or {})
        self.record = record or published(recipe).record()
        self.infos = output_infos(inputs.base.infos, recipe.dtype)
        self.digests = Digests()
        stacks = Stacks(
            inputs.base,
            inputs.experts,
            inputs.model,
            device or recipe.device,
            on_piece=self.digests.add,
            on_read=on_read,
            same=inputs.same,
        )
        self.engine = Engine(plan.call, stacks, workers, buffer)
        self._on_read = on_read
        for name, step in inputs.steps.items():
            step.stacks.on_piece = partial(self._add_of_step, name)

    def _add_of_step(self, name: str, owner: str, tensor: str, start: int, data: memoryview, itemsize: int) -> None:
        self.digests.add(f"{PREFIX}{name}/{owner}", tensor, start, data, itemsize)

    def like(
        self, recipe: Recipe, inputs: Inputs, plan: Plan, target: Path, fingerprints: Mapping[str, str] | None = None
    ) -> Job:
        """Return another job with the same workers, buffer and progress."""
        engine = self.engine
        return Job(recipe, inputs, plan, target, self._on_read, engine.workers, engine.buffer, fingerprints)

    @property
    def identity(self) -> dict[str, Any]:
        """All that the result depends on, as JSON values."""
        return {"recipe": self.recipe.record(), "version": version(), "inputs": identity_of(self.inputs.paths)}

    def run(
        self, resume: bool, part: Part | None = None, joined: Sequence[Path] = (), fill: Fill | None = None
    ) -> Made:
        """Write the result, or a part of it."""
        if part is not None:
            return self.into_part(part, resume)
        return self.into_file() if self.target.suffix == ".safetensors" else self.into_folder(resume, joined, fill)

    def _run(self, writer: StreamWriter, names: Iterable[str]) -> None:
        scale, piece = self.plan.call.scale, self.engine.stacks.piece
        dtypes = {name: info.dtype.torch for name, info in self.infos.items()}

        def store(unit: Unit, stack: Stack | None, result: Any) -> None:
            dtype = dtypes[unit.name]
            if stack is None:
                return writer.write(unit.name, unit.start, cast(unit.name, result, dtype))
            # In pieces, so that no further tensor of the unit's size is made.
            anchors, directions = (part.reshape(-1).split(piece) for part in result)
            for at, parts in enumerate(zip(anchors, directions, strict=True)):
                writer.write(unit.name, unit.start + at * piece, settled(unit.name, parts, scale, dtype))

        self.engine.run(store, names)
        self.digests.settle()

    def _input_fingerprints(self) -> dict[str, str]:
        owners = {owner: "base" if owner == self.inputs.same else owner for owner in ("base", *self.inputs.experts)}
        states = {"base": self.inputs.base, **self.inputs.experts}
        fingerprints = {
            owner: self.digests.fingerprint(seen, infos_of_file(states[seen])) for owner, seen in owners.items()
        }
        for name, step in self.inputs.steps.items():
            for owner, state in {"base": step.inputs.base, **step.inputs.experts}.items():
                key = f"{PREFIX}{name}/{'base' if owner == step.inputs.same else owner}"
                took_part = {tensor: state.infos[tensor] for tensor in self.digests.tensors.get(key, {})}
                fingerprints[f"{PREFIX}{name}/{owner}"] = self.digests.fingerprint(key, took_part)
        fingerprints |= self.given_fingerprints
        for name, state in self.inputs.experts.items():
            taken = state.metadata.get(BASE)
            # A base with the rows of another vocabulary is not the file that task vectors were taken from.
            if not state.is_task_vector or not taken or self.inputs.tokenizer is not None:
                continue
            if not matches(self.inputs.base, taken, fingerprints["base"]):
                raise another_base(name, taken, fingerprints["base"])
        return fingerprints

    def _metadata(
        self, names: Iterable[str], result: str = "", inputs: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        metadata = {"format": "pt", "mergeflow.version": version(), "mergeflow.recipe": self.record}
        if inputs is not None:  # of a folder's file they stand in the folder's record
            metadata["mergeflow.fingerprint"] = result
            metadata["mergeflow.inputs"] = json.dumps(dict(inputs), ensure_ascii=False)
        return metadata | tie_notes(self.inputs.model.tied, names)

    def into_file(self) -> Made:
        owners = [f"{PREFIX}{name}/{owner}" for name, step in self.inputs.steps.items()
                  for owner in ("base", *step.inputs.experts)]  # fmt: skip
        unknown = combine(())  # has the length of the fingerprints that take its place
        later = dict.fromkeys(("base", *self.inputs.experts, *owners), unknown) | self.given_fingerprints
        with StreamWriter(self.target, self.infos, self._metadata(self.infos, unknown, later)) as writer:
            self.engine.first_passes()
            self._run(writer, self.infos)
            inputs = self._input_fingerprints()
            result = writer.fingerprint()
            writer.commit(self._metadata(self.infos, result, inputs))
        write_text(self.target.with_suffix(".md"), self._card(result, inputs))
        return Made(result, inputs)

    @property
    def shards(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors of each file of a folder, in order."""
        count, stem = len(self.plan.shards), weights_stem(Path(self.inputs.base.path))
        return {
            shard_file(at, count, stem): {name: self.infos[name] for name in names}
            for at, names in enumerate(self.plan.shards)
        }

    def into_folder(self, resume: bool, joined: Sequence[Path] = (), fill: Fill | None = None) -> Made:
        """Write a folder beside its final name, shard by shard, and rename it when it is whole.

        Args:
            joined: Folders of parts that were merged before, on this machine or others; their shards are taken.
            fill: Has shards merged elsewhere, and puts them into the unfinished folder.
        """
        shards = self.shards
        records = self._read_parts(joined) if joined else {}
        with OutputFolder(self.target) as folder:
            folder.begin(self.identity, shards, resume)
            if records:
                take_parts(folder, records, shards, self.digests.tensors)
            if fill is not None:
                fill(self, folder)
            self.write_shards(folder, shards)
            digests = {name: digest for file in shards for name, digest in folder.shards[file].items()}
            result, inputs = fingerprint_of(self.infos, digests), self._input_fingerprints()
            self._complete(folder, shards, result, inputs)
            before = self.digests.tensors.get("base", {})
            untie(folder.partial / "config.json", config_of(self.inputs.base), before, digests)
            folder.publish()
        return Made(result, inputs)

    def _read_parts(self, places: Sequence[Path]) -> dict[Path, Record]:
        """Return the records of all parts, whose digests are from here on those of the inputs."""
        records = read_parts(places, self.shards, describe(self.recipe, self.inputs))
        self.digests.tensors = joined_inputs(records)
        try:
            self._input_fingerprints()
        except KeyError as error:
            raise MergeflowError(
                f"the parts' records do not list all that was read of the inputs, such as {error}: merge the parts "
                "again."
            ) from None
        return records

    def into_part(self, part: Part, resume: bool) -> Made:
        """Write a part of a folder's shards, and what the machine that joins them has to know."""
        shards, described = part.of(self.shards), describe(self.recipe, self.inputs)
        with OutputFolder(self.target) as folder:
            folder.begin(self.identity, shards, resume)
            self.write_shards(folder, shards)
            fingerprint_too(part.read_too(self.shards, self.inputs), self.inputs, folder.inputs)
            record = Record(
                version=version(),
                part=PartOf(number=part.number, count=part.count, **described),
                shards=folder.shards,
                inputs=folder.inputs,
                files=sorted({RECORD, *folder.shards}),
            )
            write_text(folder.partial / RECORD, record.model_dump_json(indent=2))
            folder.publish()
        infos = {name: info for held in shards.values() for name, info in held.items()}
        digests = {name: digest for file in shards for name, digest in folder.shards[file].items()}
        return Made(fingerprint_of(infos, digests), {})

    def write_shards(self, folder: OutputFolder, shards: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        """Write the shards that are not there yet, each recorded when it is whole."""
        self.digests.tensors = folder.inputs
        pending = [file for file in shards if file not in folder.shards]
        if pending:
            self.engine.first_passes()
        for file in pending:
            infos = shards[file]
            with StreamWriter(folder.partial / file, infos, self._metadata(infos)) as writer:
                self._run(writer, infos)
                writer.commit()
                folder.finish(file, writer.digests(), self.digests.tensors)

    def _complete(
        self, folder: OutputFolder, shards: Mapping[str, Iterable[str]], result: str, inputs: dict[str, str]
    ) -> None:
        """Write all that a finished folder holds beside its shards."""
        partial = folder.partial
        write_index(partial, shards, self.plan.bytes_written)
        copy_companions(Path(self.inputs.base.path), partial, self.recipe.dtype, self.inputs.base.config)
        self.inputs.write_tokenizer(partial)
        write_licences(self.recipe, self.inputs, partial)
        record = {"version": version(), "recipe": json.loads(self.record), "fingerprint": result, "inputs": inputs}
        folder.write_record(record, "README.md")
        write_text(partial / "README.md", self._card(result, inputs))

    def _card(self, result: str, inputs: Mapping[str, str]) -> str:
        return model_card(self.recipe, self.plan, self.inputs, result, inputs)


Fill = Callable[[Job, OutputFolder], None]
_SHARD = 2 * 10**9  # bytes of a file of a step's result, so that a stopped merge loses little


def after_steps(
    job: Job, resolve: Resolve | None, resume: bool, finish: Callable[[Inputs, dict[str, str]], Made]
) -> Made:
    """Write the steps that must be files, then return what `finish` makes of them, and remove them when it is made.

    Args:
        resume: Whether steps and shards of a stopped merge that are done stay.
        finish: Makes the result of the inputs, opened with the steps' files, and the fingerprints of what these read.
    """
    recipe, made, fingerprints = job.recipe, dict[str, Path](), dict[str, str]()
    steps = dict(recipe.steps or ())
    with step_folder(job.target, resume) as folder:
        for name in job.plan.written:
            place, size = folder.path / name, recipe.shard_size or _SHARD
            changes = {"steps": recipe.steps, "device": recipe.device, "out": str(place), "shard_size": size}
            step = steps[name].model_copy(update=changes)
            with open_inputs(step, resolve, made) as inputs:
                piece = job.like(step, inputs, make_plan(step, inputs, job.engine.buffer, ()), place)
                if not folder.is_finished(name, piece.identity):
                    written = piece.run(resume)
                    folder.finish(name, piece.identity, written.fingerprint, written.inputs)
            made[name] = place
            fingerprints |= {
                f"{PREFIX}{name}/{owner}": fingerprint for owner, fingerprint in folder.finished[name]["inputs"].items()
            }
        with open_inputs(recipe, resolve, made) as inputs:
            return finish(inputs, fingerprints)
