"""The experts that a command line names, opened: base, a module for them, samples; or one clear message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError, unknown_name

if TYPE_CHECKING:
    from mergeflow.linearity.affine import Featured
    from mergeflow.linearity.networks import Opened
    from mergeflow.modalities.heads import Head
    from mergeflow.modality import Model
    from tasks.project.parameters import Params

State = Mapping[str, Any]


@dataclass(frozen=True)
class Ready:
    """What is measured: the base's and the experts' weights, a module for them, samples by name."""

    model: "Model"
    base: State
    experts: Mapping[str, State]
    sources: dict[str, "Featured"]


@dataclass(frozen=True)
class Asked:
    """What the command line says.

    Attributes:
        project: The project folder; None outside of one.
        experts: Checkpoints, or names of the project's tasks; all of these where none is named.
        base: What they were tuned from; in a project its base where it is None.
        data: Addresses of samples.
        architecture: As `open_network` takes it; in a project its own where it is None.
        resolve: Follows references such as models:/name@alias; None outside of a project.
        named: Expert → path, as a recipe has them, instead of `experts`.
    """

    project: Path | None
    experts: Sequence[str]
    base: str | None
    data: Sequence[str]
    architecture: str | None
    resolve: Any
    named: Mapping[str, str] | None = None

    def open(self, samples: int) -> Ready:
        """Open models and samples.

        Raises:
            MergeflowError: something is missing, or does not fit.
        """
        paths = self.paths()
        if len(paths) < 2:
            raise MergeflowError(f"{len(paths)} expert named; features of at least two are compared.")
        base = self.base_path()
        base_state = self.read(base)
        opened = self._network(base, base_state)
        states = {name: opened.weights(path, self.read(path)) for name, path in paths.items()}
        opened.model.module.eval()
        return Ready(opened.model, opened.weights(base, base_state), states, self._sources(opened, paths, samples))

    @cached_property
    def params(self) -> "Params | None":
        """The project's parameters; None outside of one."""
        if self.project is None:
            return None
        from tasks.project.parameters import load_params

        return load_params(self.project / "params.yaml")

    @property
    def tasks(self) -> list[str]:
        """The project's tasks, whose names its experts have."""
        return list(self.params.tasks) if self.params else []

    def paths(self) -> dict[str, str]:
        """Return the experts' files by name.

        Raises:
            MergeflowError: an expert that is not there, or is named twice.
        """
        if self.named is not None:
            return dict(self.named)
        tasks = self.tasks
        found: dict[str, str] = {}
        for expert in self.experts or tasks:
            if expert in tasks:
                path = str(self.project / layout.expert_model(expert))  # type: ignore[operator]
                if not Path(path).exists():
                    raise MergeflowError(f"the expert '{expert}' is not trained yet: run `mergeflow run`.")
            elif self.project and "/" not in expert and "." not in expert and not Path(expert).exists():
                raise unknown_name("expert", expert, tasks)
            else:
                path = expert
            if path in found.values():
                raise MergeflowError(f"the expert '{expert}' is named twice.")
            found[expert if expert in tasks else self._name(expert)] = path
        return found

    def _name(self, path: str) -> str:
        """Return what an expert's file is called: the file's name, or its folder's where others have the same."""
        stems = [Path(expert).stem for expert in self.experts]
        folders = [Path(expert).absolute().parent.name for expert in self.experts]
        for names in (stems, folders):
            if len(set(names)) == len(names):
                return names[list(self.experts).index(path)]
        return path

    def base_path(self) -> str:
        """Return the base's file.

        Raises:
            MergeflowError: there is none.
        """
        if self.base is not None:
            return self.base
        if self.project is None or not (self.project / layout.BASE_MODEL).exists():
            raise MergeflowError("--base is missing: name the checkpoint that the experts were tuned from.")
        return str(self.project / layout.BASE_MODEL)

    def read(self, path: str) -> dict[str, Any]:
        """Return a checkpoint's tensors.

        Args:
            path: a file, a folder or a reference.

        Raises:
            MergeflowError: it cannot be read.
        """
        from mergeflow.merging.files.references import local_path

        with open_checkpoint(local_path(path, self.resolve)) as state:
            return {name: state[name].clone() for name in state}

    def _network(self, base: str, state: State) -> "Opened":
        from mergeflow.linearity.networks import Opened, open_network

        if self.architecture is not None:
            return open_network(self.architecture, state)
        if (Path(base).expanduser() / "config.json").is_file():
            return open_network(base, state)
        if self.params is None:
            raise MergeflowError(
                "--architecture is missing: name open_clip's architecture, pocket-clip, torchvision:NAME, or a model "
                "folder with config.json. A base that is such a folder needs none."
            )
        from mergeflow.modalities.catalog import MODALITIES

        section: Any = self.params.model
        modality = MODALITIES.get(section.modality)
        if modality.architecture is not None:
            return open_network(modality.architecture(section), state)
        with open_checkpoint(base) as known:
            return Opened(modality.build(section, known.metadata), _only_prepared)

    def _sources(self, opened: "Opened", paths: Mapping[str, str], samples: int) -> dict[str, "Featured"]:
        if self.data:
            return {source: opened.read(source, samples) for source in self.data}
        foreign = [name for name in paths if name not in self.tasks]
        if self.project is None or self.params is None or foreign:
            raise MergeflowError("--data is missing: name a source of samples; they need no labels.")
        import torch

        from mergeflow.modalities.catalog import MODALITIES
        from mergeflow.modalities.subset import Subset

        section: Any = self.params.model
        modality = MODALITIES.get(section.modality)
        split, cpu = "validation", torch.device("cpu")
        folders = {task: self.project / layout.split(split, task) for task in paths}
        return {
            task: Subset.first(modality.open(task, folder, split, self._head(task), cpu), samples)
            for task, folder in folders.items()
        }

    def _head(self, task: str) -> "Head | None":
        from mergeflow.modalities.heads import read_head

        assert self.project is not None
        paths = [self.project / one for one in (layout.expert_head(task), layout.head(task))]
        return next((read_head(path) for path in paths if path.exists()), None)


def _only_prepared(source: str, count: int) -> "Featured":
    raise MergeflowError(f"--data {source}: this project's models take its own prepared tasks; leave --data out.")
