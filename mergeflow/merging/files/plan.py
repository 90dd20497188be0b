"""The plan of a merge, all from headers: inputs opened and fitted, steps placed, memory and shards foretold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.align_names import fit_inputs
from mergeflow.checkpoints.fingerprint import BLOCK, fingerprint, matches, short
from mergeflow.checkpoints.folders import adapters_of, folder_of
from mergeflow.checkpoints.formats import open_checkpoint, read_json_if_whole
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import BASE, KIND, ComputedEntry, LazyStateDict, view
from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError, together
from mergeflow.late import torch
from mergeflow.merging.alignment import match_experts
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.execution.device import check_device, in_bytes
from mergeflow.merging.execution.direction import cast, settled
from mergeflow.merging.execution.engine import (
    BUFFER,
    Engine,
    check_room,
    default_workers,
    sampled_units,
    treats_elements_alone,
    unit_bytes,
    units_of,
)
from mergeflow.merging.execution.reader import Stacks, Unit, model_of
from mergeflow.merging.files.output import check_place, lock_output, output_infos, shard_names, writing
from mergeflow.merging.files.recipe import Recipe, Resolve, local_path
from mergeflow.merging.files.steps import Mixture, Slices, mixed, stacked, step_named
from mergeflow.merging.linalg.spectra import one_thread
from mergeflow.merging.matrices import Treatment, survey
from mergeflow.merging.method import Model, Pass
from mergeflow.merging.preflight import adapter_findings, check_findings, compare, running_findings
from mergeflow.merging.values import check_depth, idle_filters
from mergeflow.merging.vocabulary.alignment import fit_vocabularies
from mergeflow.merging.vocabulary.companions import TokenizerFiles, chosen_templates, write_templates
from mergeflow.yaml_text import in_words

if TYPE_CHECKING:
    from torch import Tensor


def another_base(name: str, taken: str, actual: str) -> MergeflowError:
    """Return the error for a task vector that was taken from one base and met another, by their fingerprints."""
    return MergeflowError(
        f"task vector '{name}' was taken from the base {short(taken)}…, but this base is {short(actual)}…: "
        "a difference means nothing on another base. Extract it again from this one."
    )


def no_task_vector(path: object) -> MergeflowError:
    return MergeflowError(
        f"'{path}' is not a task vector: whole models go under `experts`; make a task vector with `mergeflow vector "
        f"extract BASE EXPERT`. Differences of other tools are known by the file's metadata `{KIND}: task_vector`."
    )


def check_origin(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that task vectors were taken from this base; the base is read only where one of them says from which."""
    taken = {
        name: getattr(state, "metadata", {}).get(BASE)
        for name, state in experts.items()
        if getattr(state, "is_task_vector", False)
    }
    if any(taken.values()):
        actual = fingerprint(base)
        for name, source in taken.items():
            if source and not matches(base, source, actual):
                raise another_base(name, source, actual)


@dataclass(frozen=True)
class Inputs:
    """The opened inputs of a merge.

    Attributes:
        experts: Experts and task vectors by name, in the order of the recipe.
        data: Statistics of data, by kind, then expert.
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

    @property
    def treats_whole(self) -> bool:
        """Whether the method treats some tensor as a whole, and not its elements alone."""
        return not all(treats_elements_alone(self.call, self.model, name) for name in self.model.shapes)

    @property
    def looks_at_all_first(self) -> bool:
        """Whether the method looks at the whole model before it makes the first tensor."""
        return any(not step.within for step in self.call.method.passes(self.call.arguments, self.model.dtype))

    def write_tokenizer(self, folder: Path) -> None:
        """Give a folder, which has the base's files, the tokenizer and the chat templates that the recipe chooses."""
        if self.tokenizer is not None:
            self.tokenizer.write(folder)
        if self.templates is not None:
            write_templates(self.templates, folder)


class Computed:
    """A step whose tensors are computed when they are read, with the bits that a file of it would hold."""

    def __init__(self, inputs: Inputs, device: str, infos: Mapping[str, TensorInfo]) -> None:
        self.inputs, self.infos = inputs, infos
        self.stacks = Stacks(inputs.base, inputs.experts, inputs.model, device, same=inputs.same)
        self.engine = Engine(inputs.call, self.stacks)
        self._lock, self._ready = Lock(), False
        self._whole: tuple[str, Tensor] | None = None

    def state(self) -> LazyStateDict:
        base, tied = self.inputs.base, self.inputs.model.tied
        entries, infos = {name: ComputedEntry(partial(self._read, name)) for name in self.infos}, dict(self.infos)
        return LazyStateDict(base.path, entries, infos, {}, tied=tied, shards=base.shards, config=base.config)

    def _read(self, name: str, start: int, stop: int) -> Tensor:
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
                return cast(unit.name, result, dtype)
            return settled(unit.name, result, self.inputs.call.scale, dtype)


def twice(experts: Mapping[str, str]) -> list[str]:
    """Warn of experts of which the same is told: each counts as often as it is named."""
    alike: dict[str, list[str]] = {}
    for name, identity in experts.items():
        alike.setdefault(identity, []).append(name)
    listed = ["', '".join(names) for names in alike.values() if len(names) > 1]
    return [f"the experts '{names}' are the same, which counts as often as it is named" for names in listed]


@contextmanager
def open_inputs(
    recipe: Recipe, resolve: Resolve | None = None, made: Mapping[str, Path] | None = None
) -> Iterator[Inputs]:
    """Open every input of a recipe and check that they fit each other, from headers and the files beside them alone.

    Args:
        made: Where results of steps lie that were written; the others are computed when they are read.
    """
    with ExitStack() as files:
        yield _Opened(recipe, resolve, made or {}, files).inputs(recipe)


class _Opened:
    """What a recipe and its steps read, each opened once."""

    def __init__(self, recipe: Recipe, resolve: Resolve | None, made: Mapping[str, Path], files: ExitStack) -> None:
        self.recipe, self.resolve, self.made, self.files = recipe, resolve, made, files
        self.states: dict[str, LazyStateDict] = {}
        self.steps: dict[str, Computed] = {}
        self.of_steps: dict[str, list[str]] = {"notes": [], "warnings": []}  # what is to be said of steps

    def state(self, path: str) -> LazyStateDict:
        if path not in self.states:
            step = step_named(path)
            if step is not None and step not in self.made:
                self.states[path] = self._step(step)
            else:
                place = local_path(path, self.resolve) if step is None else self.made[step]
                self.states[path] = self.files.enter_context(open_checkpoint(place))
        return self.states[path]

    def _step(self, name: str) -> LazyStateDict:
        step = dict(self.recipe.steps or ())[name]
        try:
            if isinstance(step, Slices):
                return stacked(step, [self.state(part.model) for part in step])
            if isinstance(step, Mixture):
                return mixed(step, {path: self.state(path) for path in step.paths()}, self.recipe.allow or ())
            inputs = self.inputs(step)
            for kind, lines in (("notes", inputs.notes), ("warnings", inputs.warnings)):
                self.of_steps[kind] += [f"step '{name}', {line}" for line in lines]
        except MergeflowError as error:
            raise MergeflowError(f"step '{name}': {error}") from None
        self.steps[name] = Computed(inputs, self.recipe.device, output_infos(inputs.base.infos, step.dtype))
        return self.steps[name].state()

    def _of_steps(self, recipe: Recipe, kind: str) -> list[str]:
        return self.of_steps[kind] if recipe is self.recipe else []

    def _of_files(self, recipe: Recipe) -> list[str]:
        """Say what files hold beside what is read, and which experts are one file."""
        notes = [note for state in self.states.values() for note in state.notes] if recipe is self.recipe else []
        files = {
            name: path if step_named(path) else os.path.realpath(self.state(path).path)
            for name, path in (*recipe.experts, *recipe.task_vectors)
        }
        return [*dict.fromkeys(notes), *twice(files)]

    def inputs(self, recipe: Recipe) -> Inputs:
        """Open the inputs of the recipe, or of a step that is a merge."""
        base, experts, data = self._by_role(recipe)
        call = recipe.call()
        fit = fit_inputs(base, experts, recipe.ignore or (), recipe.only or (), recipe.missing or "refuse")
        findings = compare(fit.base, fit.experts, recipe.tokenizer_source, templated=recipe.chat_template is not None)
        findings += running_findings([name for name in fit.base if name not in fit.base_only])
        if recipe.base is None or step_named(recipe.base) is None:
            findings += adapter_findings(fit.base, fit.experts)
        aligned = None if recipe.tokenizer is None else fit_vocabularies(recipe.tokenizer, fit.base, fit.experts)
        if aligned is not None:
            fit = replace(fit, base=aligned.base, experts=aligned.experts, notes=(*fit.notes, *aligned.notes))
        if recipe.align is not None:
            fit.check()
            matched, notes = match_experts(fit.base, fit.experts)
            fit = replace(fit, experts=matched, notes=(*fit.notes, *notes))
        base, experts = fit.base, fit.experts
        together(
            fit.check,
            lambda: check_findings(findings, recipe.allow or ()),
            lambda: _check_origin(base, experts),
            lambda: _check_statistics(call, view(base, [n for n in base if n not in fit.base_only]), data),
        )
        weights, varied, extra = recipe.expert_weights(), recipe.varied_weights(), self._extra_tensors(recipe)
        folders = {name: folder_of(state) for name, state in {"base": base, **experts}.items()}
        warnings = [*(finding.text for finding in findings), *idle_filters(_varied(call, varied), [*base])]
        return Inputs(
            call,
            base,
            experts,
            data,
            self._paths(base, experts, data),
            model_of(base, experts, weights, data, base_only=fit.base_only, varied=varied, extra_tensors=extra),
            (*fit.notes, *self._of_steps(recipe, "notes")),
            (*self._of_files(recipe), *warnings, *self._of_steps(recipe, "warnings")),
            aligned.files if aligned is not None else None,
            None if recipe.chat_template is None else chosen_templates(recipe.chat_template, folders),
            self.steps,
            recipe.experts[0][0] if recipe.base is None and recipe.experts and aligned is None else None,
        )

    def _by_role(
        self, recipe: Recipe
    ) -> tuple[LazyStateDict, dict[str, LazyStateDict], dict[str, dict[str, LazyStateDict]]]:
        """Open base, experts and statistics of data; where the recipe has no base, the first expert is it."""
        states: dict[tuple[str, str], LazyStateDict] = {}

        def enter(role: str, name: str, path: str) -> None:
            try:
                state = states[role, name] = self.state(path)
            except MergeflowError as error:
                naming = adapters_of(path, dict(recipe.experts)) if role == "base" else ""
                hint = f" adapter_config.json of {naming} names it: say as `base` where it is." if naming else ""
                raise MergeflowError(f"{error}{hint}") from None
            if role == "base":
                check_whole(path, state)
            if role == "task_vectors" and not state.is_task_vector:
                raise no_task_vector(path)

        wanted = {"experts": recipe.experts, "task_vectors": recipe.task_vectors, **dict(recipe.data)}
        listed = [(role, name, path) for role, paths in wanted.items() for name, path in paths]
        together(*(partial(enter, *place) for place in (("base", "base", recipe.base or listed[0][2]), *listed)))
        experts = {name: state for (role, name), state in states.items() if role in ("experts", "task_vectors")}
        data = {kind: {name: states[kind, name] for name, _ in paths} for kind, paths in recipe.data}
        return states["base", "base"], experts, data

    def _extra_tensors(self, recipe: Recipe | Slices | Mixture) -> int:
        """Return how many tensors computing what a recipe or a step reads holds at most."""
        steps, most = dict(self.recipe.steps or ()), 0
        for name in filter(None, map(step_named, recipe.paths())):
            if name in self.steps:
                model = self.steps[name].inputs.model
                most = max(most, len(model.experts) + 3 + model.extra_tensors)
            elif name not in self.made:
                most = max(most, self._extra_tensors(steps[name]))
        return most

    def _paths(
        self,
        base: LazyStateDict,
        experts: Mapping[str, LazyStateDict],
        data: Mapping[str, Mapping[str, LazyStateDict]],
    ) -> dict[str, str]:
        """Return the local paths of all that is read, by what it is."""
        paths = {"base": base.path, **{name: state.path for name, state in experts.items()}}
        for kind, states in data.items():
            paths.update({f"{kind} of {name}": state.path for name, state in states.items()})
        return paths | ({path: state.path for path, state in self.states.items()} if self.recipe.steps else {})


def open_base(path: str | Path) -> LazyStateDict:
    state = open_checkpoint(path)
    try:
        check_whole(path, state)
    except MergeflowError:
        state.close()
        raise
    return state


def check_whole(path: str | Path, state: LazyStateDict) -> None:
    if state.is_task_vector:
        raise MergeflowError(
            f"the base '{path}' is a task vector or an adapter, not a model: it can only be an expert."
        )


def _check_statistics(call: MethodCall, base: LazyStateDict, data: Mapping[str, Mapping[str, LazyStateDict]]) -> None:
    """Check from headers that the statistics a method is given fit the base, all faults at once."""
    faults = []
    tensors = {name: info.shape for name, info in base.infos.items() if info.dtype.is_floating_point}
    for datum in call.method.given:
        states = data.get(datum.name, {})
        for name, shape in tensors.items():
            shapes = {expert: state.infos[name].shape if name in state else None for expert, state in states.items()}
            wanted = datum.shape(shape)
            some = any(each is not None for each in shapes.values()) or (datum.everywhere and name not in base.tied)
            faults += [
                f"{datum.name} of '{expert}', tensor '{name}': "
                + ("missing" if each is None else f"shape {list(each)}, expected {list(wanted)}")
                for expert, each in shapes.items()
                if (each != wanted and each is not None) or (each is None and some and datum.needed)
            ]
    if faults:
        shown = "\n".join(f"  - {fault}" for fault in faults)
        raise MergeflowError(
            f"{len(faults)} statistics do not fit the base:\n{shown}\nMake them again with this base and experts, "
            "or leave tensors as the base has them (`only`, `ignore`)."
        )


def _check_origin(base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> None:
    """Refuse task vectors that say they were taken from another base, where the base's file says which it is."""
    actual = base.metadata.get("mergeflow.fingerprint")
    taken = {name: state.metadata.get(BASE) for name, state in experts.items() if state.is_task_vector}
    for name, source in taken.items():
        if actual and source and source != actual:
            raise another_base(name, source, actual)


_RECORD = "steps.json"


def steps_to_write(recipe: Recipe, inputs: Inputs) -> tuple[str, ...]:
    """Return the steps whose results must be files, each after those it reads.

    A step is computed as it is read where that computes nothing twice: its result is read once, in pieces that its
    method can make one by one. Else its result is written first.
    """
    steps = dict(recipe.steps or ())
    reads = {name: [named for path in step.paths() if (named := step_named(path))] for name, step in steps.items()}
    order = [name for name in TopologicalSorter(reads).static_order() if name in steps]
    readers: dict[str, Recipe | Slices | Mixture] = {"": recipe, **steps}
    written: list[str] = []
    times = {"": 1}  # how often a reader's own result is read
    # What an adapter is made of is read again for what it stores whole.
    again = {"": 1 if recipe.adapter is None else 2}
    for name in reversed(order):
        read, alone = 0, True
        for reader, step in readers.items():
            count = _count(step, name)
            if count:
                read += count * _passes(reader, step, times, inputs) * again.get(reader, 1)
                alone &= _fit(inputs, name, reader, step)
        times[name] = read
        step = steps[name]
        # Files of a tokenizer of its own lie beside its weights.
        if isinstance(step, Recipe) and (read > 1 or not alone or step.tokenizer is not None):
            written.append(name)
    return tuple(reversed(written))


def _count(step: Recipe | Slices | Mixture, name: str) -> int:
    """Return how often a reader reads a step's result when it reads its inputs once."""
    if not isinstance(step, Slices):
        return sum(step_named(path) == name for path in step.paths())
    blocks = [part.layers for part in step if step_named(part.model) == name]
    apart = all(a and b and (a[1] <= b[0] or b[1] <= a[0]) for at, a in enumerate(blocks) for b in blocks[:at])
    return min(len(blocks), 1) if apart else len(blocks)


def _passes(reader: str, step: Recipe | Slices | Mixture, times: Mapping[str, int], inputs: Inputs) -> int:
    if not isinstance(step, Recipe):
        return times[reader]
    model = inputs.model if reader == "" else inputs.steps[reader].inputs.model
    return 1 + sum(part.only is None for part in step.call().method.passes(step.call().arguments, model.dtype))


def _fit(inputs: Inputs, name: str, reader: str, step: Recipe | Slices | Mixture) -> bool:
    """Whether a step's method makes what its reader asks for, blocks or whole tensors, without work done twice."""
    if name not in inputs.steps:
        return True
    made = inputs.steps[name].inputs
    whole = [key for key in made.model.shapes if not treats_elements_alone(made.call, made.model, key)]
    if not isinstance(step, Recipe):
        return not whole
    of_step = inputs if reader == "" else inputs.steps[reader].inputs
    shapes = of_step.model.shapes
    return all(key in shapes and not treats_elements_alone(of_step.call, of_step.model, key) for key in whole)


class StepFolder:
    """The temporary folder beside an output that holds the results of steps; a merge that ends well removes it.

    Of each step that is done `finished` has all that it was made of, its fingerprint and its inputs' ones.
    """

    def __init__(self, target: Path) -> None:
        self.path = Path(os.path.abspath(target)).parent / f".{target.name}.steps"
        self.finished: dict[str, dict[str, Any]] = {}

    def begin(self, resume: bool) -> None:
        """Make the folder; finished steps of a stopped merge to resume stay in it."""
        record = self.path / _RECORD
        empty = self.path.is_dir() and not any(self.path.iterdir())
        if os.path.lexists(self.path) and not (record.is_file() or empty):
            raise MergeflowError(f"'{self.path}', where results of steps belong, was not made by a merge: move it.")
        self.finished = read_json_if_whole(record) if resume else {}
        if not (resume and record.is_file()):
            shutil.rmtree(self.path, ignore_errors=True)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._record()

    def is_finished(self, name: str, identity: Mapping[str, Any]) -> bool:
        """Whether a step's result is there, from the same inputs, with the bits that were written."""
        finished = self.finished.get(name, {})
        if finished.get("identity") != dict(identity):
            return False
        try:
            with open_checkpoint(self.path / name) as state:
                return matches(state, finished["fingerprint"])
        except MergeflowError:
            return False

    def finish(self, name: str, identity: Mapping[str, Any], result: str, inputs: Mapping[str, str]) -> None:
        """Record that a step is done: all that its result depends on, its fingerprint and those of what was read."""
        self.finished[name] = {"identity": dict(identity), "fingerprint": result, "inputs": dict(inputs)}
        self._record()

    def _record(self) -> None:
        write_text(self.path / _RECORD, json.dumps(self.finished))


@contextmanager
def step_folder(target: Path, resume: bool) -> Iterator[StepFolder]:
    """The folder of an output's steps, locked for one merge at a time."""
    folder = StepFolder(target)
    lock = folder.path.with_name(f"{folder.path.name}.lock")
    held = lock_output(lock, target)
    try:
        folder.begin(resume)
        yield folder
        shutil.rmtree(folder.path, ignore_errors=True)
    finally:
        lock.unlink(missing_ok=True)
        os.close(held)


# What Python with torch (a build with CUDA) holds before any tensor is read, and a worker that reads blocks.
_PROCESS, _WORKER = 545 * 2**20, 24 * 2**20
# Where tensors are treated whole: SciPy and what BLAS packs; what the C library keeps of freed memory for each thread,
# whose heaps of 64 MB are filled by tensors of up to 32 MB with gaps between.
_ALGEBRA, _HEAP = 64 * 2**20, 96 * 2**20


@dataclass(frozen=True)
class Plan:
    """The plan of a merge.

    Attributes:
        treatment: Which tensors the method treats as matrices.
        parameters: Number of floating-point elements.
        bytes_read: Bytes read from all inputs, over all passes.
        peak_memory: Estimated bytes of memory at most.
        shards: Names of the tensors of each output file.
        notes: What was done to make the inputs fit each other.
        rank: Largest rank of a matrix, where the result is an adapter.
        warnings: What to know of: settings, tokens, templates, licences that differ.
        steps: Words on each step, by name.
        written: Those steps that are written before the merge, in order.
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
        count = len(self.shards)
        where = f"to {self.out}" if self.out else "no `out` yet: give it with `merge --out`"
        spectral = self.call.arguments.selection is not None
        treated = f", {self.treatment.count} of them treated as matrices" if spectral else ""
        return [
            f"method        {self.call.name} ({in_words(self.call.args)})",
            f"experts       {len(self.experts)}: {', '.join(self.experts)}",
            f"tensors       {self.tensors}{treated}; {self.parameters:,} parameters",
            f"reads         {in_bytes(self.bytes_read)} in {self.passes} pass{'es' * (self.passes > 1)}",
            f"writes        {in_bytes(self.bytes_written)} in {count} file{'s' * (count > 1)}, {where}"
            if self.rank is None
            else f"writes        a PEFT adapter of rank {self.rank} at most, {where}",
            f"peak memory   about {in_bytes(self.peak_memory)}",
            *(self.treatment.lines() if spectral else ()),
            *(f"step          {name}: {words}" for name, words in self.steps.items()),
            *(f"note          {note}" for note in self.notes),
            *(f"warning       {warning}" for warning in self.warnings),
        ]


def choose_device(recipe: Recipe, resolve: Resolve | None = None) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with a device that is there, and for `device: auto` a line on which was chosen, and why.

    A CUDA device is chosen where the method treats a tensor as a whole and has room there. On two cards methods that
    treat elements alone took as long as on 16 cores of the processor.
    """
    check_device(recipe.device)
    if recipe.device != "auto":
        return recipe, ()
    device, reason = "cpu", "torch sees no CUDA device"
    if torch.cuda.is_available():
        with open_inputs(recipe, resolve) as inputs:
            if not inputs.treats_whole:
                reason = f"{recipe.method} treats elements alone and gains nothing on a card"
            else:
                try:
                    check_room(inputs.call, inputs.model, inputs.base.infos, "cuda")
                    device, reason = "cuda", f"{recipe.method} treats matrices whole"
                except MergeflowError as error:
                    reason = str(error).partition(": ")[0]
    return recipe.model_copy(update={"device": device}), (f"device: auto is {device}: {reason}",)


def check_target(recipe: Recipe, inputs: Inputs, force: bool = False) -> Path:
    """Return where the result goes, checked.

    Args:
        force: Whether a file that mergeflow did not make may be replaced.
    """
    keys = [key for key in ("tokenizer", "chat_template") if getattr(recipe, key) is not None]
    if recipe.adapter is not None:
        if recipe.base is not None and step_named(recipe.base) is not None:
            raise MergeflowError(
                f"base '{recipe.base}': an adapter belongs to a model that is there, not to a step's result. Merge the "
                "step into a folder first."
            )
        if recipe.out is not None and recipe.out.endswith(".safetensors"):
            raise MergeflowError(f"out '{recipe.out}': an adapter is a folder, as PEFT reads it. Name one.")
        if recipe.shard_size is not None:
            raise MergeflowError("`shard_size`: an adapter is one file: remove it.")
        return check_place(recipe.out, None, inputs.paths)
    if keys and recipe.out is not None and recipe.out.endswith(".safetensors"):
        raise MergeflowError(
            f"`{keys[0]}` makes a model folder with its tokenizer, but out is the file '{recipe.out}': name a folder."
        )
    return check_place(recipe.out, recipe.shard_size, inputs.paths, force)


def make_plan(
    recipe: Recipe,
    inputs: Inputs,
    buffer: int = BUFFER,
    written: tuple[str, ...] | None = None,
    workers: int | None = None,
) -> Plan:
    """Plan a merge of opened inputs.

    Args:
        buffer: Bytes the merge may hold beyond its largest stack.
        written: The steps that are written first; by default those of `steps_to_write`.
        workers: Threads, by default one per core: each holds one piece of work.
    """
    call, model, infos = inputs.call, inputs.model, inputs.base.infos
    args, written = call.arguments, steps_to_write(recipe, inputs) if written is None else written
    together(
        lambda: check_depth(_varied(call, model.varied), model.shapes),
        *(partial(_check_step, name, step) for name, step in inputs.steps.items()),
    )
    out_infos, merged = output_infos(infos, recipe.dtype), {name: infos[name] for name in model.shapes}
    first = call.method.passes(call.arguments, model.dtype)
    results = {name for part in first for name in part.finds}
    passes = 1 + sum(not part.sampled and part.only is None and part.unless not in results for part in first)
    states = [inputs.base, *(state for name, state in inputs.experts.items() if name != inputs.same)]
    again = [{name for name in model.shapes if part.only(args, name, model)} for part in first if part.only is not None]
    read = passes * sum(info.nbytes for state in states for info in state.infos.values())
    read += sum(info.nbytes for state in states for some in again for name, info in state.infos.items() if name in some)
    costs = sorted(unit_bytes(call, model, unit) for unit in units_of(call, model, infos, infos))
    threads = workers or default_workers()
    held = min(buffer + costs[-1], sum(costs[-threads:])) if costs else 0
    accumulated = max((part.held(model, _elements(part, model), threads) for part in first), default=0)
    return Plan(
        call=call,
        experts=tuple(inputs.experts),
        tensors=len(infos),
        treatment=survey(f"method '{call.name}'", args.selection, args.splits, merged, model.tied, model.architecture),
        parameters=sum(info.numel for info in infos.values() if info.dtype.is_floating_point),
        bytes_read=read,
        bytes_written=sum(info.nbytes for info in out_infos.values()),
        passes=passes,
        peak_memory=process_bytes(threads, inputs.treats_whole) + held + accumulated,
        shards=_shards(recipe, inputs.base, out_infos),
        out=recipe.out,
        notes=inputs.notes,
        rank=recipe.adapter.rank if recipe.adapter is not None else None,
        warnings=inputs.warnings,
        steps={name: _in_words(step, inputs.steps.get(name), name in written) for name, step in recipe.steps or ()},
        written=written,
    )


def _elements(part: Pass, model: Model) -> int:
    """Return how many elements of each expert a pass reads, at most."""
    return sum(unit.stop - unit.start for unit in sampled_units(model)) if part.sampled else model.numel


def process_bytes(threads: int, whole: bool) -> int:
    """Return the bytes that a merge holds besides the tensors it works on."""
    return _PROCESS + threads * _WORKER + (_ALGEBRA + threads * _HEAP if whole else 0)


def _varied(call: MethodCall, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments and weights of a merge that vary, by what they are called in messages."""
    return {**call.arguments.varied, **{f"weight of '{name}'": value for name, value in weights.items()}}


def _check_step(name: str, step: Computed) -> None:
    call, model, args = step.inputs.call, step.inputs.model, step.inputs.call.arguments
    infos = {key: step.inputs.base.infos[key] for key in model.shapes}
    owner = f"step '{name}', method '{call.name}'"
    check_depth({f"step '{name}', {key}": value for key, value in _varied(call, model.varied).items()}, infos)
    survey(owner, args.selection, args.splits, infos, model.tied, model.architecture)


def _in_words(step: Recipe | Slices | Mixture, computed: Computed | None, written: bool) -> str:
    if isinstance(step, Slices):
        parts = (f"{part.model}{f' {part.stack}' if part.stack else ''}"
                 f"{f' {list(part.layers)}' if part.layers else ''}" for part in step)  # fmt: skip
        return f"layers of {', '.join(parts)}"
    if isinstance(step, Mixture):
        return f"mixture of {len(step.experts)} experts, gate {step.gate}"
    count = len(step.experts) + len(step.task_vectors)
    size = in_bytes(sum(info.nbytes for info in computed.infos.values())) if computed is not None else ""
    how = f"written first, {size} that are removed at the end" if written else "computed as it is read"
    return f"{step.method} of {count} expert{'s' * (count > 1)}, {how}"


def _shards(recipe: Recipe, base: LazyStateDict, infos: Mapping[str, TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Return the tensors of each file: a folder has the base's shards where the recipe gives no size of its own."""
    folder = recipe.out is not None and not recipe.out.endswith(".safetensors")
    if recipe.shard_size is None and folder and base.shards:
        return tuple(tuple(sorted(names)) for names in base.shards)
    return tuple(shard_names(infos, recipe.shard_size))
