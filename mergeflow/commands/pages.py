"""The command that shows the documentation, whose pages messages and choices name: docs/training.md."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mergeflow.application import PAGES
from mergeflow.errors import unknown_name


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("docs")(docs)


def docs(
    page: Annotated[
        str | None, typer.Argument(help="A page, as training or docs/training.md; all are listed by default.")
    ] = None,
) -> None:
    """Show a page of the documentation, or list the pages."""
    console = Console()
    pages = {path.stem: path for path in sorted(PAGES.glob("*.md"))}
    if page is None:
        listed = Table(box=None, show_header=False, pad_edge=False)
        for name, path in pages.items():
            listed.add_row(name, _title(path))
        console.print(listed)
        return
    name = Path(page).name.removesuffix(".md")
    if name not in pages:
        raise unknown_name("page", name, pages)
    text = pages[name].read_text(encoding="utf-8")
    if console.is_terminal:
        from rich.markdown import Markdown

        with console.pager(styles=True):
            console.print(Markdown(text))
    else:
        typer.echo(text)


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines).removeprefix("#").strip()
