"""Commands that keep many experts in one small file: compress, extract-task."""

from pathlib import Path
from typing import Annotated

import typer

from mergeflow.checkpoints.fingerprint import short
from mergeflow.commands.options import Force, local, read_pairs

Out = Annotated[Path, typer.Option(help="The file to make.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("compress")(compress)
    app.command("extract-task")(extract_task)


def compress(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A compressor; `mergeflow methods` lists them.")],
    base: Annotated[Path, typer.Option(help="The base's file or folder.")],
    expert: Annotated[list[str], typer.Option(metavar="TASK=PATH", help="An expert; repeat for each task.")],
    out: Out,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="ARGUMENT=VALUE", help="An argument of the compressor, e.g. rank_ratio=0.1; repeat."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Store all experts of a suite in one small file, from which each can be taken alone."""
    from contextlib import ExitStack

    from mergeflow.checkpoints import open_checkpoint
    from mergeflow.merging.compression.compressor import configure_compressor
    from mergeflow.merging.compression.suite_file import compress as run
    from mergeflow.merging.files.output import check_file
    from mergeflow.merging.files.plan import open_base
    from mergeflow.yaml_text import parse_yaml

    changes = read_pairs(overrides or [], "--set")
    values = {argument: parse_yaml(text, f"--set '{argument}={text}'") for argument, text in changes.items()}
    call = configure_compressor(name, values)
    with ExitStack() as opened:
        origin = opened.enter_context(open_base(local(context, base)))
        paths = read_pairs(expert, "--expert")
        experts = {task: opened.enter_context(open_checkpoint(local(context, path))) for task, path in paths.items()}
        check_file(out, {"base": origin.path, **{task: state.path for task, state in experts.items()}}, force)
        small = run(call, origin, experts)
        small.write(out)
    share = small.stored_bits / small.expert_bits
    typer.echo(f"{out}: {small.stored_bits / 8e6:.2f} MB, {share:.1%} of the experts' {small.expert_bits / 8e6:.2f} MB")


def extract_task(
    context: typer.Context,
    compressed: Annotated[Path, typer.Argument(help="A file that `mergeflow compress` made.")],
    task: Annotated[str, typer.Argument(help="The task to take out.")],
    out: Out,
    base: Annotated[Path | None, typer.Option(help="The base, for compressors that need it.")] = None,
    force: Force = False,
) -> None:
    """Write one task's model out of a compressed suite; only its part is read."""
    from mergeflow.checkpoints import write_checkpoint
    from mergeflow.merging.compression.suite_file import extract_task as run
    from mergeflow.merging.files.output import EXTRACTED, check_file

    suite, origin = local(context, compressed), local(context, base) if base is not None else None
    check_file(out, {"compressed suite": suite, **({"base": origin} if origin is not None else {})}, force)
    fingerprint = write_checkpoint(out, run(suite, task, origin), {"task": task, EXTRACTED: task})
    typer.echo(f"{out}  {short(fingerprint)}…")
