"""What a recipe will do, found from headers alone."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mergeflow.checkpoints.checks import check_compatible
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.pickles import PICKLES
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError, together
from mergeflow.merging.architectures.architecture import architecture_of
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.device import check_device
from mergeflow.merging.engine import BUFFER, common_ties
from mergeflow.merging.files.card import check_card
from mergeflow.merging.files.origin import BASE, another_base, no_task_vector
from mergeflow.merging.files.output import check_replaceable, partial_folder
from mergeflow.merging.files.recipe import AnyRecipe, Recipe, as_recipe
from mergeflow.merging.files.references import Resolve, local_path
from mergeflow.merging.treatment import Treatment, survey

# What Python with torch (a build with CUDA) holds before any tensor is read.
_PROCESS_BYTES = 530 * 2**20


@dataclass(frozen=True)
class Inputs:
    """The opened inputs of a merge."""

    base: LazyStateDict
    experts: dict[str, LazyStateDict]
    data: dict[str, dict[str, LazyStateDict]]
    paths: dict[str, str]


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
            f"writes        {_size(self.bytes_written)} in {count} file{'s' * (count > 1)}, {where}",
            f"peak memory   about {_size(self.peak_memory)}",
            *(self.treatment.lines() if spectral else ()),
        ]


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def open_inputs(recipe: Recipe, resolve: Resolve | None = None) -> Iterator[Inputs]:
    """Open every input of a recipe and check that they fit each other, from headers alone.

    Raises:
        MergeflowError: A path that cannot be opened, or tensors that do not fit, all at once.
    """
    with ExitStack() as opened:
        found: dict[tuple[str, str], LazyStateDict] = {}

        def enter(role: str, name: str, path: str) -> None:
            read = open_base if role == "base" else open_checkpoint
            state = found[role, name] = opened.enter_context(read(local_path(path, resolve)))
            if role == "task_vectors" and not state.is_task_vector:
                raise no_task_vector(path)

        wanted = {"experts": recipe.experts, "task_vectors": recipe.task_vectors, **dict(recipe.data)}
        listed = [(role, name, path) for role, paths in wanted.items() for name, path in paths]
        together(*(partial(enter, *one) for one in (("base", "base", recipe.base), *listed)))
        base = found["base", "base"]
        experts = {name: state for (role, name), state in found.items() if role in ("experts", "task_vectors")}
        data = {kind: {name: found[kind, name] for name, _ in paths} for kind, paths in recipe.data}
        together(
            lambda: check_compatible(base, experts, dtypes=recipe.dtype is None),
            lambda: _check_types(base),
            lambda: _check_origin(base, experts),
            lambda: _check_statistics(recipe.call(), base, data),
        )
        paths = {"base": base.path, **{name: state.path for name, state in experts.items()}}
        for kind, states in data.items():
            paths.update({f"{kind} of {name}": state.path for name, state in states.items()})
        yield Inputs(base, experts, data, paths)


def open_base(path: str | Path) -> LazyStateDict:
    """Open a checkpoint that must be a whole model.

    Raises:
        MergeflowError: It is a difference from one.
    """
    state = open_checkpoint(path)
    if state.is_task_vector:
        state.close()
        raise MergeflowError(
            f"the base '{path}' is a task vector or an adapter, not a model: it can only be an expert."
        )
    return state


def _check_statistics(call: MethodCall, base: LazyStateDict, data: Mapping[str, Mapping[str, LazyStateDict]]) -> None:
    """Check from headers that the statistics a method is given fit the base, all faults at once."""
    faults = []
    tensors = {name: info.shape for name, info in base.infos.items() if info.dtype.is_floating_point}
    for datum in call.method.given:
        states = data.get(datum.name, {})
        for name, shape in tensors.items():
            found = {expert: state.infos[name].shape if name in state else None for expert, state in states.items()}
            wanted = datum.shape(shape)
            some = any(each is not None for each in found.values()) or (datum.everywhere and name not in base.tied)
            faults += [
                f"{datum.name} of '{expert}', tensor '{name}': "
                + ("missing" if each is None else f"shape {list(each)}, expected {list(wanted)}")
                for expert, each in found.items()
                if (each != wanted and each is not None) or (each is None and some and datum.needed)
            ]
    if faults:
        shown = "\n".join(f"  - {fault}" for fault in faults)
        raise MergeflowError(
            f"{len(faults)} statistics do not fit the base:\n{shown}\nMake them again with this base and experts."
        )


def _check_origin(base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> None:
    """Refuse task vectors that say they were taken from another base, where the base's file says which it is."""
    known = base.metadata.get("mergeflow.fingerprint")
    taken = {name: state.metadata.get(BASE) for name, state in experts.items() if state.is_task_vector}
    for name, source in taken.items():
        if known and source and source != known:
            raise another_base(name, source, known)


def _check_types(base: LazyStateDict) -> None:
    odd = [name for name, info in base.infos.items() if info.dtype.is_complex]
    if odd:
        raise MergeflowError(f"tensor '{odd[0]}' is complex; only real tensors can be merged.")


def check_recipe(recipe: AnyRecipe, resolve: Resolve | None = None, buffer: int = BUFFER) -> Plan:
    """Validate a recipe against its files and return what the merge will do; reads headers only.

    Args:
        recipe: The recipe: a record, a mapping, or the path of a file.
        resolve: Turns references into local paths.
        buffer: Bytes the merge may hold beyond its largest stack.

    Raises:
        MergeflowError: Anything that would stop the merge; a missing `out` does not, as `merge` may be given one.
    """
    recipe = as_recipe(recipe)
    check_device(recipe.device)
    with open_inputs(recipe, resolve) as inputs:
        together(
            lambda: make_plan(recipe, inputs, buffer),
            lambda: recipe.out is None or check_place(recipe, inputs),
        )
        return make_plan(recipe, inputs, buffer)


def make_plan(recipe: Recipe, inputs: Inputs, buffer: int = BUFFER) -> Plan:
    """Return what a merge of opened inputs will do."""
    call = recipe.call()
    infos, args = inputs.base.infos, call.arguments
    out_infos = output_infos(infos, recipe.dtype)
    ties = common_ties(inputs.base, inputs.experts)
    wide = any(
        info.dtype == torch.float64
        for state in (inputs.base, *inputs.experts.values())
        for info in state.infos.values()
    )
    arithmetic = torch.float64 if wide else torch.float32
    passes = 1 + len(call.method.statistics(call.arguments, arithmetic))
    read = sum(info.nbytes for state in (inputs.base, *inputs.experts.values()) for info in state.infos.values())
    largest = max((info.numel for info in infos.values()), default=0) * arithmetic.itemsize
    total = sum(info.numel for info in infos.values()) * arithmetic.itemsize
    held = min(buffer + (len(inputs.experts) + 3) * largest, (len(inputs.experts) + 3) * total)
    return Plan(
        call=call,
        experts=tuple(inputs.experts),
        tensors=len(infos),
        treatment=survey(
            f"method '{call.name}'", args.selection, args.splits, infos, ties, architecture_of(inputs.base)
        ),
        parameters=sum(info.numel for info in infos.values() if info.dtype.is_floating_point),
        bytes_read=read * passes,
        bytes_written=sum(info.nbytes for info in out_infos.values()),
        passes=passes,
        peak_memory=_PROCESS_BYTES + held,
        shards=tuple(shard_names(out_infos, recipe.shard_size)),
        out=recipe.out,
    )


def output_infos(infos: Mapping[str, TensorInfo], dtype: str | None) -> dict[str, TensorInfo]:
    """Return shape and type of every tensor of the result."""
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    return {
        name: TensorInfo(info.shape, wanted if wanted and info.dtype.is_floating_point else info.dtype)
        for name, info in infos.items()
    }


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


def check_place(recipe: Recipe, inputs: Inputs) -> Path:
    """Return where the result goes; nothing that is not ours stands in its place or its card's.

    Raises:
        MergeflowError: As `check_out`, or the card would overwrite a file.
    """
    target = check_out(recipe.out, recipe.shard_size, inputs.paths)
    check_card(target.with_suffix(".md") if target.suffix == ".safetensors" else target / "README.md")
    return target


def check_out(out: str | None, shard_size: int | None, inputs: Mapping[str, str]) -> Path:
    """Return the output path, checked against the inputs.

    Raises:
        MergeflowError: No output, one that is an input or lies in one, a folder with files of others, or shards in
            a file.
    """
    if not out:
        raise MergeflowError("no output: give `out` in the recipe or --out.")
    target = Path(out).expanduser()
    single = target.suffix == ".safetensors"
    if single and shard_size is not None:
        raise MergeflowError(f"`shard_size` makes a folder, but out is the file '{out}': name a folder, or remove it.")
    if not single and target.suffix in PICKLES:
        raise MergeflowError(f"out '{out}': results are safetensors. End it in .safetensors, or name a folder.")
    try:
        _check_place(target, single, inputs)
    except OSError as error:  # no permission to look, or a name that is too long
        raise MergeflowError(f"cannot write '{out}': {error.strerror}. Choose another place.") from None
    return target


def check_file(out: str | Path, inputs: Mapping[str, str]) -> Path:
    """Return the path of a result that is one safetensors file, checked against the inputs.

    Raises:
        MergeflowError: Another kind of file, one that is an input or lies in one, or a folder.
    """
    if Path(out).suffix != ".safetensors":
        raise MergeflowError(f"out '{out}': the result is one file, end it in .safetensors.")
    return check_out(str(out), None, inputs)


def _check_place(target: Path, single: bool, inputs: Mapping[str, str]) -> None:
    real = target.resolve()
    for name, path in inputs.items():
        source = Path(path).resolve()
        inside = source.is_dir() and (real == source or source in real.parents)
        if real == source or inside or real in source.parents or _same_file(real, source):
            raise MergeflowError(f"out '{target}' would overwrite the input '{name}' ({path}): choose another place.")
    if single and target.is_dir():
        raise MergeflowError(f"out '{target}' is a folder: give another name.")
    if not single and target.is_file():
        raise MergeflowError(f"out '{target}' is a file: end it in .safetensors to make one file, or name a folder.")
    if not single:
        check_replaceable(target)
    unfinished = partial_folder(target)
    if not single and (unfinished.is_symlink() or unfinished.is_file()):
        raise MergeflowError(f"'{unfinished}', where the unfinished folder belongs, is a file or a link: move it.")
    parent = next(folder for folder in real.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        fault = "is not a folder" if not parent.is_dir() else "may not be written"
        raise MergeflowError(f"cannot write '{target}': '{parent}' {fault}. Choose another place.")


def _same_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)
