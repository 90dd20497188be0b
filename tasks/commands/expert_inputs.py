"""Open the base, experts and samples named on the command line."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.formats import expanded
from mergeflow.commands.options import print_remarks
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.late import torch
from tasks.travel.store import bring

if TYPE_CHECKING:
    from mergeflow.checkpoints import LazyStateDict
    from mergeflow.linearity.affine import Featured
    from mergeflow.linearity.networks import Opened
    from mergeflow.merging.files.recipe import Recipe
    from mergeflow.modalities.heads import Head
    from mergeflow.modality import Model
    from tasks.project.parameters import Params


State = Mapping[str, Any]
Architecture = Annotated[
    str | None, typer.Option(help="open_clip's name, pocket-clip, torchvision:NAME, or a folder with config.json.")
]


class SamplesError(MergeflowError):
    """A source that is named and cannot be read."""


@dataclass(frozen=True)
class OpenedExperts:
    """What is measured: the base's and the experts' weights, a module for them, samples by name."""

    model: "Model"
    base: State
    experts: Mapping[str, State]
    sources: dict[str, "Featured"]


@dataclass(frozen=True)
class ExpertInputs:
    """What the command line says.

    Attributes:
        experts: Checkpoints, or names of the project's tasks; all of these where none is named.
        base: What they were tuned from; in a project its base where it is None.
        resolve: Follows references such as models:/name@alias; None outside of a project.
        recipe: What the experts are, and which of their tensors, instead of `experts`.
    """

    project: Path | None
    experts: Sequence[str]
    base: str | None
    data: Sequence[str]
    architecture: str | None
    resolve: Any
    recipe: "Recipe | None" = None

    def open(self, samples: int) -> OpenedExperts:
        paths = self.several("features of at least two are compared")
        base = self.base_path()
        base_state, experts = self.states
        opened = self._network(base, base_state)
        states = {name: opened.weights(path, experts[name]) for name, path in paths.items()}
        return OpenedExperts(
            opened.model, opened.weights(base, base_state), states, self._sources(opened, paths, samples)
        )

    @cached_property
    def states(self) -> tuple[State, dict[str, State]]:
        """Base and experts as a merge takes them: names are the base's, adapters and task vectors are added to it.

        Tensors that the recipe leaves out are the base's. What a merge would say of them goes to standard error.
        """
        from mergeflow.checkpoints.align_names import fit_inputs
        from mergeflow.merging.files.plan import check_whole
        from mergeflow.merging.files.recipe import local_path
        from mergeflow.merging.preflight import warnings_of

        recipe = self.recipe
        chosen = (recipe.ignore or (), recipe.only or (), recipe.missing or "refuse") if recipe is not None else ()
        with ExitStack() as files:
            base, *experts = (
                files.enter_context(open_checkpoint(local_path(path, self.resolve)))
                for path in (self.base_path(), *self.paths().values())
            )
            check_whole(self.base_path(), base)
            fit = fit_inputs(base, dict(zip(self.paths(), experts, strict=True)), *chosen)
            print_remarks(fit.notes, warnings_of((base, *experts), fit), err=True)
            start = {name: fit.base[name].clone() for name in fit.base}
            return start, {name: _whole(start, state, fit.base_only) for name, state in fit.experts.items()}

    @cached_property
    def params(self) -> "Params | None":
        if self.project is None:
            return None
        from tasks.project.parameters import load_params

        return load_params(self.project / "params.yaml")

    @property
    def tasks(self) -> list[str]:
        return list(self.params.tasks) if self.params else []

    def several(self, purpose: str) -> dict[str, str]:
        experts = self.paths()
        if len(experts) < 2:
            raise MergeflowError(f"{'1 expert is' if experts else 'no expert is'} named; {purpose}.")
        return experts

    def paths(self) -> dict[str, str]:
        if self.recipe is not None:
            return dict(self.recipe.experts)
        tasks = self.tasks
        experts: dict[str, str] = {}
        for expert in self.experts or tasks:
            if self.project is not None and expert in tasks:
                bring(self.project, [layout.expert(expert)])
                path = str(self.project / layout.expert_model(expert))
                if not Path(path).exists():
                    raise MergeflowError(f"the expert '{expert}' is not trained yet: run `mergeflow run`.")
            elif self.project and "/" not in expert and "." not in expert and not Path(expert).exists():
                raise unknown_name("expert", expert, tasks)
            else:
                path = expert
            if path in experts.values():
                raise MergeflowError(f"the expert '{expert}' is named twice.")
            experts[expert if expert in tasks else self._name(expert)] = path
        return experts

    def _name(self, path: str) -> str:
        """Return the name of an expert's file: the file's own, or its folder's where others have the same."""
        stems = [Path(expert).stem for expert in self.experts]
        folders = [Path(expert).absolute().parent.name for expert in self.experts]
        for names in (stems, folders):
            if len(set(names)) == len(names):
                return names[list(self.experts).index(path)]
        return path

    def base_path(self) -> str:
        base = self.base if self.recipe is None else self.recipe.base
        if base is not None:
            return base
        if self.project is not None:
            bring(self.project, [layout.BASE])
        if self.project is None or not (self.project / layout.BASE_MODEL).exists():
            missing = "--base is missing" if self.recipe is None else "`base` is missing in the recipe"
            raise MergeflowError(f"{missing}: name the checkpoint that the experts were tuned from.")
        return str(self.project / layout.BASE_MODEL)

    def _network(self, base: str, state: State) -> "Opened":
        from mergeflow.linearity.networks import Opened, open_network

        if self.architecture is not None:
            return open_network(self.architecture, state)
        if (expanded(base) / "config.json").is_file():
            return open_network(base, state)
        if self.params is None:
            raise MergeflowError(
                "--architecture is missing: name open_clip's architecture, pocket-clip, torchvision:NAME, or a model "
                "folder with config.json. A base that is such a folder needs none."
            )
        from mergeflow.modalities.catalog import MODALITIES

        section: Any = self.params.model
        modality = MODALITIES.get(section.modality)
        if (architecture := modality.architecture(section)) is not None:
            return open_network(architecture, state)
        with open_checkpoint(base) as checkpoint:
            return Opened(modality.build(section, checkpoint.metadata), _only_prepared)

    def _sources(self, opened: "Opened", paths: Mapping[str, str], samples: int) -> dict[str, "Featured"]:
        if self.data:
            try:
                return {source: opened.read(source, samples) for source in self.data}
            except MergeflowError as error:
                raise SamplesError(f"--data: {error}") from None
        foreign = [name for name in paths if name not in self.tasks]
        if self.project is None or self.params is None or foreign:
            raise MergeflowError("--data is missing: name a source of samples; they need no labels.")
        from mergeflow.modalities.catalog import MODALITIES
        from mergeflow.modalities.classification import Subset

        section: Any = self.params.model
        modality = MODALITIES.get(section.modality)
        split, cpu = "validation", torch.device("cpu")
        bring(self.project, [layout.split(split, task) for task in paths])
        folders = {task: self.project / layout.split(split, task) for task in paths}
        return {
            task: Subset.first(modality.open(task, folder, split, self._head(task), cpu), samples)
            for task, folder in folders.items()
        }

    def _head(self, task: str) -> "Head | None":
        from mergeflow.modalities.heads import read_head

        assert self.project is not None
        paths = [self.project / folder for folder in (layout.expert_head(task), layout.head(task))]
        return next((read_head(path) for path in paths if path.exists()), None)


def _whole(base: State, state: "LazyStateDict", shared: Collection[str]) -> State:
    """Return an expert's tensors; what it does not hold itself, of an adapter or by the recipe, is the base's."""
    tensors = {name: base[name] for name in base if name in shared or (state.is_task_vector and name not in state)}
    for name in state:
        value = state[name]
        difference = state.is_task_vector and name not in state.absolute
        if difference and name in base and value.shape == base[name].shape:
            wide = torch.promote_types(torch.promote_types(value.dtype, base[name].dtype), torch.float32)
            tensors[name] = base[name].to(wide) + value.to(wide)
        else:
            tensors[name] = value.clone()
    return tensors


def _only_prepared(source: str, count: int) -> "Featured":
    raise MergeflowError(f"--data {source}: this project's models take its own prepared tasks; leave --data out.")
