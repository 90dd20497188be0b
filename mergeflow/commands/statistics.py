"""Commands that get from data what some methods need: statistics fisher, statistics gram, adamerge."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from mergeflow.checkpoints.fingerprint import short
from mergeflow.commands.options import Device, Force, print_remarks, progress_bars, read_pairs, seed_option

Expert = Annotated[Path, typer.Argument(help="The expert's weights.")]
Task = Annotated[Path, typer.Option(help="The prepared folder of the expert's task.")]
Architecture = Annotated[
    str, typer.Option(help="open_clip's name, pocket-clip, or the base of a project (a .safetensors file).")
]
Out = Annotated[Path, typer.Option(help="The .safetensors file to make.")]
Samples = Annotated[int, typer.Option(min=1, help="Number of examples, or all if there are fewer.")]
Split = Annotated[str, typer.Option(help="The split whose examples are used: train or validation.")]
Seed = Annotated[int, seed_option("Seed of the drawn examples (and labels).")]


def add_commands(app: typer.Typer) -> None:
    group = typer.Typer(help="Statistics of data for the methods that need them.", no_args_is_help=True)
    app.add_typer(group, name="statistics")
    group.command()(fisher)
    group.command()(gram)
    app.command("adamerge")(adamerge)


def fisher(
    expert: Expert,
    task: Task,
    architecture: Architecture,
    out: Out,
    head: Annotated[Path | None, typer.Option(help="The task's head; a causal model has none.")] = None,
    samples: Samples = 256,
    split: Split = "train",
    labels: Annotated[str, typer.Option(help="sampled: one label per example from the model; all: every class.")] = (
        "sampled"
    ),
    seed: Seed = 0,
    device: Device = "cpu",
    force: Force = False,
) -> None:
    """Write the diagonal Fisher information, for `fisher`: data: {fisher: {EXPERT: FILE}}."""
    from mergeflow.errors import unknown_name

    if labels not in ("sampled", "all"):
        raise unknown_name("kind of labels", labels, ("sampled", "all"))
    shared = {"samples": samples, "split": split, "seed": seed, "device": device, "architecture": architecture}
    _write(
        out, force, kind="fisher", expert=str(expert), task=str(task), head=head and str(head), labels=labels, **shared
    )


def gram(
    expert: Expert,
    task: Task,
    architecture: Architecture,
    out: Out,
    head: Annotated[Path | None, typer.Option(help="Ignored; `fisher` needs it.")] = None,
    samples: Samples = 256,
    split: Split = "train",
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per forward pass.")] = 32,
    seed: Seed = 0,
    device: Device = "cpu",
    force: Force = False,
) -> None:
    """Write the Gram matrices of every linear weight's inputs, for `regmean`: data: {gram: {EXPERT: FILE}}."""
    shared = {"samples": samples, "split": split, "seed": seed, "device": device, "architecture": architecture}
    _write(out, force, kind="gram", expert=str(expert), task=str(task), batch_size=batch_size, **shared)


def adamerge(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A recipe of the method adamerging.")],
    task: Annotated[list[str], typer.Option(metavar="TASK=FOLDER", help="A prepared folder; repeat for each task.")],
    architecture: Architecture,
    out: Annotated[Path, typer.Option(help="Folder for the coefficients and the recipe that uses them.")],
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=FILE", help="The task's head; repeat for each task that has one."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="The split whose examples are used, without labels; the paper takes test.")
    ] = ("validation"),
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per task and step.")] = 16,
    seed: Annotated[int, seed_option("Seed of the batches.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, e.g. args.steps=100.")
    ] = None,
    force: Force = False,
) -> None:
    """Learn AdaMerging's coefficients by entropy on examples without labels."""
    from mergeflow.evaluation.adamerging import RECIPE, AdamergeOrder, check_order, learn_coefficients, with_device
    from mergeflow.evaluation.memory import estimate_coefficients_memory
    from mergeflow.evaluation.statistics import check_learned_place
    from mergeflow.merging import load_recipe
    from mergeflow.modalities.catalog import is_recorded

    loaded = with_device(load_recipe(recipe, overrides or []))
    order = AdamergeOrder(
        architecture,
        read_pairs(task, "--task", "TASK=PATH"),
        read_pairs(head or [], "--head", "TASK=PATH"),
        split,
        batch_size,
        seed,
    )
    check_order(loaded, order, out)
    named = {f"{kind} {name}": path for kind in ("tasks", "heads") for name, path in getattr(order, kind).items()}
    named |= {"architecture": architecture} if is_recorded(architecture) else {}
    check_learned_place(out, loaded, {"recipe": str(recipe), **named}, force)
    if loaded.device != "cpu":
        estimate_coefficients_memory(order, loaded.device).announce()
    with progress_bar("adamerging") as progress:
        learned = learn_coefficients(loaded, order, out, resolve=context.obj, progress=progress, remark=print_remarks)
    for name, values in learned.coefficients.items():
        numbers = list(values.values())
        mean = sum(numbers) / len(numbers)
        spread = "" if min(numbers) == max(numbers) else f"  ({min(numbers):.4f} to {max(numbers):.4f} over tensors)"
        typer.echo(f"{name}  {mean:.4f}{spread}")
    if learned.losses:
        typer.echo(f"entropy {learned.losses[0]:.4f} at the first step, {learned.losses[-1]:.4f} at the last")
    typer.echo(f"{out / RECIPE}, for `mergeflow merge {out / RECIPE}`")


def _write(out: Path, force: bool, **order: Any) -> None:
    from mergeflow.evaluation.memory import estimate_statistic_memory
    from mergeflow.evaluation.statistics import StatisticOrder, check_order, write_statistic

    asked = StatisticOrder(**order)
    check_order(asked, out, force)
    if asked.device != "cpu":
        estimate_statistic_memory(asked).announce()
    with progress_bar(asked.kind) as progress:
        fingerprint, count = write_statistic(asked, out, progress, force=force, remark=print_remarks)
    typer.echo(f"{out}  {short(fingerprint)}…  {count} examples of {order['split']}")


@contextmanager
def progress_bar(name: str) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere; yields the function to call with done and total."""
    with progress_bars(Console(), MofNCompleteColumn(), TimeElapsedColumn()) as bars:
        bar = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
