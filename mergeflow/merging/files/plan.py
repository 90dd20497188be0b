"""What a recipe will do, found from headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError, together
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.device import check_device
from mergeflow.merging.engine import BUFFER, units_of
from mergeflow.merging.files.inputs import Inputs, open_inputs
from mergeflow.merging.files.place import check_adapter_place, check_place
from mergeflow.merging.files.recipe import AnyRecipe, Recipe, as_recipe
from mergeflow.merging.files.references import Resolve
from mergeflow.merging.stacks import unit_bytes
from mergeflow.merging.treatment import Treatment, survey

# What Python with torch (a build with CUDA) holds before any tensor is read.
_PROCESS_BYTES = 530 * 2**20


@dataclass(frozen=True)
class Plan:
    """What a merge will do.

    Attributes:
        call: The method with all its arguments.
        experts: Names of the experts.
        tensors: Number of tensors of the result.
        treatment: Which of them the method treats as matrices.
        parameters: Number of floating-point elements.
        bytes_read: Bytes read from all inputs, over all passes.
        bytes_written: Bytes of the result.
        passes: Times the inputs are read.
        peak_memory: Estimated bytes of memory at most.
        shards: Names of the tensors of each output file.
        out: Where they go; None where the recipe does not say.
        notes: What was done to make the inputs fit each other.
        rank: Largest rank of a matrix, where the result is an adapter.
        warnings: What to know of: settings, tokens, templates, licences that differ.
    """

    call: MethodCall
    experts: tuple[str, ...]
    tensors: int
    treatment: Treatment
    parameters: int
    bytes_read: int
    bytes_written: int
    passes: int
    peak_memory: int
    shards: tuple[tuple[str, ...], ...]
    out: str | None = None
    notes: tuple[str, ...] = ()
    rank: int | None = None
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the plan as lines for people."""
        args = ", ".join(f"{key} {value}" for key, value in self.call.args.items())
        count = len(self.shards)
        where = f"to {self.out}" if self.out else "no `out` yet: give it with `merge --out`"
        spectral = self.call.arguments.selection is not None
        treated = f", {self.treatment.count} of them treated as matrices" if spectral else ""
        return [
            f"method        {self.call.name} ({args})",
            f"experts       {len(self.experts)}: {', '.join(self.experts)}",
            f"tensors       {self.tensors}{treated}; {self.parameters:,} parameters",
            f"reads         {_size(self.bytes_read)} in {self.passes} pass{'es' * (self.passes > 1)}",
            f"writes        {_size(self.bytes_written)} in {count} file{'s' * (count > 1)}, {where}"
            if self.rank is None
            else f"writes        a PEFT adapter of rank {self.rank} at most, {where}",
            f"peak memory   about {_size(self.peak_memory)}",
            *(self.treatment.lines() if spectral else ()),
            *(f"note          {note}" for note in self.notes),
            *(f"warning       {warning}" for warning in self.warnings),
        ]


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def check_recipe(
    recipe: AnyRecipe, resolve: Resolve | None = None, buffer: int = BUFFER, *, force: bool = False
) -> Plan:
    """Validate a recipe against its files and return what the merge will do; reads headers only.

    Args:
        recipe: The recipe: a record, a mapping, or the path of a file.
        resolve: Turns references into local paths.
        buffer: Bytes the merge may hold beyond its largest stack.
        force: Whether the merge may replace a file that mergeflow did not make.

    Raises:
        MergeflowError: Anything that would stop the merge; a missing `out` does not, as `merge` may be given one.
    """
    recipe = as_recipe(recipe)
    check_device(recipe.device)
    with open_inputs(recipe, resolve) as inputs:
        plans: list[Plan] = []
        together(
            lambda: plans.append(make_plan(recipe, inputs, buffer)),
            lambda: recipe.out is None or check_target(recipe, inputs, force),
        )
        return plans[0]


def check_target(recipe: Recipe, inputs: Inputs, force: bool = False) -> Path:
    """Return where the result goes, checked.

    Raises:
        MergeflowError: As `check_place`, or a tokenizer of its own without a folder that could hold it.
    """
    keys = [key for key in ("tokenizer", "chat_template") if getattr(recipe, key) is not None]
    if recipe.adapter is not None:
        if keys:
            raise MergeflowError(f"`{keys[0]}` is of a whole model, not of an adapter: remove it, or `adapter`.")
        return check_adapter_place(recipe.out, recipe.shard_size, inputs.paths)
    if keys and recipe.out is not None and recipe.out.endswith(".safetensors"):
        raise MergeflowError(
            f"`{keys[0]}` makes a model folder with its tokenizer, but out is the file '{recipe.out}': name a folder."
        )
    return check_place(recipe.out, recipe.shard_size, inputs.paths, force)


def make_plan(recipe: Recipe, inputs: Inputs, buffer: int = BUFFER) -> Plan:
    """Return what a merge of opened inputs will do."""
    call, model, infos = inputs.call, inputs.model, inputs.base.infos
    args = call.arguments
    out_infos, merged = output_infos(infos, recipe.dtype), {name: infos[name] for name in model.shapes}
    first = call.method.passes(call.arguments, model.dtype)
    found = {name for one in first for name in one.finds}
    passes = 1 + sum(not one.sampled and one.unless not in found for one in first)
    read = sum(info.nbytes for state in (inputs.base, *inputs.experts.values()) for info in state.infos.values())
    costs = [unit_bytes(model, unit) for unit in units_of(call, model, infos, infos)]
    held = min(buffer + max(costs, default=0), sum(costs))
    return Plan(
        call=call,
        experts=tuple(inputs.experts),
        tensors=len(infos),
        treatment=survey(f"method '{call.name}'", args.selection, args.splits, merged, model.tied, model.architecture),
        parameters=sum(info.numel for info in infos.values() if info.dtype.is_floating_point),
        bytes_read=read * passes,
        bytes_written=sum(info.nbytes for info in out_infos.values()),
        passes=passes,
        peak_memory=_PROCESS_BYTES + held,
        shards=_shards(recipe, inputs.base, out_infos),
        out=recipe.out,
        notes=inputs.notes,
        rank=recipe.adapter.rank if recipe.adapter is not None else None,
        warnings=inputs.warnings,
    )


def output_infos(infos: Mapping[str, TensorInfo], dtype: str | None) -> dict[str, TensorInfo]:
    """Return shape and type of every tensor of the result."""
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    return {
        name: TensorInfo(info.shape, wanted if wanted and info.dtype.is_floating_point else info.dtype)
        for name, info in infos.items()
    }


def _shards(recipe: Recipe, base: LazyStateDict, infos: Mapping[str, TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Return the tensors of each file: a folder has the base's shards where the recipe gives no size of its own."""
    folder = recipe.out is not None and not recipe.out.endswith(".safetensors")
    if recipe.shard_size is None and folder and base.shards:
        return tuple(tuple(sorted(names)) for names in base.shards)
    return tuple(shard_names(infos, recipe.shard_size))


def shard_names(infos: Mapping[str, TensorInfo], size: int | None) -> list[tuple[str, ...]]:
    """Split the tensors, in order of name, into files of at most `size` bytes (one tensor at least)."""
    if size is None:
        return [tuple(sorted(infos))]
    shards: list[list[str]] = [[]]
    held = 0
    for name in sorted(infos):
        if shards[-1] and held + infos[name].nbytes > size:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += infos[name].nbytes
    return [tuple(shard) for shard in shards]
