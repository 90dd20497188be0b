"""Make an embedded base again: python -m suites.pocket.regenerate pocket20 base.safetensors

On the machine and library versions that made the shipped file the bytes are the same; elsewhere they differ by float
rounding, and so do the results of everything that starts from it.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from mergeflow.errors import MergeflowError, unknown_name


def regenerate(
    name: Annotated[str, typer.Argument(help="A recipe: pocket8, pocket20, pocket8-prints or pocket20-prints.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file; it appears whole or not at all.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes that draw.")] = 2,
) -> None:
    """Draw the pictures and train the base, about ten minutes on two cores."""
    from suites.pocket.pretraining import RECIPES, pretrain

    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    with Progress() as bars:
        phases = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in phases:
                phases[phase] = bars.add_task(phase)
            bars.update(phases[phase], completed=done, total=total)

        base = pretrain(RECIPES[name], out, report, workers)
    typer.echo(f"{out}: {base['fingerprint']}, loss {base['loss']:.4f}")


if __name__ == "__main__":
    try:
        typer.run(regenerate)
    except MergeflowError as error:
        raise SystemExit(f"error: {error}") from None
