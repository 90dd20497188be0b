"""Commands for task vectors: extract, add, negate, scale, analogy."""

from pathlib import Path
from typing import Annotated

import typer

from mergeflow.checkpoints.fingerprint import short
from mergeflow.commands.options import Force, local

Vector = Annotated[Path, typer.Argument(help="A task vector.")]
Out = Annotated[Path, typer.Option(help="The .safetensors file to make.")]


def add_commands(app: typer.Typer) -> None:
    """Add the group `vector` to the command line."""
    group = typer.Typer(help="Task vectors: τ = expert − base, and arithmetic on them.", no_args_is_help=True)
    app.add_typer(group, name="vector")
    for command in (extract, add, negate, analogy):
        group.command()(command)
    group.command(context_settings={"ignore_unknown_options": True})(scale)  # -0.5 is a number, no option


def extract(
    context: typer.Context,
    base: Annotated[Path, typer.Argument(help="The base θ0.")],
    expert: Annotated[Path, typer.Argument(help="The expert θ_t.")],
    out: Out,
    force: Force = False,
) -> None:
    """Write τ = expert − base."""
    from mergeflow.merging.files import vectors

    _say(out, vectors.extract(local(context, base), local(context, expert), out, force=force))


def add(
    context: typer.Context,
    sources: Annotated[list[Path], typer.Argument(help="Task vectors of one base.")],
    out: Out,
    weight: Annotated[
        list[float] | None, typer.Option(help="A weight for each vector, in order; all 1 by default.")
    ] = None,
    force: Force = False,
) -> None:
    """Write the weighted sum Σ w_t τ_t."""
    from mergeflow.merging.files import vectors

    _say(out, vectors.add([local(context, source) for source in sources], out, weight, force=force))


def negate(context: typer.Context, source: Vector, out: Out, force: Force = False) -> None:
    """Write −τ, which unlearns what τ learned."""
    from mergeflow.merging.files import vectors

    _say(out, vectors.negate(local(context, source), out, force=force))


def scale(
    context: typer.Context,
    source: Vector,
    factor: Annotated[float, typer.Argument(help="Any real number.")],
    out: Out,
    force: Force = False,
) -> None:
    """Write factor · τ."""
    from mergeflow.merging.files import vectors

    _say(out, vectors.scale(local(context, source), factor, out, force=force))


def analogy(context: typer.Context, a: Vector, b: Vector, c: Vector, out: Out, force: Force = False) -> None:
    """Write τ_c + (τ_b − τ_a): "a is to b as c is to" the result."""
    from mergeflow.merging.files import vectors

    made = vectors.analogy(local(context, a), local(context, b), local(context, c), out, force=force)
    _say(out, made)


def _say(out: Path, fingerprint: str) -> None:
    typer.echo(f"{out}  {short(fingerprint)}…")
