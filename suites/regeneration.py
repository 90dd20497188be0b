"""The command line with which an embedded base of texts is made again."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from mergeflow.errors import MergeflowError

Out = Annotated[Path, typer.Argument(help="The folder to make, in the layout of Hugging Face.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Batches, if not those of the shipped base.")]


def regenerate_base(pretrain: Callable[..., dict[str, Any]], recipe: Any, out: Path, steps: int | None) -> None:
    """Train a base under a progress bar, and print its fingerprint and last loss.

    Args:
        steps: batches, if not the recipe's.
    """
    recipe = recipe if steps is None else recipe.model_copy(update={"steps": steps})
    with Progress() as bars:
        bar = bars.add_task("train", total=recipe.steps)
        base = pretrain(recipe, out, lambda done, _: bars.update(bar, completed=done))
    typer.echo(f"{out}: {base['fingerprint']}, loss {base['loss']:.4f}")


def run(command: Callable[..., None]) -> None:
    """Run one command of a module of its own; a fault of the user's is one line and exit status 1."""
    try:
        typer.run(command)
    except MergeflowError as error:
        raise SystemExit(f"error: {error}") from None
