"""Checkpoints that are named on the command line, and what may be done to the file that a command makes."""

from pathlib import Path
from typing import Annotated

import typer

Force = Annotated[bool, typer.Option("--force", help="Replace the output file even if mergeflow did not make it.")]


def local(context: typer.Context, path: str | Path) -> str:
    """Return the local path of a checkpoint; in a project, references such as models:/name@alias are followed.

    Args:
        context: its object is what follows references, or None.

    Raises:
        MergeflowError: a reference outside a project, or one that leads nowhere.
    """
    from mergeflow.merging.files.recipe import local_path

    return local_path(str(path), context.obj)
