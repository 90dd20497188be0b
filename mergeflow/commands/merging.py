"""Commands that merge: merge, check, methods, push, diff, convert."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import DownloadColumn, TransferSpeedColumn
from rich.table import Table

from mergeflow.application import call, find_project
from mergeflow.checkpoints.fingerprint import short
from mergeflow.commands.allocation import reuse_freed_memory
from mergeflow.commands.options import Force, checked, local, print_remarks, print_table, progress_bars
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from mergeflow.merging import Merged, Recipe

RecipePath = Annotated[Path, typer.Argument(help="A recipe: YAML or JSON.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, e.g. args.scale=0.5.")
]
FromFiles = Annotated[
    list[Path] | None, typer.Option("--from", metavar="FILE", help="A Python file that declares methods; repeatable.")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line. The context's object resolves references such as models:/name@alias."""
    app.command("merge")(merge)
    app.command("check")(check)
    app.command("methods")(methods)
    app.command("push")(push)
    app.command("diff")(diff)
    app.command("convert")(convert)


def merge(
    context: typer.Context,
    recipe: RecipePath,
    out: Annotated[Path | None, typer.Option(help="Where to write instead of the recipe's `out`.")] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue a sharded merge that was stopped.")] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="2/4", help="Write one part of several, e.g. on the second of four machines."),
    ] = None,
    join: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Join finished parts: the folder that holds them, or each part."),
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="PARTS", help="Further parts behind --join.", hidden=True)
    ] = None,
    force: Force = False,
    files: FromFiles = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Merge on workers that share this store and no folder: s3://BUCKET/fleet."
        ),
    ] = None,
    runner: Annotated[str | None, typer.Option(help="Whose workers, with --store: dask (the default) or ray.")] = None,
    workers: Annotated[int | None, typer.Option(help="How many of them, with --store; by default 2.")] = None,
) -> None:
    """Merge the checkpoints of a recipe; tensors are streamed from disk to disk."""
    from mergeflow.merging import load_recipe
    from mergeflow.merging import merge as merge_here

    reuse_freed_memory()
    recipe, join = _recipe_and_parts(recipe, join or [], more or [])
    _add_files(files)
    loaded, console = load_recipe(recipe, overrides or []), Console()
    settings = {"store": store, "runner": runner, "workers": workers}
    run: Callable[..., Merged] = partial(merge_here, resume=resume, part=part, join=join)
    if set(settings.values()) != {None}:
        _check_fleet(store, part, join)
        run = partial(call, "flows.fleet", "merge_on_fleet", settings)
    elif loaded.device != "cpu" and not join:
        loaded = _say_device(loaded, context)
    with progress_bars(console, DownloadColumn(), TransferSpeedColumn()) as bars:
        bar = bars.add_task(loaded.method, total=None)
        made = run(
            loaded,
            out,
            lambda done, total: bars.update(bar, completed=done, total=total),
            resolve=context.obj,
            force=force,
        )
    where = f"[bold]{escape(str(made.path))}[/]  {short(made.fingerprint)}…  {made.seconds:.1f} s"
    console.print(where, highlight=False, soft_wrap=True)
    print_remarks(made.notes, made.warnings)


def _check_fleet(store: str | None, part: str | None, join: list[Path]) -> None:
    if store is None:
        raise MergeflowError("--runner and --workers are for a merge on several machines: give its --store too.")
    if part is not None or join:
        raise MergeflowError("--store merges all parts and joins them: leave --part and --join out.")


def _recipe_and_parts(recipe: Path, join: list[Path], more: list[Path]) -> tuple[Path, list[Path]]:
    """Tell the recipe from the parts of `--join merged.part-*`, which a shell makes several arguments."""
    if not more:
        return recipe, join
    named = [recipe, *more]
    recipes = [path for path in named if not path.is_dir()]
    if not join or len(recipes) != 1:
        listed = "', '".join(map(str, recipes if join else named))
        raise MergeflowError(
            f"`merge` takes one recipe, found '{listed}'. Folders of parts follow --join, before or after the recipe."
        )
    return recipes[0], [*join, *(path for path in named if path.is_dir())]


def check(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(help="A recipe: YAML or JSON; none for the project.")] = None,
    overrides: Overrides = None,
    force: Force = False,
    files: FromFiles = None,
    wanted: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu, cuda, cuda:1 ... instead of the recipe's, or run.device.",
            callback=checked,
        ),
    ] = None,
) -> None:
    """Check a recipe and print its plan; in a project, check params.yaml and predict the memory of training."""
    from mergeflow.merging import check_recipe, load_recipe

    if recipe is not None:
        _add_files(files)
        changes = [*(overrides or []), *([f"device={wanted}"] if wanted else [])]
        loaded = load_recipe(recipe, changes)
        for line in check_recipe(loaded, context.obj, force=force).lines():
            typer.echo(line)
        if loaded.device != "cpu":
            _say_device(loaded, context)
    elif project := find_project(Path.cwd()):
        call("tasks.memory", "check_project", project, wanted, Console())
    else:
        raise MergeflowError("`mergeflow check` takes a recipe; without one it checks a project, from inside it.")


def _say_device(recipe: "Recipe", context: typer.Context) -> "Recipe":
    """Say which device a merge takes and how much of it; refuse it where that cannot fit."""
    from mergeflow.merging.execution.device import free_bytes, in_bytes
    from mergeflow.merging.execution.engine import check_room
    from mergeflow.merging.files.plan import choose_device, open_inputs

    recipe, chosen = choose_device(recipe, context.obj)
    for line in chosen:
        typer.echo(line)
    if recipe.device == "cpu":
        return recipe
    with open_inputs(recipe, context.obj) as inputs:
        taken = check_room(inputs.call, inputs.model, inputs.base.infos, recipe.device)
    free = in_bytes(free_bytes(recipe.device))
    typer.echo(f"{recipe.device:<13s} about {in_bytes(taken)} of its {free} free")
    return recipe


def push(
    folder: Annotated[Path, typer.Argument(help="A folder that `mergeflow merge` made.")],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/NAME", help="The model on the Hub, owner/name; it is created if it does not exist."
        ),
    ],
    private: Annotated[bool, typer.Option(help="Make it private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and list the files, but send nothing.")
    ] = False,
) -> None:
    """Upload a merged folder to the Hugging Face Hub in one commit, after a check of its files."""
    from mergeflow.merging.files.card import push as run

    made = run(folder, repo, private=private, dry_run=dry_run, say=typer.echo)
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for name, size in made.files if dry_run else ():
        typer.echo(f"{size:>14,}  {name}")
    typer.echo(made.url or f"nothing was sent: without --dry-run these files go to {repo}")


def methods(
    name: Annotated[str | None, typer.Argument(help="One method or compressor.")] = None,
    files: FromFiles = None,
    contract: Annotated[bool, typer.Option("--check", help="Test it against the contract of merge methods.")] = False,
) -> None:
    """List merge methods and compressors with their sources, or explain one: formula, arguments, source."""
    from mergeflow.commands.methods_page import method_section

    _add_files(files)
    console = Console()
    if contract:
        from mergeflow.merging.contract import check as check_contract

        if name is None:
            raise MergeflowError("--check needs the name of a method: mergeflow methods NAME --check.")
        check_contract(name)
        console.print(f"{name} keeps the contract.", highlight=False)
    elif name is not None:
        console.print(Markdown(method_section(name)))
    else:
        if not console.is_terminal:  # a file or pipe: whole names, whatever the width of the screen
            console = Console(width=160)
        console.print(_methods_table())


def _methods_table() -> Table:
    from mergeflow.merging.catalog import METHODS
    from mergeflow.merging.compression.compressor import COMPRESSORS

    table = Table(box=None, pad_edge=False)
    for column in ("method", "what it is", "anchor", "arguments", "from"):
        table.add_column(column, no_wrap=column in ("method", "from"))
    for name, method in METHODS.all().items():
        arguments, origin = ", ".join(method.args.model_fields), METHODS.origin(name).place
        table.add_row(name, method.summary, method.anchor, arguments, origin)
    for name, compressor in COMPRESSORS.all().items():
        arguments, origin = ", ".join(compressor.args.model_fields), COMPRESSORS.origin(name).place
        table.add_row(name, compressor.summary, "per task", arguments, origin)
    return table


def _add_files(files: list[Path] | None) -> None:
    if files:
        from mergeflow.merging.catalog import METHODS

        for file in files:
            METHODS.add_file(file)


def diff(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another checkpoint.")],
    every: Annotated[bool, typer.Option("--all", help="List equal tensors too.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor: norms, cosine, digests. Exit status 1 when they differ.

    Types and shapes that differ are printed under the tensor's name.
    """
    from mergeflow.merging.files.diff import diff as compare

    comparison = compare(local(context, a), local(context, b))
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "‖a‖", "‖b‖", "‖a − b‖", "cosine", "digest a", "digest b"):
        table.add_column(column, justify="left" if column == "tensor" else "right", no_wrap=True)
    for row in comparison.tensors:
        if every or not row.equal:
            numbers = (f"{row.norm_a:.6g}", f"{row.norm_b:.6g}", f"{row.norm_difference:.3e}", f"{row.cosine:.6f}")
            shown = ["–" if number == "nan" else number for number in numbers]
            name = escape(f"{row.name}\n  {row.change}" if row.change else row.name)
            table.add_row(name, *shown, *(digest[:10] or "missing" for digest in row.digests))
    console = Console()
    if table.row_count:
        print_table(console, table)
    print_remarks((), comparison.warnings)
    same = sum(row.equal for row in comparison.tensors)
    console.print(f"{same} of {len(comparison.tensors)} tensors are equal.", highlight=False)
    raise typer.Exit(0 if comparison.equal else 1)


def convert(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A checkpoint, an adapter other than LoRA, or a configuration of mergekit.")
    ],
    out: Annotated[Path, typer.Option(help="A .safetensors file or a folder to make; for a configuration, a recipe.")],
    dtype: Annotated[str | None, typer.Option(help="float64, float32, float16 or bfloat16, for all weights.")] = None,
    shard_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Largest file of a folder, e.g. 5GB.")] = None,
    force: Force = False,
) -> None:
    """Dequantise a checkpoint (int8, fp8, nf4, GPTQ, AWQ, MXFP4, GGUF), change its type, or convert a mergekit file.

    From a configuration of mergekit it writes the same merge as a recipe, or names all that cannot be carried over.
    """
    from mergeflow.merging.files.convert import convert as run
    from mergeflow.merging.files.mergekit import write_recipe
    from mergeflow.merging.files.recipe import parse_size

    if Path(source).suffix in (".yml", ".yaml"):
        for note in write_recipe(source, out, dtype=dtype, shard_size=shard_size, force=force):
            typer.echo(f"note: {note}")
        typer.echo(f"{out}  a recipe: mergeflow merge {out} --out …")
        return
    try:
        size = parse_size(shard_size)
    except ValueError as error:
        raise MergeflowError(f"--shard-size: {error}.") from None
    made = run(local(context, source), out, dtype, size, force=force)
    dequantised = f", {made.dequantised} of them dequantised" if made.dequantised else ""
    typer.echo(f"{made.path}  {short(made.fingerprint)}…  {made.tensors} tensors{dequantised}")
    print_remarks((), made.warnings)
