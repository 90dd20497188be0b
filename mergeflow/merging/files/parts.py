"""One merge on several machines: each writes some of the result's files as a part, and one joins them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mergeflow.checkpoints.fingerprint import BLOCK, block_digest, tensor_digest, tensor_digest_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.checkpoints.writer import link_or_copy
from mergeflow.errors import MergeflowError
from mergeflow.merging.execution.engine import default_workers
from mergeflow.merging.files.output import (
    RECORD,
    OutputFolder,
    held_digests,
)
from mergeflow.merging.files.plan import Inputs
from mergeflow.merging.files.recipe import Recipe
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


class PartOf(BaseModel):
    number: int
    count: int
    recipe: str
    inputs: dict[str, str]


class Record(BaseModel):
    """What a finished part says of itself. shards: file → tensor → digest. inputs: input → tensor → digest."""

    version: str
    part: PartOf
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
        of_part, expected = dict(json.loads(record.part.recipe)), dict(json.loads(described["recipe"]))
    except (OSError, ValueError, TypeError, RecursionError):  # pydantic's error is a ValueError
        raise MergeflowError(f"'{place}' holds no part of a merge: name folders that `merge --part` made.") from None
    inputs = [name for name, digest in described["inputs"].items() if record.part.inputs.get(name) != digest]
    fault = ""
    if record.part.recipe != described["recipe"]:
        keys = [key for key in dict.fromkeys((*expected, *of_part)) if _text(of_part, key) != _text(expected, key)]
        fault = f"its recipe has {keys[0]}: {_text(of_part, keys[0])}, here it is {_text(expected, keys[0])}"
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
