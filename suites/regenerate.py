"""Make an embedded base again: python -m suites.regenerate pocket20 base.safetensors

On the machine and library versions that made the shipped files the bytes are the same; elsewhere they differ by float
rounding, and so do the results of everything that starts from it.
"""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from mergeflow.errors import MergeflowError, unknown_name

TEXTS = {"books": "suites.books.pretraining", "sentences8": "suites.sentences.pretraining"}


def regenerate(
    name: Annotated[str, typer.Argument(help="pocket8, pocket20, pocket8-prints, pocket20-prints, sentences8, books.")],
    out: Annotated[Path, typer.Argument(help="What to make: a safetensors file of pictures, else a folder.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes that draw pictures.")] = 2,
    steps: Annotated[int | None, typer.Option(min=1, help="Batches of texts, if not the shipped base's.")] = None,
) -> None:
    """Make the pictures or texts and train the base, three to twelve minutes on two cores."""
    with Progress() as bars:
        phases = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in phases:
                phases[phase] = bars.add_task(phase)
            bars.update(phases[phase], completed=done, total=total)

        if name in TEXTS:
            texts = import_module(TEXTS[name])
            recipe = texts.PretrainSettings(**({} if steps is None else {"steps": steps}))
            base = texts.pretrain(recipe, out, partial(report, "train"))
        else:
            from suites.pocket.pretraining import RECIPES, pretrain

            recipes = TEXTS if steps else {**RECIPES, **TEXTS}
            if name not in RECIPES or steps:
                raise unknown_name("recipe of texts" if steps else "recipe", name, recipes)
            base = pretrain(RECIPES[name], out, report, workers)
    typer.echo(f"{out}: {base['fingerprint']}, loss {base['loss']:.4f}")


if __name__ == "__main__":
    try:
        typer.run(regenerate)
    except MergeflowError as error:
        raise SystemExit(f"error: {error}") from None
