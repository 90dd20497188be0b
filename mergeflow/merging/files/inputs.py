"""The inputs of a merge, opened and checked against each other from headers alone."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mergeflow.checkpoints.config import folder_of
from mergeflow.checkpoints.fingerprint import scheme_of
from mergeflow.checkpoints.fitted import fit_inputs
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError, together
from mergeflow.merging.alignment.files import match_experts
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.files.origin import BASE, another_base, no_task_vector
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.references import Resolve, local_path
from mergeflow.merging.method import Model
from mergeflow.merging.preflight.compare import compare
from mergeflow.merging.preflight.findings import check_findings
from mergeflow.merging.stacks import model_of
from mergeflow.merging.vocabulary.companions import TokenizerFiles
from mergeflow.merging.vocabulary.fitting import fit_vocabularies
from mergeflow.merging.vocabulary.templates import chosen_templates


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


@contextmanager
def open_inputs(recipe: Recipe, resolve: Resolve | None = None) -> Iterator[Inputs]:
    """Open every input of a recipe and check that they fit each other, from headers and the files beside them alone.

    Raises:
        MergeflowError: A path that cannot be opened, or inputs that do not fit, all at once.
    """
    with ExitStack() as opened:
        found = _opened(recipe, resolve, opened)
        base = found["base", "base"]
        experts = {name: state for (role, name), state in found.items() if role in ("experts", "task_vectors")}
        data = {kind: {name: found[kind, name] for name, _ in paths} for kind, paths in recipe.data}
        call = recipe.call()
        fit = fit_inputs(base, experts, recipe.ignore or (), recipe.only or (), recipe.missing or "refuse")
        findings = compare(fit.base, fit.experts, recipe.tokenizer_source, templated=recipe.chat_template is not None)
        aligned = None if recipe.tokenizer is None else fit_vocabularies(recipe.tokenizer, fit.base, fit.experts)
        if aligned is not None:
            fit = replace(fit, base=aligned.base, experts=aligned.experts, notes=(*fit.notes, *aligned.notes))
        if recipe.align is not None:
            fit.check()
            matched, told = match_experts(fit.base, fit.experts)
            fit = replace(fit, experts=matched, notes=(*fit.notes, *told))
        base, experts = fit.base, fit.experts
        together(
            fit.check,
            lambda: check_findings(findings, recipe.allow or ()),
            lambda: _check_types(base),
            lambda: _check_origin(base, experts),
            lambda: _check_statistics(call, base, data),
        )
        paths = {"base": base.path, **{name: state.path for name, state in experts.items()}}
        for kind, states in data.items():
            paths.update({f"{kind} of {name}": state.path for name, state in states.items()})
        yield Inputs(
            call,
            base,
            experts,
            data,
            paths,
            model_of(base, experts, recipe.expert_weights(), data, kept=fit.kept, varied=recipe.varied_weights()),
            fit.notes,
            tuple(one.text for one in findings),
            aligned.files if aligned is not None else None,
            _templates(recipe, base, experts),
        )


def _opened(recipe: Recipe, resolve: Resolve | None, opened: ExitStack) -> dict[tuple[str, str], LazyStateDict]:
    """Open every input, by role and name; where the recipe has no base, the first expert is it."""
    found: dict[tuple[str, str], LazyStateDict] = {}

    def enter(role: str, name: str, path: str) -> None:
        read = open_base if role == "base" else open_checkpoint
        state = found[role, name] = opened.enter_context(read(local_path(path, resolve)))
        if role == "task_vectors" and not state.is_task_vector:
            raise no_task_vector(path)

    wanted = {"experts": recipe.experts, "task_vectors": recipe.task_vectors, **dict(recipe.data)}
    listed = [(role, name, path) for role, paths in wanted.items() for name, path in paths]
    together(*(partial(enter, *one) for one in (("base", "base", recipe.base or listed[0][2]), *listed)))
    return found


def _templates(recipe: Recipe, base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> dict[str, str] | None:
    if recipe.chat_template is None:
        return None
    return chosen_templates(recipe.chat_template, {n: folder_of(one) for n, one in {"base": base, **experts}.items()})


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
        # Of two schemes the merge itself tells, when it has read the base.
        if known and source and source != known and scheme_of(source) == scheme_of(known):
            raise another_base(name, source, known)


def _check_types(base: LazyStateDict) -> None:
    odd = [name for name, info in base.infos.items() if info.dtype.is_complex]
    if odd:
        raise MergeflowError(f"tensor '{odd[0]}' is complex; only real tensors can be merged.")
