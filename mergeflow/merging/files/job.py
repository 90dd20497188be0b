"""The job of a merge: tensors merged, written, verified and recorded; steps written first."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from mergeflow.checkpoints.fingerprint import combine, matches
from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import BASE, TIED, infos_of_file
from mergeflow.checkpoints.writer import StreamWriter, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.execution.direction import cast, settled
from mergeflow.merging.execution.engine import Engine
from mergeflow.merging.execution.reader import Stacks, Unit
from mergeflow.merging.files.card import model_card, published, write_licences
from mergeflow.merging.files.output import (
    RECORD,
    Digests,
    OutputFolder,
    copy_companions,
    identity_of,
    output_infos,
    shard_file,
    untie,
    weights_stem,
    write_index,
)
from mergeflow.merging.files.parts import (
    Part,
    Record,
    describe,
    fingerprint_too,
    joined_inputs,
    read_parts,
    take_parts,
    write_part,
)
from mergeflow.merging.files.plan import Inputs, Plan, another_base, make_plan, open_inputs, step_folder
from mergeflow.merging.files.recipe import Recipe, Resolve
from mergeflow.merging.files.steps import PREFIX
from mergeflow.merging.stack import Stack
from mergeflow.version import version


class Job:
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
        fingerprints: Mapping[str, str] | None = None,
        device: str | None = None,
        record: str | None = None,
    ) -> None:
        """Take a merge whose inputs are open.

        Args:
            record: What the result's files say of the recipe, where its paths are here others than in the recipe.
        """
        self.recipe, self.inputs, self.plan, self.target, self.given_fingerprints = (
            recipe,
            inputs,
            plan,
            target,
            dict(fingerprints or {}),
        )
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
            step.watch(partial(self._add_of_step, name))

    def _add_of_step(self, name: str, owner: str, tensor: str, start: int, data: memoryview, itemsize: int) -> None:
        self.digests.add(f"{PREFIX}{name}/{owner}", tensor, start, data, itemsize)

    def like(
        self, recipe: Recipe, inputs: Inputs, plan: Plan, target: Path, fingerprints: Mapping[str, str] | None = None
    ) -> "Job":
        """Return another job with the same workers, buffer and progress.

        Args:
            fingerprints: Fingerprints of inputs that are known already, by name.
        """
        engine = self.engine
        return Job(recipe, inputs, plan, target, self._on_read, engine.workers, engine.buffer, fingerprints)

    @property
    def identity(self) -> dict[str, Any]:
        """All that the result depends on, as JSON values."""
        return {"recipe": self.recipe.record(), "version": version(), "inputs": identity_of(self.inputs.paths)}

    def run(
        self, resume: bool, part: Part | None = None, joined: Sequence[Path] = (), fill: "Fill | None" = None
    ) -> tuple[str, dict[str, str]]:
        """Write the result, or a part of it; returns its fingerprint and those of the inputs."""
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
            for start, anchor, direction in _in_pieces(piece, *(part.reshape(-1) for part in result)):
                writer.write(unit.name, unit.start + start, settled(unit.name, (anchor, direction), scale, dtype))

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

    def _metadata(self, names: Iterable[str], result: str, inputs: Mapping[str, str]) -> dict[str, str]:
        chosen = set(names)
        notes = {name: first for name, first in self.inputs.model.tied.items() if name in chosen and first in chosen}
        metadata = {
            "format": "pt",
            "mergeflow.version": version(),
            "mergeflow.recipe": self.record,
            "mergeflow.fingerprint": result,
            "mergeflow.inputs": json.dumps(dict(inputs), ensure_ascii=False),
        }
        return {**metadata, TIED: json.dumps(notes)} if notes else metadata

    def into_file(self) -> tuple[str, dict[str, str]]:
        """Write one file and its card."""
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
        return result, inputs

    @property
    def shards(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors of each file of a folder, in order."""
        count, stem = len(self.plan.shards), weights_stem(Path(self.inputs.base.path))
        return {
            shard_file(at, count, stem): {name: self.infos[name] for name in names}
            for at, names in enumerate(self.plan.shards)
        }

    def into_folder(
        self, resume: bool, joined: Sequence[Path] = (), fill: "Fill | None" = None
    ) -> tuple[str, dict[str, str]]:
        """Write a folder beside its final name, shard by shard, and rename it when it is whole.

        Args:
            joined: Folders of parts that were merged before, on this machine or others; their shards are taken.
            fill: Has shards merged elsewhere, and puts them into the unfinished folder.
        """
        shards, files_of = self.shards, dict[str, str]()
        records = self._read_parts(joined) if joined else {}
        with OutputFolder(self.target) as folder:
            folder.begin(self.identity, shards, resume)
            if records:
                take_parts(folder, records, shards, self.digests.tensors)
            if fill is not None:
                fill(self, folder)
            self.write_shards(folder, shards)
            for file in shards:
                files_of.update(folder.shards[file])
            tensors = ((name, info.dtype, info.shape, files_of[name]) for name, info in sorted(self.infos.items()))
            result = combine(tensors)
            inputs = self._input_fingerprints()
            self._complete(folder.partial, shards, result, inputs)
            before = self.digests.tensors.get("base", {})
            untie(folder.partial / "config.json", config_of(self.inputs.base), before, files_of)
            folder.publish()
        return result, inputs

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

    def into_part(self, part: Part, resume: bool) -> tuple[str, dict[str, str]]:
        """Write a part of a folder's shards, and what the machine that joins them has to know."""
        shards, described = part.of(self.shards), describe(self.recipe, self.inputs)
        with OutputFolder(self.target) as folder:
            folder.begin(self.identity, shards, resume)
            self.write_shards(folder, shards)
            fingerprint_too(part.read_too(self.shards, self.inputs), self.inputs, folder.inputs)
            write_part(folder, part, described)
            folder.publish()
        tensors = sorted((name, info, file) for file, infos in shards.items() for name, info in infos.items())
        digests = ((name, info.dtype, info.shape, folder.shards[file][name]) for name, info, file in tensors)
        return combine(digests), {}

    def write_shards(self, folder: OutputFolder, shards: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        """Write the shards that are not there yet, each recorded when it is whole."""
        self.digests.tensors = folder.inputs
        pending = [file for file in shards if file not in folder.shards]
        if pending:
            self.engine.first_passes()
        for file in pending:
            infos = shards[file]
            with StreamWriter(folder.partial / file, infos, self._shard_metadata(infos)) as writer:
                self._run(writer, infos)
                writer.commit()
                folder.finish(file, writer.digests(), self.digests.tensors)

    def _shard_metadata(self, names: Iterable[str]) -> dict[str, str]:
        """A shard's own notes: fingerprints of the whole stand in the folder's record."""
        whole = self._metadata(names, "", {})
        return {key: value for key, value in whole.items() if key not in ("mergeflow.fingerprint", "mergeflow.inputs")}

    def _complete(
        self, partial: Path, shards: Mapping[str, Iterable[str]], result: str, inputs: dict[str, str]
    ) -> None:
        """Write all that a finished folder holds beside its shards."""
        write_index(partial, shards, self.plan.bytes_written)
        copy_companions(Path(self.inputs.base.path), partial, self.recipe.dtype, self.inputs.base.config)
        self.inputs.write_tokenizer(partial)
        write_licences(self.recipe, self.inputs, partial)
        record = {
            "version": version(),
            "recipe": json.loads(self.record),
            "fingerprint": result,
            "inputs": inputs,
            "files": sorted({RECORD, "README.md", *(path.name for path in partial.iterdir())}),
        }
        write_text(partial / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
        write_text(partial / "README.md", self._card(result, inputs))

    def _card(self, result: str, inputs: Mapping[str, str]) -> str:
        return model_card(self.recipe, self.plan, self.inputs, result, inputs, version())


def _in_pieces(size: int, *flat: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the first element of each piece of some tensors [n] of one length, and the piece of each of them."""
    for start in range(0, max(len(flat[0]), 1), size):
        yield start, *(part[start : start + size] for part in flat)


Fill = Callable[[Job, OutputFolder], None]
Made = TypeVar("Made")
_SHARD = 2 * 10**9  # bytes of a file of a step's result, so that a stopped merge loses little


def after_steps(
    job: Job, resolve: Resolve | None, resume: bool, finish: Callable[[Inputs, dict[str, str]], Made]
) -> Made:
    """Write the steps that must be files, then do what is to be done with them, and remove them when it is.

    Args:
        resume: Whether steps and shards of a stopped merge that are done stay.
        finish: Makes the result of the inputs, opened with the steps' files, and the fingerprints of what these read.

    Returns:
        What `finish` returns.
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
                    folder.finish(name, piece.identity, *piece.run(resume))
            made[name] = place
            fingerprints |= {
                f"{PREFIX}{name}/{owner}": fingerprint for owner, fingerprint in folder.finished[name]["inputs"].items()
            }
        with open_inputs(recipe, resolve, made) as inputs:
            done = finish(inputs, fingerprints)
        folder.remove()
    return done
