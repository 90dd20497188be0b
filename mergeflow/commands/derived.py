"""Commands that make other files of models: vector, extract-lora, compress, extract-task, soup."""

from pathlib import Path
from typing import Annotated

import typer

from mergeflow.checkpoints.fingerprint import short
from mergeflow.commands.options import Force, local, print_remarks, read_pairs
from mergeflow.errors import MergeflowError

Vector = Annotated[Path, typer.Argument(help="A task vector.")]
Out = Annotated[Path, typer.Option(help="The .safetensors file to make.")]


def add_commands(app: typer.Typer) -> None:
    group = typer.Typer(help="Task vectors: τ = expert − base, and arithmetic on them.", no_args_is_help=True)
    app.add_typer(group, name="vector")
    for command in (extract, add, negate, analogy):
        group.command()(command)
    group.command(context_settings={"ignore_unknown_options": True})(scale)  # -0.5 is a number, no option
    for whole in (extract_lora, compress, extract_task, soup):
        app.command(whole.__name__.replace("_", "-"))(whole)


def extract(
    context: typer.Context,
    base: Annotated[Path, typer.Argument(help="The base θ0.")],
    expert: Annotated[Path, typer.Argument(help="The expert θ_t.")],
    out: Out,
    force: Force = False,
) -> None:
    """Write τ = expert − base."""
    from mergeflow.merging.files import vectors

    made = vectors.extract(local(context, base), local(context, expert), out, force=force, remark=print_remarks)
    _say(out, made)


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
    error: Annotated[float, typer.Option(help="Take the smallest rank with this relative error.")] = 0.0,
    embeddings: Annotated[str, typer.Option(help="Store changed embeddings and heads whole, or as lora.")] = "whole",
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Tensors to leave as the base has them.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the adapter's tensors; float32 factors by default.")
    ] = None,
    tokenizer_source: Annotated[
        str | None,
        typer.Option(help="Whose tokens the adapter has: union, base or expert; else they must be equal."),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="A difference to accept; repeatable.")
    ] = None,
) -> None:
    """Write an expert's change from its base as a PEFT LoRA folder, by SVD, and print the error of each layer."""
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
    print_remarks((), made.warnings)


def _ranks(pairs: list[str]) -> dict[str, int]:
    ranks = read_pairs(pairs, "--rank-of")
    for pattern, rank in ranks.items():
        if not rank.isdecimal() or int(rank) < 1:
            raise MergeflowError(f"--rank-of '{pattern}={rank}': expected a whole number of at least 1 as the rank.")
    return {pattern: int(rank) for pattern, rank in ranks.items()}


def compress(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A compressor; `mergeflow methods` lists them.")],
    base: Annotated[Path, typer.Option(help="The base's file or folder.")],
    expert: Annotated[list[str], typer.Option(metavar="TASK=PATH", help="An expert; repeat for each task.")],
    out: Annotated[Path, typer.Option(help="The file to make.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="ARGUMENT=VALUE", help="An argument of the compressor, e.g. rank_ratio=0.1; repeat."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Store all experts of a suite in one small file, from which each can be extracted alone."""
    from contextlib import ExitStack

    from mergeflow.checkpoints import open_checkpoint
    from mergeflow.checkpoints.align_names import fit_inputs
    from mergeflow.merging.compression.compressor import configure_compressor
    from mergeflow.merging.compression.suite_file import compress as run
    from mergeflow.merging.files.output import check_file
    from mergeflow.merging.files.plan import open_base
    from mergeflow.merging.preflight import running_findings, warnings_of
    from mergeflow.yaml_text import parse_yaml

    changes = read_pairs(overrides or [], "--set")
    values = {argument: parse_yaml(text, f"--set '{argument}={text}'") for argument, text in changes.items()}
    call = configure_compressor(name, values)
    with ExitStack() as opened:
        origin = opened.enter_context(open_base(local(context, base)))
        paths = read_pairs(expert, "--expert")
        experts = {task: opened.enter_context(open_checkpoint(local(context, path))) for task, path in paths.items()}
        check_file(out, {"base": origin.path, **{task: state.path for task, state in experts.items()}}, force)
        fitted = fit_inputs(origin, experts)
        small = run(call, origin, fitted.experts)
        small.write(out)
        averaged = origin if getattr(call.arguments, "non_matrices", "own") == "average" else ()
        warnings = [
            *warnings_of((origin, *experts.values()), fitted),
            *(each.text for each in running_findings(averaged)),
        ]
        print_remarks(fitted.notes, warnings)
    share = small.stored_bits / small.expert_bits
    typer.echo(f"{out}: {small.stored_bits / 8e6:.2f} MB, {share:.1%} of the experts' {small.expert_bits / 8e6:.2f} MB")


def extract_task(
    context: typer.Context,
    compressed: Annotated[Path, typer.Argument(help="A file that `mergeflow compress` made.")],
    task: Annotated[str, typer.Argument(help="The task to take out.")],
    out: Annotated[Path, typer.Option(help="The file to make.")],
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


def soup(
    run: Annotated[Path, typer.Argument(help="A folder of checkpoint-100, checkpoint-200, …")],
    out: Annotated[Path, typer.Option(help="A .safetensors file, or a folder to make.")],
    window: Annotated[int | None, typer.Option(help="How many of the last checkpoints; all by default.")] = None,
    weights: Annotated[
        str, typer.Option(help="uniform; linear: the last weighs most; greedy: those that help on validation.")
    ] = "uniform",
    score: Annotated[
        str | None,
        typer.Option(metavar="SCORER", help="The scorer on validation: file.py:function, or a command with {model}."),
    ] = None,
    force: Force = False,
) -> None:
    """Average the checkpoints of one training run; with a scorer, warn of a barrier between them."""
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
