"""The command line. Library commands work anywhere; inside a project folder the project adds its own.

Heavy imports happen inside the commands, so that `mergeflow --help` answers at once.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console

from mergeflow.commands import merging, statistics, sweep, vectors
from mergeflow.errors import MergeflowError

app = typer.Typer(
    name="mergeflow",
    help="A model-merging factory: one base, many experts, every merge method, one registry.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def find_project(start: Path) -> Path | None:
    """Return the project folder that holds `start`: the nearest with dvc.yaml, params.yaml and flows/commands.py."""
    for folder in [start, *start.parents]:
        if all((folder / name).is_file() for name in ("dvc.yaml", "params.yaml", "flows/commands.py")):
            return folder
    return None


def add_all_commands(start: Path) -> Callable[[str], str] | None:
    """Add the library's commands, and the project's when `start` lies in a project folder.

    Returns:
        What follows references in recipes (models:/name@alias), which only a project can; None outside.
    """
    for family in (merging, vectors, sweep, statistics):
        family.add_commands(app)
    project = find_project(start)
    if project is None:
        return None
    sys.path.insert(0, str(project))
    resolve: Callable[[str], str] = importlib.import_module("flows.commands").add_commands(app, project)
    return resolve


def _run_the_projects_own_library(project: Path | None) -> None:
    """Start again with the library that lies in the project folder, where another copy of it is running.

    DVC runs experiments in copies of the project and records the copy's code as what made the results.
    """
    if project is None:
        return
    own, paths = project / "mergeflow", os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if (own / "cli.py").is_file() and not own.samefile(Path(__file__).parent) and str(project) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(project), *paths]))
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "mergeflow.cli", *sys.argv[1:]])


def main() -> None:
    """Run the command line; a `MergeflowError` is printed as one message and ends with status 2."""
    _run_the_projects_own_library(find_project(Path.cwd()))
    resolve = add_all_commands(Path.cwd())
    try:
        app(obj=resolve)
    except MergeflowError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {_plain(str(error))}")
        sys.exit(2)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


@app.callback()
def _root() -> None:
    """A model-merging factory: one base, many experts, every merge method, one registry."""


if __name__ == "__main__":
    main()
