"""Add or remove one line of a section of parameters and leave every other character, comments included, as it is."""

import os
from pathlib import Path
from typing import Any

import yaml

from mergeflow.checkpoints import write_text
from mergeflow.errors import MergeflowError


def add_task_line(text: str, name: str, source: str) -> str:
    """Return the text of params.yaml with one more task, the last of `tasks`.

    Args:
        text: of params.yaml.
        name: the task's name.
        source: where its examples come from.

    Example:
        >>> print(add_task_line("tasks:\\n  a: suite:x  # drawn\\n\\nseed: 0\\n", "b", "folder:inputs/b"), end="")
        tasks:
          a: suite:x  # drawn
          b: folder:inputs/b
        <BLANKLINE>
        seed: 0
    """
    return add_line(text, "tasks", name, source)


def add_line(text: str, section: str, name: str, value: Any) -> str:
    """Return the text of a file of parameters with one more entry, the last of a section.

    Args:
        text: of the file.
        section: a key at the top level.
        name: the new entry's key.
        value: what it says, plain YAML values.

    Raises:
        MergeflowError: the section is written in a way that cannot be edited safely, or there is none.

    Example:
        >>> add_line("studies: {}\\n", "studies", "mine", {"run": "experts"})
        'studies: {mine: {run: experts}}\\n'
    """
    entries, entry = _section_node(text, section), _entry(name, value)
    if entries.flow_style:
        at = entries.end_mark.index - 1
        changed = f"{text[:at].rstrip()}{', ' if entries.value else ''}{entry}{text[at:]}"
    else:
        lines = text.splitlines(keepends=True)
        key, last = entries.value[-1]
        line = last.end_mark.line if last.end_mark.column else last.end_mark.line - 1
        if not lines[line].endswith("\n"):
            lines[line] += "\n"
        lines.insert(line + 1, f"{' ' * key.start_mark.column}{entry}\n")
        changed = "".join(lines)
    return _checked(text, changed, section, lambda found: found.update({name: value}))


def remove_task_line(text: str, name: str) -> str:
    r"""Return the text of params.yaml without a task that stands on a line of its own; as it is where it has none.

    Raises:
        MergeflowError: `tasks` is written on one line.

    Example:
        >>> remove_task_line("tasks:\n  a: suite:x\n  b: folder:b\nseed: 0\n", "b")
        'tasks:\n  a: suite:x\nseed: 0\n'
    """
    tasks = _section_node(text, "tasks")
    key = next((key for key, _ in tasks.value if key.value == name), None)
    if key is None:
        return text
    if tasks.flow_style:
        raise MergeflowError(f"params.yaml: remove the task '{name}' by hand, `tasks` is written on one line.")
    lines = text.splitlines(keepends=True)
    del lines[key.start_mark.line]
    return _checked(text, "".join(lines), "tasks", lambda found: found.pop(name))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, keeping its permissions: a reader finds the old text or the new one.

    Where `path` is a link, the file that it points to is replaced.
    """
    path = path.resolve()
    mode = path.stat().st_mode
    write_text(path, text)
    os.chmod(path, mode)


def _entry(name: str, value: Any) -> str:
    flow = None if isinstance(value, dict) else False  # a mapping as {…} on the entry's line
    return yaml.safe_dump({name: value}, default_flow_style=flow, width=float("inf")).strip()


def _section_node(text: str, section: str) -> Any:
    top: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    found = next((value for key, value in top.value if key.value == section), None)
    if not isinstance(found, yaml.MappingNode):
        raise MergeflowError(f"the parameters have no mapping `{section}` to add to: write it by hand.")
    return found


def _checked(before: str, after: str, section: str, change: Any) -> str:
    """Return `after` if it reads as `before` with the change, comments and other sections untouched."""
    known = yaml.safe_load(before)
    expected = {**known, section: dict(known[section])}  # a copy: an alias elsewhere must not change with it
    change(expected[section])
    try:
        found = yaml.safe_load(after)
    except yaml.YAMLError:
        found = None
    if found != expected:
        raise MergeflowError(
            f"the section `{section}` is written in a way that cannot be edited safely: change it by hand."
        )
    return after
