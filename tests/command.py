"""Commands run in this process: to start another costs seconds."""

from collections.abc import Callable
from typing import Any

from click.testing import Result
from typer import Typer
from typer.testing import CliRunner


def invoke(add_commands: Callable[[Typer], object], *words: object, **options: Any) -> Result:
    """Run a command of those that `add_commands` gives an app; `options` are those of `CliRunner.invoke`."""
    app = Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # else a command that is alone needs no name
    add_commands(app)
    return CliRunner().invoke(app, [str(word) for word in words], **options)
