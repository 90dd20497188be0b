"""`mergeflow linearity`: do features of experts combine as their weights do, and at which layers do they not?"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError, unknown_name

if TYPE_CHECKING:
    from mergeflow.linearity.affine import Featured, Linearity
    from mergeflow.linearity.networks import Opened
    from mergeflow.linearity.pairs import Pair
    from mergeflow.modality import Model
    from tasks.project.parameters import Params

State = Mapping[str, Any]
_SHOWN = 4  # pairs in the picture, those with the largest error


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
        if section.modality == "vision":
            return open_network(section.architecture, state)
        with open_checkpoint(base) as known:
            return Opened(MODALITIES.get(section.modality).build(section, known.metadata), _only_prepared)

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


def show(pairs: Sequence["Pair"], console: Console) -> None:
    """Print a row for each layer, over all pairs; a row for each pair; and one sentence that says what to expect."""
    from mergeflow.linearity.layers import short_names
    from mergeflow.linearity.verdict import word

    names = dict(zip(layers := [one.layer for one in pairs[0].layers], short_names(layers), strict=True))
    shared: Any = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
    table = Table(Column("layer", no_wrap=True), title="By layer, over all pairs", **shared)
    for column in ("1 − cos", "baseline", "worst share", "coef", "error", "direction", "length"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, *cells in layer_rows(pairs):
        table.add_row(names[name], *cells)
    console.print(table)
    table = Table("pair", Column("worst layer", no_wrap=True), title="By pair", **shared)
    for column in ("1 − cos", "baseline", "coef", "LLFC", "CTL"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in pairs:
        worst = pair.worst
        table.add_row(
            f"{pair.first} – {pair.second}",
            names[worst.layer],
            f"{worst.distance[1]:.4f}",
            f"{worst.base:.4f}",
            f"{worst.coef[1]:.3f}",
            word(pair.verdict["LLFC"]),
            word(pair.verdict["CTL"]),
        )
    console.print(table)
    console.print(sentence(pairs), highlight=False)


def layer_rows(pairs: Sequence["Pair"]) -> list[list[str]]:
    """Return the cells of the table by layer: means over pairs, the worst share of the baseline, how many hold."""
    rows = []
    for number, first in enumerate(pairs[0].layers):
        layers = [pair.layers[number] for pair in pairs]
        count = len(layers)
        share = max((one.distance[1] / one.base for one in layers if one.base), default=0.0)
        coefs = [one.coef[1] for one in layers]
        spread = f"{min(coefs):.3f} … {max(coefs):.3f}" if count > 1 else f"{coefs[0]:.3f}"
        rows.append(
            [
                first.layer,
                f"{sum(one.distance[1] for one in layers) / count:.4f}",
                f"{sum(one.base for one in layers) / count:.4f}",
                f"{share:.2f}",
                spread,
                f"{sum(one.error for one in layers) / count:.3f}",
                f"{sum(one.direction is True for one in layers)} of {count}",
                f"{sum(one.length is True for one in layers)} of {count}",
            ]
        )
    return rows


def sentence(pairs: Sequence["Pair"]) -> str:
    """Return what the verdicts come to, and the first layer where a pair breaks."""
    from mergeflow.linearity.verdict import TRIVIAL

    holding = sum(pair.verdict["CTL"] is True for pair in pairs)
    failing = [pair for pair in pairs if pair.verdict["CTL"] is False]
    near = sum(all(layer.base <= TRIVIAL for layer in pair.layers) for pair in pairs)
    said = f"Features combine as weights do in {holding} of {len(pairs)} pairs"
    if failing:
        worst = max(failing, key=lambda pair: max(layer.error for layer in pair.layers))
        broken = next(one for one in worst.layers if False in (one.direction, one.length))
        how = "direction" if broken.direction is False else "length"
        said += f"; {worst.first} – {worst.second} breaks first at {broken.layer}, in {how}"
    if near:
        said += f"; {near} pairs have features too near to each other to tell"
    return said + "."


def write(pairs: Sequence["Pair"], out: Path) -> None:
    """Write `result.json`, one Parquet row for each pair, α, layer and sample, and the picture of the worst pairs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mergeflow.linearity import verdict
    from tasks.plotting.drawing import to_svg
    from tasks.plotting.linearity import linearity_figure

    out.mkdir(parents=True, exist_ok=True)
    margins = {"direction": verdict.DIRECTION, "trivial": verdict.TRIVIAL, "length": verdict.LENGTH}
    content = {"margins": margins, "pairs": [pair.as_json() for pair in pairs]}
    (out / "result.json").write_text(json.dumps(content, indent=1) + "\n")
    pq.write_table(pa.Table.from_pylist([row for pair in pairs for row in pair.rows()]), out / "samples.parquet")
    ranked = sorted(pairs, key=lambda pair: -max(layer.error for layer in pair.layers))[:_SHOWN]
    shown: dict[str, Mapping[str, Linearity]] = {f"{one.first} – {one.second}": _middle(one) for one in ranked}
    (out / "linearity.svg").write_bytes(to_svg(linearity_figure(shown), "linearity"))


def _middle(pair: "Pair") -> Mapping[str, "Linearity"]:
    return pair.samples[min(pair.samples, key=lambda alpha: abs(alpha - 0.5))]
