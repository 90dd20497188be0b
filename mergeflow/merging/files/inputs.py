"""The opened inputs of a merge; results of steps among them are computed when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.late import torch
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.direction import settled
from mergeflow.merging.engine import Engine, treats_elements_alone
from mergeflow.merging.linalg.lapack import one_thread
from mergeflow.merging.stack import Model
from mergeflow.merging.stacks import OnPiece, Stacks, Unit
from mergeflow.merging.vocabulary.companions import TokenizerFiles, write_templates

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """The opened inputs of a merge.

    Attributes:
        call: The method with all its arguments.
        base: The base.
        experts: Experts and task vectors by name, in the order of the recipe.
        data: Statistics of data, by kind, then expert.
        paths: Local paths of all inputs, by what they are.
        model: What a method may know of them: names, weights, shapes, ties.
        notes: What was done to make them fit each other.
        warnings: What to know of: settings, tokens, templates, licences that differ.
        tokenizer: What the result's folder holds for a vocabulary of its own.
        templates: Its chat templates, where the recipe chooses them.
        steps: Steps that are computed when they are read, by name; each comes after those that it reads.
        same: The expert that stands for the base, where the recipe has none.
    """

    call: MethodCall
    base: LazyStateDict
    experts: dict[str, LazyStateDict]
    data: dict[str, dict[str, LazyStateDict]]
    paths: dict[str, str]
    model: Model
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tokenizer: TokenizerFiles | None = None
    templates: dict[str, str] | None = None
    steps: Mapping[str, Computed] = field(default_factory=dict)
    same: str | None = None

    def write_tokenizer(self, folder: Path) -> None:
        """Give a folder, which has the base's files, the tokenizer and the chat templates that the recipe chooses."""
        if self.tokenizer is not None:
            self.tokenizer.write(folder)
        if self.templates is not None:
            write_templates(self.templates, folder)


class Computed:
    """A step whose tensors are computed when they are read, with the bits that a file of it would hold.

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
