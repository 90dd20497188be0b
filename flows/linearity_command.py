"""`mergeflow linearity`: do features of experts combine as their weights do, and at which layers do they not?"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.asked import Asked
from flows.linearity_tables import show, write
from mergeflow.errors import MergeflowError


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

        from mergeflow.checkpoints import check_finite
        from mergeflow.linearity.layers import check_layers, find_layers
        from mergeflow.linearity.pairs import check_related, check_samples, measure_pairs

        torch.set_num_threads(1)
        alphas = alpha or [0.25, 0.5, 0.75]
        if wrong := [one for one in alphas if not 0 < one < 1]:
            raise MergeflowError(f"--alpha {wrong[0]:g} is not between 0 and 1.")
        asked = Asked(root if project else None, experts or [], base, data or [], architecture, context.obj)
        opened = asked.open(samples)
        for name, state in {"base": opened.base, **opened.experts}.items():
            check_finite(name, state)
        check_related(opened.base, opened.experts)
        check_samples(opened.sources)
        layers = layer or find_layers(opened.model.module)
        check_layers(opened.model.module, layers)
        if out is not None:
            _make_folder(out)
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
        from flows.linearity_answer import predicted

        console, states = Console(), opened.experts
        costs = {f"{one.first} – {one.second}": predicted(states[one.first], states[one.second]) for one in pairs}
        show(pairs, costs, console)
        if out is not None:
            write(pairs, costs, out)
            console.print(f"[bold]Outputs[/]   {out}", highlight=False)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MergeflowError(
            f"--out {out} is no folder and none can be made: {error.strerror}. Name another."
        ) from None
