"""One merge on its way from opened inputs to a PEFT folder."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mergeflow.checkpoints.checks import pattern_of
from mergeflow.checkpoints.fingerprint import BLOCK, fingerprint
from mergeflow.checkpoints.folders import config_of, folder_of, named_base
from mergeflow.checkpoints.formats import expanded, open_checkpoint
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INNER, PREFIX, TWICE
from mergeflow.checkpoints.names import module_in_memory, names_in_memory, tied_copies, unknown_in_memory
from mergeflow.checkpoints.reader import infos_of_file
from mergeflow.checkpoints.writer import StreamWriter, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.adapters.configuration import adapter_config, loading_notes
from mergeflow.merging.adapters.factors import lines
from mergeflow.merging.adapters.reduction import Reduction, change_of, only_factors, retrained
from mergeflow.merging.adapters.slots import (
    Slot,
    bias_key,
    check_known_experts,
    contents,
    place_of,
    slot_of,
    whole_modules,
    whole_roles,
)
from mergeflow.merging.execution.direction import cast, settled
from mergeflow.merging.execution.engine import Engine
from mergeflow.merging.execution.reader import Stacks, Unit
from mergeflow.merging.files.card import model_card, published, write_licences
from mergeflow.merging.files.output import Digests, OutputFolder, removed_on_failure
from mergeflow.merging.files.plan import Inputs, Plan, output_infos
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.method import Stack
from mergeflow.merging.vocabulary.companions import copy_tokenizer, write_json
from mergeflow.version import version


@dataclass(frozen=True)
class Made:
    """A result that was written: a merge's or a part's, or an adapter.

    Attributes:
        fingerprint: Of its tensors.
        inputs: Fingerprint of every input that was read whole.
        notes: What an adapter holds and loses, a line each.
    """

    fingerprint: str
    inputs: dict[str, str]
    notes: tuple[str, ...] = ()


class AdapterJob:
    """Finds the factors of what a merge changes, and writes them with what cannot be factors."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        plan: Plan,
        on_read: Callable[[int], None],
        workers: int | None,
        buffer: int,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        assert recipe.adapter is not None
        self.given_fingerprints = dict(fingerprints or {})
        self.recipe, self.inputs, self.plan = recipe, inputs, plan
        self.digests = Digests()
        stacks = Stacks(
            inputs.base, inputs.experts, inputs.model, recipe.device, on_piece=self.digests.add, on_read=on_read
        )
        self.engine = Engine(plan.call, stacks, workers, buffer)
        self.config = config_of(inputs.base)
        # Everything is known by its name in memory, which PEFT goes by, and read by its name in the base's file.
        self.stored = names_in_memory(self.config, inputs.base)
        self.copies = tied_copies(self.config, self.stored)
        # Tables of another vocabulary: no factors make them of the base's.
        moved = inputs.tokenizer.moved if inputs.tokenizer is not None else frozenset()
        self.moved = frozenset(name for name, stored in self.stored.items() if stored in moved)
        self.infos = output_infos(inputs.base.infos, recipe.dtype)
        dtype = getattr(torch, recipe.dtype) if recipe.dtype else None
        self.found = Reduction(self.engine, plan.call.scale, recipe.adapter, dtype)

    def check(self) -> None:
        """Refuse patterns of ranks that fit nothing, and experts of a mixture that no adapter can hold."""
        self.found.check_patterns(self.stored)
        architecture, shapes = self.inputs.model.architecture, self._concerned()
        slots = [name for name, shape in shapes.items() if slot_of(name, shape, architecture, self.stored, (), False)]
        check_known_experts(shapes, slots, architecture)

    def write(self, target: Path) -> Made:
        """Write the folder beside its final name and rename it when it is whole."""
        self.check()
        slots = self._reduce()
        changed = self._changed(slots)
        if not changed and not self.found.factors:
            raise MergeflowError("the result is the base: there is nothing for an adapter to hold.")
        if not self.found.factors:
            raise MergeflowError(
                f"none of the {len(changed)} changed tensors, such as '{changed[0]}', is a matrix that can be given "
                "factors, and PEFT loads no adapter without them. Merge the checkpoints themselves, or store the "
                "difference with `mergeflow vector extract`."
            )
        owners = {
            place.stack if (place := place_of(name)) and name not in slots else name for name in self.found.factors
        }
        _check_in_memory(self.config, {*owners, *changed})
        slots = {name: slots[name] for name in owners}
        names = self.stored.keys() | self.copies.keys()
        biases = {name: key for name in changed if (key := bias_key(name, slots)) is not None}
        modules = whole_modules([name for name in changed if name not in biases], names, slots)
        keys = {name: PREFIX + name for held in modules.values() for name in held} | biases
        held = contents(self.found.factors, slots, self._shapes())
        with OutputFolder(target) as folder, removed_on_failure(folder.partial):
            folder.begin({}, {}, resume=False)
            made = self._write_weights(folder.partial / ADAPTER_WEIGHTS, held.tensors, keys)
            in_out = any(slot.transposed and slot.kind == "linear" for slot in slots.values())
            config = adapter_config(held, modules, bool(biases), names, self.config, *self._base(), in_out)
            shapes = {key: tuple(part.shape) for key, part in held.tensors.items()}
            shapes |= {key: self.infos[self._source(name)].shape for name, key in keys.items()}
            write_json(folder.partial / ADAPTER_CONFIG, config)
            inputs, notes = self._input_fingerprints(), self._notes(modules, biases, keys, slots)
            resized = [key for name, key in keys.items() if self.copies.get(name, name) in self.moved]
            notes += tuple(loading_notes(self.config, config, shapes, resized))
            self._complete(folder, made, inputs, notes)
            folder.publish()
        return Made(made, inputs, notes)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that are merged, by name in memory."""
        shapes = self.inputs.model.shapes
        return {name: shapes[stored] for name, stored in self.stored.items() if stored in shapes}

    def _concerned(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of those of them that some expert has."""
        experts = self.inputs.experts.values()
        return {
            name: shape
            for name, shape in self._shapes().items()
            if any(self.stored[name] in state for state in experts)
        }

    def _reduce(self) -> dict[str, Slot]:
        """Find the factors of all that takes them; return where they go, by name in memory."""
        states, model, reduction = self.inputs.experts.values(), self.inputs.model, self.found
        linear = self.plan.call.method.linear(self.plan.call.arguments)
        algebra: list[str] = []
        others: list[str] = []
        slots: dict[str, Slot] = {}
        for name, shape in self._concerned().items():
            summed = linear and only_factors(self.inputs.base, states, self.stored[name])
            roles = () if summed else whole_roles(reduction.options.embeddings)
            slot = slot_of(name, shape, model.architecture, self.stored, roles, summed)
            # PEFT adapts one of two tied weights alone, and merges adapters of both twice: a tied one is stored whole.
            whole = name in {*self.copies.values(), *self.moved}
            whole |= reduction.options.embeddings == "whole" and retrained(states, self.stored[name])
            if slot is not None and not whole:
                slots[name] = slot
                (algebra if summed else others).append(name)
        self.engine.first_passes()
        reduction.sum_adapters({name: self.stored[name] for name in algebra}, slots)
        reduction.approximate({name: self.stored[name] for name in others}, slots)
        return slots

    def _changed(self, slots: Mapping[str, Slot]) -> list[str]:
        """Return the names in memory of tensors without factors that the merge changes, with the copies of such."""
        seen = set()

        def look(unit: Unit, stack: Stack | None, result: Any) -> None:
            if stack is not None and bool(change_of(stack, result, self.plan.call.scale).any()):
                seen.add(unit.name)

        others = {name: self.stored[name] for name in self._concerned() if name not in slots}
        self.engine.run(look, others.values())
        changed = {name for name, stored in others.items() if stored in seen} | self.moved
        copied = {copy for copy, source in self.copies.items() if source in changed}
        # A head's own bias stands for the one that its module holds beside it.
        return sorted((changed | copied) - {self.copies[copy] for copy in copied if copy.endswith(".bias")})

    def _write_weights(self, path: Path, tensors: Mapping[str, torch.Tensor], keys: Mapping[str, str]) -> str:
        """Write factors and whole tensors; return the fingerprint."""
        infos = {key: TensorInfo.of(tensor) for key, tensor in tensors.items()}
        sources: dict[str, list[str]] = {}
        for name, key in keys.items():
            sources.setdefault(self._source(name), []).append(key)
            infos[key] = self.infos[self._source(name)]
        notes = {"format": "pt", "mergeflow.version": version(), "mergeflow.recipe": published(self.recipe).record()}
        with StreamWriter(path, infos, notes) as writer:
            for key, tensor in tensors.items():
                flat = tensor.reshape(-1)
                for start in range(0, flat.numel(), BLOCK):
                    writer.write(key, start, flat[start : start + BLOCK])

            def store(unit: Unit, stack: Stack | None, result: Any) -> None:
                dtype = self.infos[unit.name].dtype.torch
                scale = self.plan.call.scale
                piece = cast(unit.name, result, dtype) if stack is None else settled(unit.name, result, scale, dtype)
                for key in sources[unit.name]:
                    writer.write(key, unit.start, piece)

            self.engine.run(store, sources)
            return writer.commit()

    def _source(self, name: str) -> str:
        """Return the base's name of a tensor, or of the one that it is a copy of."""
        return self.stored[self.copies.get(name, name)]

    def _base(self) -> tuple[str | None, str | None]:
        """Return the base's path or id, and of an id its commit: as all adapters name it, else as the recipe does."""
        named = {named_base(state.path) for state in self.inputs.experts.values()}
        origin = named.pop() if len(named) == 1 else None
        if origin is not None:
            return origin.name, origin.revision
        base = self.recipe.base
        if base is None or expanded(base).exists():
            return base, None
        name, _, commit = base.partition("@")  # an id with its commit, as a recipe records it
        return name, commit or None

    def _input_fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of adapters' files, and of models that passed whole."""
        self.digests.settle()
        fingerprints = {}
        for owner, state in {"base": self.inputs.base, **self.inputs.experts}.items():
            file = Path(state.path) / ADAPTER_WEIGHTS
            seen = self.digests.tensors.get(owner, {})
            if state.is_task_vector and file.is_file():
                with open_checkpoint(file) as stored:
                    fingerprints[owner] = fingerprint(stored)
            elif state.infos.keys() <= seen.keys():
                fingerprints[owner] = self.digests.fingerprint(owner, infos_of_file(state))
        return fingerprints | self.given_fingerprints

    def _notes(
        self,
        modules: Mapping[str, tuple[str, ...]],
        biases: Iterable[str],
        keys: Mapping[str, str],
        slots: Mapping[str, Slot],
    ) -> tuple[str, ...]:
        """Say what the adapter holds and loses, and what it takes for granted."""
        whole_models = any(not state.is_task_vector for state in self.inputs.experts.values())
        unknown = whole_models and module_in_memory(self.config, "") is None
        linear = sorted(slot.module for slot in slots.values() if unknown and slot.kind == "linear")
        taken = [
            f"modules whose class is unknown, {len(linear)} such as '{module}', are taken for linear ones: PEFT passes "
            "over these factors of any other, such as an embedding (`ignore` it, or write the model)"
            for module in linear[:1]
        ]
        size = sum(self.infos[self._source(name)].nbytes for name in keys)
        whole = [f"stored whole: {_listed(sorted(modules))}, {size / 1e6:.2f} MB"] if modules else []
        held = [f"biases of {len(list(biases))} adapted modules"] if biases else []
        twice = [TWICE] if any(slot.module.endswith(INNER) for slot in slots.values()) else []
        return (*lines(self.found.losses.values()), *whole, *held, *taken, *twice)

    def _complete(self, folder: OutputFolder, made: str, inputs: Mapping[str, str], notes: tuple[str, ...]) -> None:
        """Write all that the folder holds beside weights and configuration."""
        partial, source = folder.partial, folder_of(self.inputs.base)
        if source is not None and (self.inputs.tokenizer is not None or self.inputs.templates is not None):
            copy_tokenizer(source, partial)
            self.inputs.write_tokenizer(partial)
        write_licences(self.recipe, self.inputs, partial)
        record = {
            "version": version(),
            "recipe": json.loads(published(self.recipe).record()),
            "fingerprint": made,
            "inputs": dict(inputs),
            "errors": {name: loss.error for name, loss in sorted(self.found.losses.items())},
        }
        folder.write_record(record, "README.md")
        write_text(partial / "README.md", model_card(self.recipe, self.plan, self.inputs, made, inputs, notes))


def _check_in_memory(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse tensors that PEFT would not find in the model, and pass over in silence."""
    held = {place.stack if (place := place_of(name)) else name for name in names}
    strange = sorted(unknown_in_memory(config, held))
    if strange:
        raise MergeflowError(
            f"{len(strange)} changed tensors such as '{strange[0]}' are other ones in transformers' memory, by whose "
            "names PEFT adapts them. Load base and experts with transformers, store them with "
            "save_pretrained(folder, save_original_format=False), and give these folders."
        )


def _listed(names: list[str]) -> str:
    """Return names with their numbers as stars, with counts."""
    counts = Counter(map(pattern_of, names))
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())
