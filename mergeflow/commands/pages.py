"""The command that shows the documentation, whose pages messages and choices name: docs/training.md."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mergeflow.application import PAGES
from mergeflow.commands import ANYWHERE
from mergeflow.errors import unknown_name

FROM_CODE = {
    "architectures": "Architectures: roles of tensors, fused weights",
    "commands": "Commands: all arguments and options",
    "methods": "Merge methods: formulas, arguments, sources",
}
"""The pages that are written from the code when they are asked for, with their titles."""

_COMMANDS_HEAD = """# Commands

The commands marked *project* work inside a project folder: one with `dvc.yaml` and `params.yaml`.
Bad input ends with one message and status 2.
"""
_LIBRARY = "mergeflow.commands"


def add_commands(app: typer.Typer) -> None:
    app.command("docs")(docs)


def docs(
    context: typer.Context,
    page: Annotated[
        str | None, typer.Argument(help="A page's name, e.g. training; without it, list all pages.")
    ] = None,
) -> None:
    """Show a page of the documentation, or list the pages."""
    console = Console()
    pages = {path.stem: path for path in sorted(PAGES.glob("*.md"))}
    titles = FROM_CODE | {name: _title(path) for name, path in pages.items()}
    if page is None:
        listed = Table(box=None, show_header=False, pad_edge=False)
        for name in sorted(titles):
            listed.add_row(name, titles[name])
        console.print(listed)
        return
    name = Path(page).name.removesuffix(".md")
    if name not in titles:
        raise unknown_name("page", name, titles)
    text = pages[name].read_text(encoding="utf-8") if name in pages else page_of_code(name, context.find_root().command)
    if console.is_terminal:
        from rich.markdown import Markdown

        with console.pager(styles=True):
            console.print(Markdown(text))
    else:
        typer.echo(text)


def page_of_code(name: str, command_line: Any) -> str:
    from mergeflow.commands.methods_page import methods_page
    from mergeflow.merging.architectures.page import architectures_page

    writers: dict[str, Callable[[], str]] = {
        "architectures": architectures_page,
        "commands": lambda: commands_page(command_line),
        "methods": methods_page,
    }
    return writers[name]()


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines).removeprefix("#").strip()


def every_command(group: Any, prefix: str = "") -> dict[str, Any]:
    """List every command of a group of commands by its words, for example `vector extract`."""
    listed: dict[str, Any] = {}
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            listed |= every_command(command, f"{prefix}{name} ")
        else:
            listed[f"{prefix}{name}"] = command
    return listed


def commands_page(group: Any) -> str:
    """Return the page: for each command what it does, its arguments and options."""
    parts = [_COMMANDS_HEAD]
    for words, command in every_command(group).items():
        anywhere = words in ANYWHERE or command.callback.__module__.startswith(_LIBRARY)
        kind = "" if anywhere else " *project*"
        parts.append(f"## `mergeflow {words}`{kind}\n\n{' '.join((command.help or '').split())}")
        if command.epilog:
            parts.append(f"```console\n{command.epilog.removeprefix('Example: ')}\n```")
        rows = [row for parameter in command.params for row in _row(parameter)]
        if rows:
            parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _row(parameter: Any) -> Iterator[str]:
    if parameter.name == "help":
        return
    option = parameter.param_type_name == "option"
    default = parameter.default
    names = [*parameter.opts, *(parameter.secondary_opts if default is True else [])]  # what is on can be turned off
    name = ", ".join(names) if option else parameter.name.upper()
    shown = "" if default is None or default is False else "on" if default is True else str(default)
    remark = " *Required.*" if parameter.required else f" *Default: {shown}.*" if shown else ""
    yield f"| `{name}` | {parameter.help or ''}{remark} |"
