"""Options that several commands share: checkpoints, a device, entries of the form NAME=VALUE."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from mergeflow.errors import MergeflowError
from mergeflow.schema import check_seed

Force = Annotated[bool, typer.Option("--force", help="Replace the output file even if mergeflow did not make it.")]


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: a terminal that is too narrow breaks its lines, but nothing is cut out of them."""
    least = Measurement.get(console, console.options.update(max_width=10_000), table).minimum
    if least > console.width:
        table.width = least
    console.print(table, crop=False)


def print_remarks(notes: Iterable[str], warnings: Iterable[str], err: bool = False) -> None:
    """Print what was done to make inputs fit, and what to know of them, as `check` does; to standard error if asked."""
    for kind, lines in (("note", notes), ("warning", warnings)):
        for line in lines:
            typer.echo(f"{kind:<13s} {line}", err=err)


def progress_bars(console: Console, *columns: ProgressColumn) -> Progress:
    """Return bars that show these columns and the time that is left; nothing where there is no terminal."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


def local(context: typer.Context, path: str | Path) -> str:
    """Return the local path of a checkpoint; in a project, references such as models:/name@alias are followed."""
    from mergeflow.merging.files.recipe import local_path

    return local_path(str(path), context.obj)


def read_pairs(entries: list[str], option: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """Return the values by name.

    Example:
        >>> read_pairs(["a=1", "b=x=y"], "--set")
        {'a': '1', 'b': 'x=y'}
    """
    values: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name or not value:
            raise MergeflowError(f"{option} '{entry}' is not of the form {form}.")
        if name in values:
            raise MergeflowError(f"{option} names '{name}' twice.")
        values[name] = value
    return values


def checked(device: str | None) -> str | None:
    """Return a device if it can be used; None and `auto` are left to those who read them.

    Example:
        >>> checked("cpu")
        'cpu'
        >>> checked("gpu")
        Traceback (most recent call last):
        mergeflow.errors.MergeflowError: --device is 'gpu', expected cpu, cuda or one such as cuda:1.
    """
    if device in (None, "auto", "cpu"):
        return device
    if device.upper().startswith("MIG-") or device.upper().startswith("GPU-"):
        raise MergeflowError(
            f"--device is '{device}': a card or a part of one (MIG) is chosen by CUDA_VISIBLE_DEVICES={device}, and is "
            "then --device cuda."
        )
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise MergeflowError(f"--device is '{device}', expected cpu, cuda or one such as cuda:1.")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) < count:
        return device
    if count:
        raise MergeflowError(f"--device is '{device}', but torch sees {count} CUDA devices, from cuda:0 on.")
    raise MergeflowError(f"--device is '{device}', but torch sees no CUDA device: {_why(torch)} Or use --device cpu.")


def _why(torch: object) -> str:
    """Say what to look at where torch sees no device."""
    version, built = torch.__version__, torch.version.cuda  # type: ignore[attr-defined]
    if built is None:
        return f"torch {version} is built without CUDA; install a build with it."
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return f"CUDA_VISIBLE_DEVICES is '{shown}', which may hide it."
    return f"torch {version} is built for CUDA {built}; `nvidia-smi` must show a card and a driver for that version."


Device = Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1 ...", callback=checked)]


def _checked_seed(seed: int | None) -> int | None:
    if seed is not None:
        try:
            check_seed(seed)
        except MergeflowError as error:
            raise typer.BadParameter(str(error)) from None
    return seed


def seed_option(help: str) -> Any:
    """Return the option of a seed that every generator takes; the help shows no bound of 19 digits."""
    return typer.Option(min=0, callback=_checked_seed, help=help)
