"""The page of commands, written from the command line itself: `mergeflow docs commands`."""

from collections.abc import Iterator
from typing import Any

from mergeflow.commands import ANYWHERE

_HEAD = """# Commands

The commands marked *project* work inside a project folder: one with `dvc.yaml` and `params.yaml`.
Bad input ends with one message and status 2.
"""
_LIBRARY = "mergeflow.commands"


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
    parts = [_HEAD]
    for words, command in every_command(group).items():
        anywhere = words in ANYWHERE or command.callback.__module__.startswith(_LIBRARY)
        kind = "" if anywhere else " *project*"
        parts.append(f"## `mergeflow {words}`{kind}\n\n{' '.join((command.help or '').split())}")
        if command.epilog:
            parts.append(f"```console\n{command.epilog.removeprefix('Example: ')}\n```")
        rows = [row for parameter in command.params for row in _row(parameter)]
        if rows:
            parts.append("| argument | default | meaning |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _row(parameter: Any) -> Iterator[str]:
    if parameter.name == "help":
        return
    option = parameter.param_type_name == "option"
    default = "required" if parameter.required else parameter.default
    names = [*parameter.opts, *(parameter.secondary_opts if default is True else [])]  # what is on can be turned off
    name = ", ".join(names) if option else parameter.name.upper()
    shown = "" if default is None or default is False else "on" if default is True else str(default)
    yield f"| `{name}` | {shown} | {parameter.help or ''} |"
