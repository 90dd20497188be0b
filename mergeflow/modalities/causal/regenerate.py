"""Make the embedded base of the corpus books again: python -m mergeflow.modalities.causal.regenerate OUT

On the machine and library versions that made the shipped files the bytes are the same; elsewhere they differ by float
rounding, and so do the results of everything that starts from it.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from mergeflow.errors import MergeflowError


def regenerate(
    out: Annotated[Path, typer.Argument(help="The folder to make, in the layout of Hugging Face.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Batches, if not those of the shipped base.")] = None,
) -> None:
    """Write the texts and train the base, about three minutes of two cores."""
    from mergeflow.modalities.causal.pretraining import PretrainSettings, pretrain

    settings = PretrainSettings() if steps is None else PretrainSettings(steps=steps)
    with Progress() as bars:
        bar = bars.add_task("train", total=settings.steps)
        found = pretrain(settings, out, lambda done, _: bars.update(bar, completed=done))
    typer.echo(f"{out}: {found['fingerprint']}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    try:
        typer.run(regenerate)
    except MergeflowError as error:
        raise SystemExit(f"error: {error}") from None
