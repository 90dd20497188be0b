"""The command that makes a PEFT adapter of a whole expert."""

from pathlib import Path
from typing import Annotated

import typer

from mergeflow.commands.options import local, read_pairs
from mergeflow.errors import MergeflowError


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("extract-lora")(extract_lora)


def extract_lora(
    context: typer.Context,
    base: Annotated[str, typer.Argument(help="The base θ0.")],
    expert: Annotated[str, typer.Argument(help="The expert θ_t, a whole model; or an adapter to be made smaller.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    rank: Annotated[int, typer.Option(help="Largest rank of a matrix.")] = 16,
    ranks: Annotated[
        list[str] | None,
        typer.Option("--rank-of", metavar="PATTERN=RANK", help="Another largest rank for some matrices."),
    ] = None,
    error: Annotated[float, typer.Option(help="The smallest ranks that lose this share of each matrix at most.")] = 0.0,
    embeddings: Annotated[
        str, typer.Option(help="How changed embeddings and heads are kept: whole or lora.")
    ] = "whole",
    ignore: Annotated[list[str] | None, typer.Option(help="Tensors to leave as the base has them; a pattern.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the adapter's tensors; float32 factors by default.")
    ] = None,
    tokenizer_source: Annotated[
        str | None, typer.Option(help="Whose tokens the adapter has: union, base or expert; else they must be alike.")
    ] = None,
    allow: Annotated[list[str] | None, typer.Option(help="A difference that is intended; a pattern.")] = None,
) -> None:
    """Write what an expert changed of its base as a PEFT LoRA folder, by SVD, and print the error of each layer."""
    from mergeflow.checkpoints.fingerprint import short
    from mergeflow.merging import merge
    from mergeflow.merging.files.recipe import make_recipe

    adapter = {"rank": rank, "ranks": _ranks(ranks or []), "error": error, "embeddings": embeddings}
    made = merge(
        make_recipe(
            {
                "method": "task_arithmetic",
                "args": {"scale": 1.0},
                "base": local(context, base),
                "experts": {"expert": local(context, expert)},
                "ignore": ignore,
                "dtype": dtype,
                "adapter": adapter,
                "tokenizer_source": tokenizer_source,
                "allow": allow,
                "out": str(out),
            },
            "extract-lora",
        )
    )
    typer.echo(f"{made.path}  {short(made.fingerprint)}…  {made.seconds:.1f} s")
    for line in made.notes:
        typer.echo(line)


def _ranks(pairs: list[str]) -> dict[str, int]:
    ranks = read_pairs(pairs, "--rank-of")
    for pattern, rank in ranks.items():
        if not rank.isdecimal() or int(rank) < 1:
            raise MergeflowError(f"--rank-of '{pattern}={rank}': expected a whole number of at least 1 as the rank.")
    return {pattern: int(rank) for pattern, rank in ranks.items()}
