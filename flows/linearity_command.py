"""`mergeflow linearity`: do features of experts combine as their weights do, and at which layers do they not?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flows.linearity_tables import show, write
from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError, unknown_name

if TYPE_CHECKING:
    from mergeflow.linearity.affine import Featured
    from mergeflow.linearity.networks import Opened
    from mergeflow.modality import Model
    from tasks.project.parameters import Params

State = Mapping[str, Any]


def add_commands(app: typer.Typer, root: Path, project: bool) -> None:
    """Add the command `linearity`.

    Args:
        app: the command line.
        root: the project folder, or the folder the command runs in.
        project: whether `root` is a project folder, whose experts go by their tasks' names.
    """

    @app.command("linearity")
    def linearity(
        context: typer.Context,
        experts: Annotated[
            list[str] | None,
            typer.Argument(
                help="Two experts or more: checkpoints, or in a project names of tasks; all when none is named."
            ),
        ] = None,
        base: Annotated[str | None, typer.Option(help="What they were tuned from; in a project its base.")] = None,
        data: Annotated[
            list[str] | None,
            typer.Option(
                help="Samples: suite:, folder:, parquet: … or text:FILE; repeat. In a project each expert's task."
            ),
        ] = None,
        architecture: Annotated[
            str | None,
            typer.Option(help="open_clip's name, pocket-clip, torchvision:NAME, or a folder with config.json."),
        ] = None,
        layer: Annotated[list[str] | None, typer.Option(help="A submodule, repeatable; by default all blocks.")] = None,
        alpha: Annotated[list[float] | None, typer.Option(help="α, repeatable; by default 0.25, 0.5, 0.75.")] = None,
        samples: Annotated[int, typer.Option(min=1, help="How many of each source.")] = 128,
        batch_size: Annotated[int, typer.Option(min=1, help="Samples in memory at a time.")] = 64,
        out: Annotated[Path | None, typer.Option(help="Folder for result.json, samples.parquet and a picture.")] = None,
    ) -> None:
        """Compare features of averaged weights with averaged features, by layer: will these experts merge?"""
        import torch

        from mergeflow.linearity.layers import check_layers, find_layers
        from mergeflow.linearity.pairs import check_related, check_samples, measure_pairs

        torch.set_num_threads(1)
        alphas = alpha or [0.25, 0.5, 0.75]
        if wrong := [one for one in alphas if not 0 < one < 1]:
            raise MergeflowError(f"--alpha {wrong[0]:g} is not between 0 and 1.")
        asked = _Asked(root if project else None, experts or [], base, data or [], architecture, context.obj)
        opened = asked.open(samples)
        check_related(opened.base, opened.experts)
        check_samples(opened.sources)
        layers = layer or find_layers(opened.model.module)
        check_layers(opened.model.module, layers)
        own = set(opened.sources) == set(opened.experts)
        from mergeflow.commands.statistics import progress_bar

        with progress_bar("batches") as progress:
            pairs = measure_pairs(
                opened.model,
                opened.sources,
                opened.experts,
                layers,
                alphas,
                own=own,
                batch_size=batch_size,
                report=progress,
            )
        console = Console()
        show(pairs, console)
        if out is not None:
            write(pairs, out)
            console.print(f"[bold]Outputs[/]   {out}", highlight=False)


@dataclass(frozen=True)
class _Ready:
    """What is measured: the base's and the experts' weights, a module for them, samples by name."""

    model: "Model"
    base: State
    experts: Mapping[str, State]
    sources: dict[str, "Featured"]


@dataclass(frozen=True)
class _Asked:
    """What the command line says; `project` is the project folder, or None outside of one."""

    project: Path | None
    experts: Sequence[str]
    base: str | None
    data: Sequence[str]
    architecture: str | None
    resolve: Any

    def open(self, samples: int) -> _Ready:
        """Open models and samples.

        Raises:
            MergeflowError: something is missing, or does not fit.
        """
        paths = self._paths()
        if len(paths) < 2:
            raise MergeflowError(f"{len(paths)} expert named; features of at least two are compared.")
        base = self._base()
        base_state = self._read(base)
        opened = self._network(base, base_state)
        states = {name: opened.weights(path, self._read(path)) for name, path in paths.items()}
        return _Ready(opened.model, opened.weights(base, base_state), states, self._sources(opened, paths, samples))

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

    def _paths(self) -> dict[str, str]:
        """Return the experts' files by name."""
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

    def _base(self) -> str:
        if self.base is not None:
            return self.base
        if self.project is None or not (self.project / layout.BASE_MODEL).exists():
            raise MergeflowError("--base is missing: name the checkpoint that the experts were tuned from.")
        return str(self.project / layout.BASE_MODEL)

    def _read(self, path: str) -> dict[str, Any]:
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
            task: Subset.first(modality.open(task, folder, split, None, cpu), samples)
            for task, folder in folders.items()
        }


def _only_prepared(source: str, count: int) -> "Featured":
    raise MergeflowError(f"--data {source}: this project's models take its own prepared tasks; leave --data out.")
