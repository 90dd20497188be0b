"""Add or remove one task in params.yaml and leave every other character, comments included, as it is."""

import os
from pathlib import Path
from typing import Any

import yaml

from mergeflow.checkpoints import write_text
from mergeflow.errors import MergeflowError


def add_task_line(text: str, name: str, source: str) -> str:
    """Return the text of params.yaml with one more task, the last of `tasks`.

    Example:
        >>> print(add_task_line("tasks:\\n  a: suite:x  # drawn\\n\\nseed: 0\\n", "b", "folder:inputs/b"), end="")
        tasks:
          a: suite:x  # drawn
          b: folder:inputs/b
        <BLANKLINE>
        seed: 0
    """
    tasks, entry = _tasks_node(text), _entry(name, source)
    if tasks.flow_style:
        at = tasks.end_mark.index - 1
        changed = f"{text[:at].rstrip()}{', ' if tasks.value else ''}{entry}{text[at:]}"
    else:
        lines = text.splitlines(keepends=True)
        key, value = tasks.value[-1]
        line = value.end_mark.line if value.end_mark.column else value.end_mark.line - 1
        if not lines[line].endswith("\n"):
            lines[line] += "\n"
        lines.insert(line + 1, f"{' ' * key.start_mark.column}{entry}\n")
        changed = "".join(lines)
    return _checked(text, changed, lambda found: found["tasks"].update({name: source}))


def remove_task_line(text: str, name: str) -> str:
    """Return the text of params.yaml without a task that stands on a line of its own.

    Example:
        >>> remove_task_line("tasks:\\n  a: suite:x\\n  b: folder:b\\nseed: 0\\n", "b")
        'tasks:\\n  a: suite:x\\nseed: 0\\n'
    """
    tasks = _tasks_node(text)
    key = next(key for key, _ in tasks.value if key.value == name)
    if tasks.flow_style:
        raise MergeflowError(f"params.yaml: remove the task '{name}' by hand, `tasks` is written on one line.")
    lines = text.splitlines(keepends=True)
    del lines[key.start_mark.line]
    return _checked(text, "".join(lines), lambda found: found["tasks"].pop(name))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, keeping its permissions: a reader finds the old text or the new one."""
    mode = path.stat().st_mode
    write_text(path, text)
    os.chmod(path, mode)


def _entry(name: str, source: str) -> str:
    return yaml.safe_dump({name: source}, width=float("inf")).strip()


def _tasks_node(text: str) -> Any:
    top: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    return next(value for key, value in top.value if key.value == "tasks")


def _checked(before: str, after: str, change: Any) -> str:
    """Return `after` if it reads as `before` with the change, comments and other sections untouched."""
    known = yaml.safe_load(before)
    expected = {**known, "tasks": dict(known["tasks"])}  # a copy: an alias elsewhere must not change with it
    change(expected)
    try:
        found = yaml.safe_load(after)
    except yaml.YAMLError:
        found = None
    if found != expected:
        raise MergeflowError(
            "params.yaml: `tasks` is written in a way that cannot be edited safely: change that section by hand."
        )
    return after
