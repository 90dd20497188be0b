"""The command `soup`: checkpoints of one training run, averaged."""

from pathlib import Path
from typing import Annotated

import typer

from mergeflow.commands.options import Force


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("soup")(soup)


def soup(
    run: Annotated[Path, typer.Argument(help="A folder of checkpoint-100, checkpoint-200, …")],
    out: Annotated[Path, typer.Option(help="A .safetensors file, or a folder to make.")],
    window: Annotated[int | None, typer.Option(help="How many of the last checkpoints; all by default.")] = None,
    weights: Annotated[
        str, typer.Option(help="uniform; linear: the last weighs most; greedy: those that help on validation.")
    ] = "uniform",
    score: Annotated[
        str | None, typer.Option(help="The scorer on validation: file.py:function, or a command with {model}.")
    ] = None,
    force: Force = False,
) -> None:
    """Average the checkpoints of one training run; with a scorer, warn where a barrier lies between them."""
    from mergeflow.checkpoints.fingerprint import short
    from mergeflow.search.soup import soup as run_soup

    part = {"command": score} if score is not None and "{model}" in score else score
    made = run_soup(run, out, window, weights, part, force=force)  # type: ignore[arg-type]
    for name, share in made.weights.items():
        scored = f"   score {made.scores[name]:.6g}" if made.scores else ""
        typer.echo(f"{share:7.2%}  {name}{scored}")
    for name in made.scores.keys() - made.weights.keys() - {"soup"}:
        typer.echo(f"   none  {name}   score {made.scores[name]:.6g}")
    scored = f"   score {made.scores['soup']:.6g}" if made.scores else ""
    typer.echo(f"{made.path}  {short(made.fingerprint)}…{scored}")
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
