"""What a recipe will do, found from headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError, together
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.device import check_device
from mergeflow.merging.engine import BUFFER, default_workers, sampled_units, treats_elements_alone, unit_bytes, units_of
from mergeflow.merging.files.inputs import Computed, Inputs
from mergeflow.merging.files.mixture import Mixture
from mergeflow.merging.files.opening import open_inputs
from mergeflow.merging.files.output import output_infos, shard_names
from mergeflow.merging.files.place import check_adapter_place, check_card, check_place
from mergeflow.merging.files.recipe import AnyRecipe, Recipe, as_recipe
from mergeflow.merging.files.references import Resolve
from mergeflow.merging.files.step_fields import Slices, step_named
from mergeflow.merging.files.step_plan import steps_to_write
from mergeflow.merging.passes import Pass
from mergeflow.merging.stack import Model
from mergeflow.merging.treatment import Treatment, survey
from mergeflow.merging.values import check_depth

# What Python with torch (a build with CUDA) holds before any tensor is read, and a worker that reads blocks.
_PROCESS, _WORKER = 545 * 2**20, 24 * 2**20
# Where tensors are treated whole: SciPy and what BLAS packs; what the C library keeps of freed memory for each thread,
# whose heaps of 64 MB are filled by tensors of up to 32 MB with gaps between.
_ALGEBRA, _HEAP = 64 * 2**20, 96 * 2**20


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
        steps: Each step, in words.
        written: Those of them that are written before the merge, in order.
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
    steps: Mapping[str, str] = field(default_factory=dict)
    written: tuple[str, ...] = ()

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
            *(f"step          {name}: {words}" for name, words in self.steps.items()),
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

    Args:
        recipe: Its `out`, `shard_size`, `adapter` and `tokenizer` say what is made.
        inputs: What it reads, which is never overwritten.
        force: Whether a file that mergeflow did not make may be replaced.

    Raises:
        MergeflowError: As `check_place`, or a tokenizer of its own without a folder that could hold it.
    """
    keys = [key for key in ("tokenizer", "chat_template") if getattr(recipe, key) is not None]
    if recipe.adapter is not None:
        if recipe.base is not None and step_named(recipe.base) is not None:
            raise MergeflowError(
                f"base '{recipe.base}': an adapter belongs to a model that is there, not to a step's result. Merge the "
                "step into a folder first."
            )
        return check_adapter_place(recipe.out, recipe.shard_size, inputs.paths)
    if keys and recipe.out is not None and recipe.out.endswith(".safetensors"):
        raise MergeflowError(
            f"`{keys[0]}` makes a model folder with its tokenizer, but out is the file '{recipe.out}': name a folder."
        )
    target = check_place(recipe.out, recipe.shard_size, inputs.paths, force)
    if target.suffix == ".safetensors":  # what force may replace is this file, not one in the place of its card
        check_card(target.with_suffix(".md"))
    return target


def make_plan(
    recipe: Recipe,
    inputs: Inputs,
    buffer: int = BUFFER,
    written: tuple[str, ...] | None = None,
    workers: int | None = None,
) -> Plan:
    """Return what a merge of opened inputs will do.

    Args:
        recipe: The recipe.
        inputs: Its inputs.
        buffer: Bytes the merge may hold beyond its largest stack.
        written: The steps that are written first; by default those of `steps_to_write`.
        workers: Threads, by default one per core: each holds one piece of work.

    Raises:
        MergeflowError: Matrices of the recipe or of a step that cannot be treated as the arguments say.
    """
    call, model, infos = inputs.call, inputs.model, inputs.base.infos
    args, written = call.arguments, steps_to_write(recipe, inputs) if written is None else written
    together(
        lambda: check_depth({**args.varied, **_as_weights(model.varied)}, model.shapes),
        *(partial(_check_step, name, step) for name, step in inputs.steps.items()),
    )
    out_infos, merged = output_infos(infos, recipe.dtype), {name: infos[name] for name in model.shapes}
    first = call.method.passes(call.arguments, model.dtype)
    found = {name for one in first for name in one.finds}
    passes = 1 + sum(not one.sampled and one.only is None and one.unless not in found for one in first)
    states = [inputs.base, *(state for name, state in inputs.experts.items() if name != inputs.same)]
    again = [{name for name in model.shapes if one.only(args, name, model)} for one in first if one.only is not None]
    read = passes * sum(info.nbytes for state in states for info in state.infos.values())
    read += sum(info.nbytes for state in states for some in again for name, info in state.infos.items() if name in some)
    costs = sorted(unit_bytes(call, model, unit) for unit in units_of(call, model, infos, infos))
    threads = workers or default_workers()
    held = min(buffer + costs[-1], sum(costs[-threads:])) if costs else 0
    accumulated = max((one.held(model, _elements(one, model), threads) for one in first), default=0)
    whole = not all(treats_elements_alone(call, model, name) for name in model.shapes)
    return Plan(
        call=call,
        experts=tuple(inputs.experts),
        tensors=len(infos),
        treatment=survey(f"method '{call.name}'", args.selection, args.splits, merged, model.tied, model.architecture),
        parameters=sum(info.numel for info in infos.values() if info.dtype.is_floating_point),
        bytes_read=read,
        bytes_written=sum(info.nbytes for info in out_infos.values()),
        passes=passes,
        peak_memory=process_bytes(threads, whole) + held + accumulated,
        shards=_shards(recipe, inputs.base, out_infos),
        out=recipe.out,
        notes=inputs.notes,
        rank=recipe.adapter.rank if recipe.adapter is not None else None,
        warnings=inputs.warnings,
        steps={name: _in_words(step, inputs.steps.get(name), name in written) for name, step in recipe.steps or ()},
        written=written,
    )


def _elements(one: Pass, model: Model) -> int:
    """Return how many elements of each expert a pass reads, at most."""
    return sum(unit.stop - unit.start for unit in sampled_units(model)) if one.sampled else model.numel


def process_bytes(threads: int, whole: bool) -> int:
    """Return the bytes that a merge holds besides the tensors it works on.

    Args:
        threads: Workers.
        whole: Whether some tensor is treated whole.
    """
    return _PROCESS + threads * _WORKER + (_ALGEBRA + threads * _HEAP if whole else 0)


def _as_weights(varied: Mapping[str, Any]) -> dict[str, Any]:
    return {f"weight of '{name}'": value for name, value in varied.items()}


def _check_step(name: str, step: Computed) -> None:
    call, model, args = step.inputs.call, step.inputs.model, step.inputs.call.arguments
    infos = {key: step.inputs.base.infos[key] for key in model.shapes}
    owner = f"step '{name}', method '{call.name}'"
    varied = {**args.varied, **_as_weights(model.varied)}
    check_depth({f"step '{name}', {key}": value for key, value in varied.items()}, infos)
    survey(owner, args.selection, args.splits, infos, model.tied, model.architecture)


def _in_words(step: Recipe | Slices | Mixture, computed: Computed | None, written: bool) -> str:
    """Return what a step is, for people."""
    if isinstance(step, Slices):
        parts = (f"{one.model} [{one.layers[0]}, {one.layers[1]}]" if one.layers else one.model for one in step)
        return f"layers of {', '.join(parts)}"
    if isinstance(step, Mixture):
        return f"mixture of {len(step.experts)} experts, gate {step.gate}"
    count = len(step.experts) + len(step.task_vectors)
    size = _size(sum(info.nbytes for info in computed.infos.values())) if computed is not None else ""
    how = f"written first, {size} that are removed at the end" if written else "computed as it is read"
    return f"{step.method} of {count} expert{'s' * (count > 1)}, {how}"


def _shards(recipe: Recipe, base: LazyStateDict, infos: Mapping[str, TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Return the tensors of each file: a folder has the base's shards where the recipe gives no size of its own."""
    folder = recipe.out is not None and not recipe.out.endswith(".safetensors")
    if recipe.shard_size is None and folder and base.shards:
        return tuple(tuple(sorted(names)) for names in base.shards)
    return tuple(shard_names(infos, recipe.shard_size))
