"""One merge on several machines: each writes some of the result's files, and one joins them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.fingerprint import BLOCK, block_digest, tensor_digest
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.checkpoints.writer import link_or_copy, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.output import RECORD, OutputFolder, held_digests
from mergeflow.merging.files.plan import Inputs
from mergeflow.merging.files.recipe import Recipe
from mergeflow.version import version

_PART = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True)
class Part:
    """Which files of a result one machine writes: of `count` parts the one with this number, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read a part as it is written on the command line.

        Example:
            >>> Part.parse("2/4")
            Part(number=2, count=4)
        """
        matched = _PART.fullmatch(text)
        part = cls(int(matched[1]), int(matched[2])) if matched else None
        if part is None or not 1 <= part.number <= part.count:
            raise MergeflowError(f"part '{text}': expected a number of how many, such as 2/4 for the second of four.")
        return part

    def recipe(self, whole: Recipe) -> Recipe:
        """Return the recipe with the folder that the part makes, beside that of the whole."""
        out = Path(whole.out or "")
        return whole.model_copy(update={"out": str(out.with_name(f"{out.name}.part-{self.number}-of-{self.count}"))})

    def of(self, shards: Mapping[str, dict[str, TensorInfo]]) -> dict[str, dict[str, TensorInfo]]:
        """Return the files that the part writes: every `count`-th.

        Raises:
            MergeflowError: There are fewer files than parts.
        """
        if len(shards) < self.count:
            raise MergeflowError(
                f"part {self.number}/{self.count}: the result has {len(shards)} file{'s' * (len(shards) > 1)}, and "
                "each part writes one or more. Give a smaller `shard_size`, or ask for fewer parts."
            )
        return {
            file: infos for index, (file, infos) in enumerate(shards.items()) if index % self.count + 1 == self.number
        }


def check_parts(recipe: Recipe, part: Part | None, joined: Sequence[str | Path]) -> None:
    """Refuse what is not merged file by file.

    Raises:
        MergeflowError: The recipe makes one file, an adapter, or steps; or a part is to be merged and joined at once.
    """
    if part is not None and joined:
        raise MergeflowError("`part` merges a part and `join` joins finished ones: give one of them.")
    if recipe.out is None:
        raise MergeflowError("no output: give `out` in the recipe or --out.")
    if recipe.adapter is not None or recipe.out.endswith(".safetensors"):
        raise MergeflowError(f"out '{recipe.out}' is one file: parts need a folder, with a `shard_size`.")
    if recipe.steps:
        raise MergeflowError("a recipe with `steps` is not merged in parts: merge each step into a folder first.")


def identity_of_parts(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Return the identity that the parts of a merge share on every machine: the recipe but for `out`, and the inputs.

    An input is known by the beginning of each of its tensors, 131,072 elements: enough to see that a machine has other
    weights under the name, without reading all of them. What a part reads is fingerprinted whole.
    """
    states = {"base": inputs.base, **inputs.experts}
    return {
        "recipe": json.loads(recipe.model_copy(update={"out": None}).record()),
        "version": version(),
        "inputs": {name: _beginnings(state) for name, state in states.items()},
    }


def _beginnings(state: LazyStateDict) -> str:
    first = (state.read(name, 0, min(BLOCK, info.numel)) for name, info in sorted(state.infos.items()))
    return tensor_digest(block_digest(piece) for piece in first)


def write_part(folder: OutputFolder, part: Part, identity: Mapping[str, Any]) -> None:
    """Write what the joining machine has to know of a finished part."""
    record = {
        "version": version(),
        "part": {"number": part.number, "count": part.count, "scheme": folder.scheme, "identity": identity},
        "shards": folder.shards,
        "inputs": folder.inputs,
        "files": sorted({RECORD, *folder.shards}),
    }
    write_text(folder.partial / RECORD, json.dumps(record, indent=2, ensure_ascii=False))


def take_parts(
    folder: OutputFolder,
    parts: Sequence[str | Path],
    shards: Mapping[str, dict[str, TensorInfo]],
    identity: Mapping[str, Any],
) -> None:
    """Put the files of finished parts into a folder that is being made; none is merged again.

    Raises:
        MergeflowError: A folder is no part of this merge, a file is damaged, parts read different inputs, or one is
            missing.
    """
    records = {Path(place): _read_part(Path(place), identity) for place in parts}
    sources = {file: place for place, record in records.items() for file in record["shards"]}
    if missing := [file for file in shards if file not in sources]:
        counts = {record["part"]["count"] for record in records.values()}
        held = sorted(record["part"]["number"] for record in records.values())
        raise MergeflowError(
            f"joined were the parts {', '.join(map(str, held))} of {max(counts)}, and {len(missing)} files of the "
            f"result are in none of them, among them {missing[0]}. Join all parts of one merge."
        )
    inputs = _joined_inputs(records)
    for file, infos in shards.items():
        place = sources[file]
        digests: dict[str, str] = records[place]["shards"][file]
        if file not in folder.shards:
            link_or_copy(place / file, folder.partial / file)
            if held_digests(folder.partial / file, infos, folder.scheme) != digests:
                raise MergeflowError(
                    f"'{place / file}' is not what its {RECORD} says: copy it again, or merge the part."
                )
            folder.finish(file, digests, inputs)


def _read_part(place: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((place / RECORD).read_bytes())
        part, _ = record["part"], (record["shards"], record["inputs"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise MergeflowError(f"'{place}' holds no part of a merge: name folders that `merge --part` made.") from None
    for what, value in identity.items():
        theirs = part["identity"].get(what)
        if theirs != value:
            raise MergeflowError(f"'{place}' is a part of another merge: {_difference(what, theirs, value)}.")
    return record


def _difference(what: str, theirs: Any, ours: Any) -> str:
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return f"its {what} is {theirs}, here it is {ours}"
    key = next(key for key in (*ours, *theirs) if theirs.get(key) != ours.get(key))
    if what == "inputs":
        return f"that machine read other weights for '{key}' than this one has"
    return f"its {what} has {key}: {theirs.get(key)}, here it is {ours.get(key)}"


def _joined_inputs(records: Mapping[Path, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the digests of all inputs' tensors that the parts read."""
    joined: dict[str, dict[str, str]] = {}
    for place, record in records.items():
        for owner, digests in record["inputs"].items():
            so_far = joined.setdefault(owner, {})
            if differing := _differing(so_far, digests):
                raise MergeflowError(
                    f"the part '{place}' read other weights of '{owner}' than the parts before it: {differing[0]}. "
                    "Give every machine the same files, and merge the parts again."
                )
            so_far.update(digests)
    return joined


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(first.keys() & second.keys()) if first[name] != second[name]]
