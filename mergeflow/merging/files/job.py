"""The job of a merge: tensors merged, written, verified and recorded; steps written first; parts on several machines.

Of one merge on several machines each writes some of the result's files, and one joins them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from mergeflow.checkpoints.fingerprint import BLOCK, block_digest, combine, matches, tensor_digest, tensor_digest_of
from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import BASE, TIED, LazyStateDict, infos_of_file
from mergeflow.checkpoints.writer import StreamWriter, link_or_copy, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.execution.direction import cast, settled
from mergeflow.merging.execution.engine import Engine, default_workers
from mergeflow.merging.execution.reader import Stacks, Unit
from mergeflow.merging.files.card import model_card, published, write_licences
from mergeflow.merging.files.output import (
    RECORD,
    Digests,
    OutputFolder,
    copy_companions,
    fingerprint_of,
    held_digests,
    identity_of,
    output_infos,
    shard_file,
    untie,
    weights_stem,
    write_index,
)
from mergeflow.merging.files.plan import Inputs, Plan, another_base, make_plan, open_inputs, step_folder
from mergeflow.merging.files.recipe import Recipe, Resolve
from mergeflow.merging.files.steps import PREFIX
from mergeflow.merging.method import Stack
from mergeflow.version import version

_PART = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@dataclass(frozen=True)
class Part:
    """Which files of a result one machine writes: of `count` parts the one with this number, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read a part as it is written on the command line, such as 2/4."""
        matched = _PART.fullmatch(str(text))
        part = cls(int(matched[1]), int(matched[2])) if matched else None
        if part is None or not 1 <= part.number <= part.count:
            raise MergeflowError(f"part '{text}': expected a number of how many, such as 2/4 for the second of four.")
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def recipe(self, whole: Recipe) -> Recipe:
        """Return the recipe with the folder that the part makes, beside that of the whole."""
        out = Path(whole.out or "")
        return whole.model_copy(update={"out": str(out.with_name(f"{out.name}.part-{self.number}-of-{self.count}"))})

    def of(self, shards: Mapping[str, dict[str, TensorInfo]]) -> dict[str, dict[str, TensorInfo]]:
        """Return the files that the part writes: neighbours, which read the same files of inputs."""
        if len(shards) < self.count:
            raise MergeflowError(
                f"part {self}: the result has {len(shards)} file{'s' * (len(shards) > 1)}, and each part writes one or "
                "more. Give a smaller `shard_size`, or ask for fewer parts (or workers)."
            )
        first, behind = ((number * len(shards)) // self.count for number in (self.number - 1, self.number))
        return dict(islice(shards.items(), first, behind))

    def read_too(self, shards: Mapping[str, dict[str, TensorInfo]], inputs: Inputs) -> list[str]:
        """Return the tensors that this machine fingerprints of the inputs beside those that it merges.

        They are the next part's, so that two machines have read every tensor and the join sees whether they read the
        same; where the method looks at the whole model first they are all, because every machine has used all.
        """
        following = Part(self.number % self.count + 1, self.count)
        of = shards if inputs.looks_at_all_first else following.of(shards)
        return [name for infos in of.values() for name in infos]


def check_parts(recipe: Recipe, part: Part | None, joined: Sequence[str | Path]) -> None:
    """Refuse what is not merged file by file."""
    if part is not None and joined:
        raise MergeflowError("`part` merges a part and `join` joins finished ones: give one of them.")
    if recipe.out is None:
        raise MergeflowError("no output: give `out` in the recipe or --out.")
    if recipe.adapter is not None:
        raise MergeflowError("`adapter`: an adapter is one file, which has no parts.")
    if recipe.out.endswith(".safetensors"):
        raise MergeflowError(f"out '{recipe.out}' is one file: parts need a folder, with a `shard_size`.")
    if Path(recipe.out).name in ("", ".."):
        raise MergeflowError(f"out '{recipe.out}': parts get the folder's name, so give one.")
    if recipe.steps:
        raise MergeflowError("a recipe with `steps` is not merged in parts: merge each step into a folder first.")


class _Made(BaseModel):
    number: int
    count: int
    recipe: str
    inputs: dict[str, str]


class Record(BaseModel):
    """What a finished part says of itself. shards: file → tensor → digest. inputs: input → tensor → digest."""

    version: str
    part: _Made
    shards: dict[str, dict[str, str]]
    inputs: dict[str, dict[str, str]]
    files: list[str]


def describe(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Return the recipe and the inputs that the parts of one merge share on every machine.

    An input is known by the beginning of each of its tensors, 131,072 elements: enough to name it where a machine has
    another model under its name. Where the recipe's arithmetic happens is each machine's own affair.
    """
    states = {"base": inputs.base, **inputs.experts}
    return {
        "recipe": recipe.model_copy(update={"device": "cpu"}).record(),
        "inputs": {name: _beginnings(state) for name, state in states.items()},
    }


def _beginnings(state: LazyStateDict) -> str:
    first = (state.read(name, 0, min(BLOCK, info.numel)) for name, info in sorted(state.infos.items()))
    return tensor_digest(block_digest(piece) for piece in first)


def fingerprint_too(names: Iterable[str], inputs: Inputs, digests: dict[str, dict[str, str]]) -> None:
    """Add the digests of some tensors of base and experts to those of the tensors that were merged."""
    states = {"base": inputs.base, **{name: state for name, state in inputs.experts.items() if name != inputs.same}}
    missing = [
        (owner, name)
        for name in names
        for owner, state in states.items()
        if name in state.infos and name not in digests.setdefault(owner, {})
    ]
    with ThreadPoolExecutor(default_workers()) as pool:
        read = pool.map(lambda pair: tensor_digest_of(states[pair[0]], pair[1]), missing)
        for (owner, name), digest in zip(missing, read, strict=True):
            digests[owner][name] = digest


def find_parts(places: str | Path | Sequence[str | Path], out: str) -> list[Path]:
    """Return the folders of parts: those named, or in a folder that is no part all that belong to `out`."""
    parts: list[Path] = []
    for place in map(Path, [places] if isinstance(places, str | Path) else places):
        inside = [] if (place / RECORD).exists() else sorted(place.glob(f"{Path(out).name}.part-*-of-*"))
        parts += inside or [place]
    return parts


def read_parts(places: Sequence[Path], shards: Mapping[str, Any], described: Mapping[str, Any]) -> dict[Path, Record]:
    """Return the records of parts that together are a merge."""
    records = {place: _read_part(place, described) for place in places}
    held = {file for record in records.values() for file in record.shards}
    if missing := [file for file in shards if file not in held]:
        numbers = sorted({(record.part.count, record.part.number) for record in records.values()})
        raise MergeflowError(
            f"joined were the parts {', '.join(f'{number}/{count}' for count, number in numbers)}, which hold "
            f"{len(shards) - len(missing)} of the {len(shards)} files of the result; {missing[0]} is missing. Join all "
            "parts of one merge."
        )
    return records


def _read_part(place: Path, described: Mapping[str, Any]) -> Record:
    try:
        record = Record.model_validate_json((place / RECORD).read_bytes(), strict=True)
        theirs, ours = dict(json.loads(record.part.recipe)), dict(json.loads(described["recipe"]))
    except (OSError, ValueError, TypeError, RecursionError):  # pydantic's error is a ValueError
        raise MergeflowError(f"'{place}' holds no part of a merge: name folders that `merge --part` made.") from None
    inputs = [name for name, digest in described["inputs"].items() if record.part.inputs.get(name) != digest]
    fault = ""
    if record.part.recipe != described["recipe"]:
        keys = [key for key in dict.fromkeys((*ours, *theirs)) if _text(theirs, key) != _text(ours, key)]
        fault = f"its recipe has {keys[0]}: {_text(theirs, keys[0])}, here it is {_text(ours, keys[0])}"
    elif inputs:
        fault = f"that machine read other weights for '{inputs[0]}' than this one has"
    elif record.version != version():
        fault = f"mergeflow {record.version} made it, this is {version()}"
    if fault:
        raise MergeflowError(f"'{place}' is a part of another merge: {fault}.")
    return record


def _text(recipe: Mapping[str, Any], key: str) -> str:
    return json.dumps(recipe.get(key), ensure_ascii=False)


def joined_inputs(records: Mapping[Path, Record]) -> dict[str, dict[str, str]]:
    """Return the digests of all inputs' tensors that the parts read."""
    joined: dict[str, dict[str, str]] = {}
    for place, record in records.items():
        for owner, digests in record.inputs.items():
            so_far = joined.setdefault(owner, {})
            if differing := [name for name in digests if so_far.get(name, digests[name]) != digests[name]]:
                raise MergeflowError(
                    f"the part '{place}' read other weights of '{owner}' than the parts before it, in "
                    f"'{differing[0]}'. Give every machine the same files, and merge the parts again."
                )
            so_far.update(digests)
    return joined


def take_parts(
    folder: OutputFolder,
    records: Mapping[Path, Record],
    shards: Mapping[str, dict[str, TensorInfo]],
    inputs: dict[str, dict[str, str]],
) -> None:
    """Put the files of finished parts into a folder that is being made; none is merged again."""
    sources = {file: place for place, record in records.items() for file in record.shards}
    for file, infos in shards.items():
        source, digests = sources[file] / file, records[sources[file]].shards[file]
        if file in folder.shards:
            continue
        if source.is_file():
            link_or_copy(source, folder.partial / file)
        if held_digests(folder.partial / file, infos) != digests:
            fault = (
                f"is not what its {RECORD} says" if source.is_file() else f"is missing, though its {RECORD} lists it"
            )
            raise MergeflowError(f"'{source}' {fault}: copy it again, or merge the part again.")
        folder.finish(file, digests, inputs)


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
        chosen = set(names)
        notes = {name: first for name, first in self.inputs.model.tied.items() if name in chosen and first in chosen}
        metadata = {"format": "pt", "mergeflow.version": version(), "mergeflow.recipe": self.record}
        if inputs is not None:  # of a folder's file they stand in the folder's record
            metadata["mergeflow.fingerprint"] = result
            metadata["mergeflow.inputs"] = json.dumps(dict(inputs), ensure_ascii=False)
        return {**metadata, TIED: json.dumps(notes)} if notes else metadata

    def into_file(self) -> tuple[str, dict[str, str]]:
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
        self, resume: bool, joined: Sequence[Path] = (), fill: Fill | None = None
    ) -> tuple[str, dict[str, str]]:
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
            self._complete(folder.partial, shards, result, inputs)
            before = self.digests.tensors.get("base", {})
            untie(folder.partial / "config.json", config_of(self.inputs.base), before, digests)
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
            record = Record(
                version=version(),
                part=_Made(number=part.number, count=part.count, **described),
                shards=folder.shards,
                inputs=folder.inputs,
                files=sorted({RECORD, *folder.shards}),
            )
            write_text(folder.partial / RECORD, record.model_dump_json(indent=2))
            folder.publish()
        infos = {name: info for held in shards.values() for name, info in held.items()}
        digests = {name: digest for file in shards for name, digest in folder.shards[file].items()}
        return fingerprint_of(infos, digests), {}

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


Fill = Callable[[Job, OutputFolder], None]
Made = TypeVar("Made")
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
                    folder.finish(name, piece.identity, *piece.run(resume))
            made[name] = place
            fingerprints |= {
                f"{PREFIX}{name}/{owner}": fingerprint for owner, fingerprint in folder.finished[name]["inputs"].items()
            }
        with open_inputs(recipe, resolve, made) as inputs:
            return finish(inputs, fingerprints)
