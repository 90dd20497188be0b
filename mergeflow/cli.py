"""The command line. Library commands work anywhere, the project's inside a project folder.

Heavy imports happen inside the commands, so that `mergeflow --help` answers at once.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergeflow.application import find_project, make_importable
from mergeflow.commands import (
    ANYWHERE,
    derived,
    help_groups,
    language,
    merging,
    pages,
    statistics,
    sweep,
)
from mergeflow.errors import MergeflowError, first_line, is_full, not_installed, not_permitted, require
from mergeflow.version import version

app = typer.Typer(
    name="mergeflow",
    help="Merge fine-tuned models, and keep the best merge of a project in a registry.",
    epilog="Example: mergeflow check recipe.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def add_all_commands(start: Path) -> Callable[[str], str] | None:
    """Add the library's commands and the project's; outside a project folder the latter say what they lack."""
    for family in (merging, derived, sweep, statistics, language, pages):
        family.add_commands(app)
    library, project = _names(), find_project(start)
    make_importable()
    commands = import_module("flows.commands")
    commands.add_commands(app, project or start, project is not None)
    import_module("studies.commands.study").add_commands(app, project or start)
    resolve: Callable[[str], str] | None = commands.connect_library(app, project) if project else None
    help_groups.arrange(app)

    @app.callback()
    def _root(
        context: typer.Context,
        _: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Merge fine-tuned models, and keep the best merge of a project in a registry."""
        asked = context.invoked_subcommand
        if asked in library | ANYWHERE or "--help" in sys.argv:
            return
        if project is None:
            raise MergeflowError(
                f"`mergeflow {asked}` works inside a project, and {start} is not in a project folder (one with "
                "dvc.yaml and params.yaml): go into one, or make one with `mergeflow new NAME`."
            )
        require("dvc", "mlflow", "prefect")

    return resolve


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mergeflow {version()}")
        raise typer.Exit


def _names() -> set[str | None]:
    return {*(command.name for command in app.registered_commands), *(group.name for group in app.registered_groups)}


def _run_the_projects_own_library(project: Path | None) -> None:
    """Start again with the library that lies in the project's repository, where another copy of it is running.

    DVC runs experiments in copies of the repository and records the copy's code as what made the results.
    """
    above = [project, *project.parents] if project else []
    root = next((folder for folder in above if (folder / "mergeflow/cli.py").is_file()), None)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root and not (root / "mergeflow").samefile(Path(__file__).parent) and str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), *paths]))
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "mergeflow.cli", *sys.argv[1:]])


def _end_soon() -> None:
    """Keep Python from searching all modules for garbage at its end: half a second, once torch is imported."""
    if "triton" not in sys.modules:  # it prints what was not collected
        gc.freeze()


def main() -> None:
    """Run the command line; a `MergeflowError` is printed as one message and ends with status 2."""
    atexit.register(_end_soon)
    _run_the_projects_own_library(find_project(Path.cwd()))
    resolve = add_all_commands(Path.cwd())
    try:
        app(obj=resolve)
    except Exception as error:
        message = _message_of(error)
        if message is None:
            raise
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {_plain(str(message))}")
        sys.exit(2)


def _message_of(error: Exception) -> Exception | None:
    """Translate an error into a message for the user; None for a fault of this library."""
    if isinstance(error, ModuleNotFoundError):
        return not_installed(error.name)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        first = str(error).partition("\n")[0].partition(". GPU ")[0].rstrip(".")
        return MergeflowError(
            f"the device has too little memory: {first}. Put fewer examples on it at once (a smaller batch, or "
            "finetune.accumulate), end what else uses it, or use the device cpu."
        )
    if isinstance(error, MergeflowError):
        return error
    if denied := not_permitted(error):
        return denied
    if is_full(error):
        return MergeflowError(
            f"the disk is full: {first_line(error)}. Free some space and call the command again: finished work is kept."
        )
    from mergeflow.plugins import failed_in_own_code

    return failed_in_own_code(error)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
