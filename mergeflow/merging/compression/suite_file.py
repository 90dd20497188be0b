"""Compress the experts of a suite into one file, and read one task back out of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from pydantic import BaseModel, Json, ValidationError
from torch import Tensor

from mergeflow.checkpoints.checks import all_finite, check_all_copied, check_compatible, infos_of
from mergeflow.checkpoints.fingerprint import fingerprint, matches, short
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.header import CODES, DTYPES, DType
from mergeflow.checkpoints.reader import KIND, LazyStateDict
from mergeflow.checkpoints.writer import write_checkpoint
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging.compression.compressor import CompressorCall, Payload, Stored, configure_compressor
from mergeflow.merging.execution.engine import Engine
from mergeflow.merging.execution.reader import Stacks, Unit, model_of
from mergeflow.merging.files.plan import check_origin
from mergeflow.merging.matrices import survey
from mergeflow.merging.method import Stack

_WHOLE = "@whole"


@dataclass(frozen=True)
class Compressed:
    """All tasks of a suite in compressed form."""

    call: CompressorCall
    tensors: dict[str, Tensor]  # what is stored, by name: shared/TENSOR/PART, task/TASK/TENSOR/PART
    dtypes: dict[str, DType]  # the base's type per tensor
    tasks: tuple[str, ...]
    base: str  # fingerprint of the base
    expert_bits: int  # bits of all experts as they were

    @property
    def stored_bits(self) -> int:
        """Bits of everything stored; θ0 is not counted (see `CompressorCall.method.needs_base`)."""
        return 8 * sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: str | Path) -> str:
        """Write one safetensors file that holds every task; returns its fingerprint."""
        notes = {
            KIND: "compressed",
            "mergeflow.compressor": json.dumps({"name": self.call.name, "args": self.call.args}),
            "mergeflow.tasks": json.dumps(self.tasks),
            "mergeflow.base": self.base,
            "mergeflow.dtypes": json.dumps({name: CODES[dtype] for name, dtype in self.dtypes.items()}),
            "mergeflow.stored_bits": str(self.stored_bits),
            "mergeflow.expert_bits": str(self.expert_bits),
        }
        return write_checkpoint(path, self.tensors, notes)


def compress(
    call: CompressorCall,
    base: Mapping[str, Tensor],
    experts: Mapping[str, Mapping[str, Tensor]],
    workers: int | None = None,
    device: str = "cpu",
) -> Compressed:
    """Compress the experts of a suite, by task, stored in the types of the base θ0; all states may be lazy.

    Arithmetic happens on a device, by default in one thread per core.
    """
    if not experts:
        raise MergeflowError("nothing to compress: give one expert at least.")
    check_compatible(base, experts)
    check_origin(base, experts)
    for task, state in experts.items():
        check_all_copied(base, task, state)
    infos = infos_of(base)
    model = model_of(base, experts)
    selection, splits = getattr(call.arguments, "matrices", None), getattr(call.arguments, "split_qkv", False)
    survey(f"compressor '{call.name}'", selection, splits, infos, model.tied, model.architecture)
    engine = Engine(call, Stacks(base, experts, model, device), workers)
    stored: dict[str, Tensor] = {}
    integers: dict[str, dict[int, Tensor]] = {}
    lock = Lock()

    def keep(unit: Unit, stack: Stack | None, result: Any) -> None:
        if stack is None:  # an integer tensor may come in pieces
            with lock:
                integers.setdefault(unit.name, {})[unit.start] = result.reshape(-1).to("cpu", copy=True)
            return
        named = _named(unit.name, result, model.experts, infos[unit.name].dtype)
        with lock:
            if twice := sorted(named.keys() & stored.keys()):
                raise MergeflowError(f"'{twice[0]}' would be stored twice: name the tasks without a slash.")
            stored.update({name: tensor.to("cpu", copy=True) for name, tensor in named.items()})

    engine.first_passes()
    engine.run(keep, None if not call.method.needs_base else model.shapes)
    for name, pieces in integers.items():
        stored[f"shared/{name}/copy"] = torch.cat([pieces[at] for at in sorted(pieces)]).reshape(infos[name].shape)
    for task, values in call.method.whole(model).items():
        stored.update({f"task/{task}/{_WHOLE}/{key}": value for key, value in values.items()})
    return Compressed(
        call,
        dict(sorted(stored.items())),
        {name: info.dtype for name, info in infos.items()},
        model.experts,
        fingerprint(base),
        8 * len(experts) * sum(info.nbytes for info in infos.values()),
    )


def _named(name: str, payload: Payload, tasks: Sequence[str], dtype: DType) -> dict[str, Tensor]:
    def stored(tensor: Tensor) -> Tensor:
        return _fitting(name, tensor, dtype) if tensor.is_floating_point() else tensor

    named = {f"shared/{name}/{key}": stored(value) for key, value in payload.shared.items()}
    for task, of_task in zip(tasks, payload.per_task, strict=True):
        named.update({f"task/{task}/{name}/{key}": stored(value) for key, value in of_task.items()})
    return named


def _fitting(name: str, tensor: Tensor, dtype: DType) -> Tensor:
    """Return a part of a tensor, or all of it, [...] in the base's type."""
    made = tensor.to(dtype.torch)
    if not all_finite(made):
        raise MergeflowError(
            f"tensor '{name}' overflows {dtype}, the base's type: compress against the base in a wider one "
            "(`mergeflow convert BASE --out FILE --dtype float32`)."
        )
    return made


def extract_task(path: str | Path, task: str, base: str | Path | None = None) -> dict[str, Tensor]:
    """Return one task's state dict out of a compressed file, given θ0 where the compressor needs it.

    The shared part and this task's part alone are read.
    """
    with open_checkpoint(path) as state:
        if state.metadata.get(KIND) != "compressed":
            raise MergeflowError(f"'{path}' is not a compressed suite: make one with `mergeflow compress`.")
        notes = _notes(state)
        if task not in notes.tasks:
            raise unknown_name("task", task, notes.tasks)
        call = configure_compressor(notes.compressor.name, notes.compressor.args)
        origin = _open_base(call, base, notes.base)
        shared, of_task = _parts(state, "shared/"), _parts(state, f"task/{task}/")
        whole = {key: state[place] for key, place in of_task.pop(_WHOLE, {}).items()}

        def decoded(name: str, dtype: DType) -> Tensor:
            places = shared.get(name, {}), of_task.get(name, {})
            common, single = ({key: state[place] for key, place in parts.items()} for parts in places)
            if "copy" in common:
                return common["copy"]
            if not dtype.is_floating_point:
                assert origin is not None
                return origin[name]
            start = origin[name].to(torch.promote_types(dtype.torch, torch.float32)) if origin is not None else None
            return _fitting(name, call.method.decode(Stored(start, common, single, whole), call.arguments), dtype)

        try:
            return {name: decoded(name, DTYPES[code]) for name, code in notes.dtypes.items()}
        except KeyError as error:
            raise _damaged(state.path, f"nothing is stored of {error}") from None


class _Call(BaseModel):
    name: str
    args: dict[str, Any]


class _Notes(BaseModel):
    compressor: Json[_Call]
    tasks: Json[list[str]]
    base: str
    dtypes: Json[dict[str, str]]


def _notes(state: LazyStateDict) -> _Notes:
    """Read what `Compressed.write` noted beside the tensors."""
    try:
        return _Notes.model_validate({key.removeprefix("mergeflow."): text for key, text in state.metadata.items()})
    except ValidationError as error:
        fault = error.errors()[0]
        raise _damaged(state.path, f"mergeflow.{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


def _damaged(path: str, fault: str) -> MergeflowError:
    return MergeflowError(f"'{path}' is damaged ({fault}): make the suite again with `mergeflow compress`.")


def _open_base(call: CompressorCall, base: str | Path | None, expected: str) -> Mapping[str, Tensor] | None:
    if not call.method.needs_base:
        return None
    if base is None:
        raise MergeflowError(f"{call.name} stores differences from the base: give the base's path too.")
    origin = open_checkpoint(base)
    if not matches(origin, expected):
        raise MergeflowError(
            f"'{base}' is not the base this was compressed against "
            f"({short(fingerprint(origin))}…, not {short(expected)}…)."
        )
    return origin


def _parts(stored: Iterable[str], prefix: str) -> dict[str, dict[str, str]]:
    """List the parts stored below a prefix: tensor → part → name in the file."""
    parts: dict[str, dict[str, str]] = {}
    for place in stored:
        if place.startswith(prefix):
            name, _, key = place.removeprefix(prefix).rpartition("/")
            parts.setdefault(name, {})[key] = place
    return parts
