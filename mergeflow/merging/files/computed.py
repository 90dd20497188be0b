"""A step's result that is computed when it is read, with the bits that a file of it would hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.late import torch
from mergeflow.merging.direction import settled
from mergeflow.merging.engine import Engine, treats_elements_alone
from mergeflow.merging.linalg.lapack import one_thread
from mergeflow.merging.stacks import OnPiece, Stacks, Unit

if TYPE_CHECKING:
    from torch import Tensor

    from mergeflow.merging.files.inputs import Inputs


class Computed:
    """A merge whose tensors are computed when they are read.

    Args:
        inputs: Its opened inputs.
        device: Where arithmetic happens.
        infos: Shape and type of its tensors.
    """

    def __init__(self, inputs: Inputs, device: str, infos: Mapping[str, TensorInfo]) -> None:
        self.inputs, self.infos = inputs, infos
        stacks = Stacks(inputs.base, inputs.experts, inputs.model, device, same=inputs.same)
        self.engine = Engine(inputs.call, stacks)
        self._lock, self._ready = Lock(), False
        self._whole: tuple[str, Tensor] | None = None

    def watch(self, on_piece: OnPiece) -> None:
        """Show every piece of its inputs that is read for a result to `on_piece`."""
        self.engine.stacks.on_piece = on_piece

    def state(self) -> LazyStateDict:
        """Return the result."""
        base = self.inputs.base
        entries = {name: _ComputedEntry(self, name) for name in self.infos}
        return LazyStateDict(
            base.path, entries, self.infos, {}, tied=self.inputs.model.tied, shards=base.shards, config=base.config
        )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements start..stop of a flattened tensor of the result.

        Args:
            name: The tensor.
            start: The first element, from 0.
            stop: One behind the last element.

        Returns:
            [stop − start], in the result's type.
        """
        with self._lock:
            if not self._ready:
                self.engine.first_passes()
                self._ready = True
        info, model = self.infos[name], self.inputs.model
        if name in model.shapes and not treats_elements_alone(self.inputs.call, model, name):
            if (start, stop) == (0, info.numel):
                return self._piece(Unit(name, 0, info.numel, info.shape))
            return self._held(name)[start:stop]
        spans = [(at, min(at + BLOCK, stop)) for at in range(start, max(stop, start + 1), BLOCK)]
        pieces = [self._piece(Unit(name, at, end, (end - at,))) for at, end in spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _held(self, name: str) -> Tensor:
        """Return a whole tensor; the last one is kept, for readers of one block after the other."""
        with self._lock:
            if self._whole is None or self._whole[0] != name:
                info = self.infos[name]
                with one_thread():
                    self._whole = name, self._piece(Unit(name, 0, info.numel, info.shape))
            return self._whole[1]

    def _piece(self, unit: Unit) -> Tensor:
        with torch.no_grad():
            stack, result = self.engine.result(unit)
            dtype = self.infos[unit.name].dtype.torch
            if stack is None:
                copied: Tensor = result.to(dtype)
                return copied
            return settled(unit.name, result, self.inputs.call.scale, dtype)


@dataclass(frozen=True)
class _ComputedEntry:
    """A tensor of a step's result."""

    step: Computed
    name: str

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened tensor."""
        return self.step.read(self.name, start, stop)
