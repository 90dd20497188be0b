"""Opens the inputs of a merge and checks them against each other, from headers alone."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from mergeflow.checkpoints.align_names import fit_inputs
from mergeflow.checkpoints.fingerprint import scheme_of
from mergeflow.checkpoints.folders import adapters_of, folder_of
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError, together
from mergeflow.merging.alignment import match_experts
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.files.inputs import Computed, Inputs
from mergeflow.merging.files.mixture import Mixture, mixed
from mergeflow.merging.files.origin import BASE, another_base, no_task_vector
from mergeflow.merging.files.output import output_infos
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.references import Resolve, local_path
from mergeflow.merging.files.slices import stacked
from mergeflow.merging.files.step_fields import Slices, step_named
from mergeflow.merging.known import model_of
from mergeflow.merging.preflight import adapter_findings, check_findings, compare, running_findings
from mergeflow.merging.vocabulary.alignment import fit_vocabularies
from mergeflow.merging.vocabulary.companions import chosen_templates


@contextmanager
def open_inputs(
    recipe: Recipe, resolve: Resolve | None = None, made: Mapping[str, Path] | None = None
) -> Iterator[Inputs]:
    """Open every input of a recipe and check that they fit each other, from headers and the files beside them alone.

    Args:
        recipe: The recipe.
        resolve: Turns references into local paths.
        made: Where results of steps lie that were written; the others are computed when they are read.

    Raises:
        MergeflowError: A path that cannot be opened, or inputs that do not fit, all at once.
    """
    with ExitStack() as files:
        yield _Opened(recipe, resolve, made or {}, files).inputs(recipe)


class _Opened:
    """What a recipe and its steps read, each opened once."""

    def __init__(self, recipe: Recipe, resolve: Resolve | None, made: Mapping[str, Path], files: ExitStack) -> None:
        self.recipe, self.resolve, self.made, self.files = recipe, resolve, made, files
        self.states: dict[str, LazyStateDict] = {}
        self.steps: dict[str, Computed] = {}

    def state(self, path: str) -> LazyStateDict:
        """Open what a path of the recipe or of a step names."""
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
                return stacked(step, [self.state(one.model) for one in step])
            if isinstance(step, Mixture):
                return mixed(step, {path: self.state(path) for path in step.paths()})
            inputs = self.inputs(step)
        except MergeflowError as error:
            raise MergeflowError(f"step '{name}': {error}") from None
        self.steps[name] = Computed(inputs, self.recipe.device, output_infos(inputs.base.infos, step.dtype))
        return self.steps[name].state()

    def inputs(self, recipe: Recipe) -> Inputs:
        """Open the inputs of the recipe, or of a step that is a merge."""
        found = self._by_role(recipe)
        base = found["base", "base"]
        experts = {name: state for (role, name), state in found.items() if role in ("experts", "task_vectors")}
        data = {kind: {name: found[kind, name] for name, _ in paths} for kind, paths in recipe.data}
        call = recipe.call()
        fit = fit_inputs(base, experts, recipe.ignore or (), recipe.only or (), recipe.missing or "refuse")
        findings = compare(fit.base, fit.experts, recipe.tokenizer_source, templated=recipe.chat_template is not None)
        findings += running_findings([name for name in fit.base if name not in fit.kept])
        if recipe.base is None or step_named(recipe.base) is None:
            findings += adapter_findings(fit.base, fit.experts)
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
        weights, varied, beside = recipe.expert_weights(), recipe.varied_weights(), self._beside(recipe)
        return Inputs(
            call,
            base,
            experts,
            data,
            self._paths(base, experts, data),
            model_of(base, experts, weights, data, kept=fit.kept, varied=varied, beside=beside),
            fit.notes,
            tuple(one.text for one in findings),
            aligned.files if aligned is not None else None,
            _templates(recipe, base, experts),
            self.steps,
            recipe.experts[0][0] if recipe.base is None and recipe.experts and aligned is None else None,
        )

    def _by_role(self, recipe: Recipe) -> dict[tuple[str, str], LazyStateDict]:
        """Open every input, by role and name; where the recipe has no base, the first expert is it."""
        found: dict[tuple[str, str], LazyStateDict] = {}

        def enter(role: str, name: str, path: str) -> None:
            try:
                state = found[role, name] = self.state(path)
            except MergeflowError as error:
                naming = adapters_of(path, dict(recipe.experts)) if role == "base" else ""
                told = f" adapter_config.json of {naming} names it: say as `base` where it is." if naming else ""
                raise MergeflowError(f"{error}{told}") from None
            if role == "base":
                check_whole(path, state)
            if role == "task_vectors" and not state.is_task_vector:
                raise no_task_vector(path)

        wanted = {"experts": recipe.experts, "task_vectors": recipe.task_vectors, **dict(recipe.data)}
        listed = [(role, name, path) for role, paths in wanted.items() for name, path in paths]
        together(*(partial(enter, *one) for one in (("base", "base", recipe.base or listed[0][2]), *listed)))
        return found

    def _beside(self, recipe: Recipe | Slices | Mixture) -> int:
        """Return how many tensors computing what a recipe or a step reads holds at most."""
        steps, most = dict(self.recipe.steps or ()), 0
        for name in filter(None, map(step_named, recipe.paths())):
            if name in self.steps:
                model = self.steps[name].inputs.model
                most = max(most, len(model.experts) + 3 + model.beside)
            elif name not in self.made:
                most = max(most, self._beside(steps[name]))
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
    try:
        check_whole(path, state)
    except MergeflowError:
        state.close()
        raise
    return state


def check_whole(path: str | Path, state: LazyStateDict) -> None:
    """Check that a base is a whole model.

    Raises:
        MergeflowError: It is a difference from one.
    """
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
