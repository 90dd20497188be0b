"""The command that shows the documentation, whose pages messages and choices name: docs/training.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mergeflow.application import PAGES
from mergeflow.errors import unknown_name

FROM_CODE = {
    "architectures": "Architectures: roles of tensors, fused weights",
    "commands": "Commands: all arguments and options",
    "methods": "Merge methods: formulas, arguments, sources",
}
"""The pages that are written from the code when they are asked for, with their titles."""


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("docs")(docs)


def docs(
    context: typer.Context,
    page: Annotated[
        str | None, typer.Argument(help="A page, as training or docs/training.md; all are listed by default.")
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
    """Write one of the pages that come from the code.

    Args:
        name: one of `FROM_CODE`.
        command_line: the click group with all commands.
    """
    from mergeflow.commands.methods_page import methods_page
    from mergeflow.commands.reference import commands_page
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
