"""What the next run would do, and why."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.choices import read_choices
from flows.dvc_process import writers
from flows.plan import REGISTER, registration_lost
from flows.staleness import changes
from mergeflow.layout import CODE
from tasks.project.graph import downstream_closure, load_graph, upstream
from tasks.project.runner import failure_note

SHOWN = 4  # reasons in a line


def print_status(root: Path, console: Console, studies: bool = False) -> list[str]:
    """Print which stages are stale for the code, parameters and data as they are now, and what made each so.

    Args:
        root: the project folder.
        console: where it is printed.
        studies: ask about the studies too.

    Returns:
        The addresses that the next run would run.

    Raises:
        MergeflowError: a parameter is wrong, or DVC cannot answer.
    """
    read_choices(root)
    for pid, words in writers(root):
        console.print(
            f"`dvc {words.partition(' ')[2]}` (process {pid}) is at work here; what it runs now counts as stale.",
            highlight=False,
        )
    stages = load_graph(root, studies)
    found = {address: list(reasons(entries)) for address, entries in changes(root, stages).items()}
    todo = downstream_closure(set(found), stages)
    if REGISTER not in todo and registration_lost(root):
        todo, found[REGISTER] = [*todo, REGISTER], ["the configured registry lacks this project's version"]
    if not todo:
        console.print("[bold]Nothing changed:[/] every stage is up to date.")
        return []
    console.print(f"[bold]{len(todo)} of {len(stages)} stages to run[/]", highlight=False)
    for address in todo:
        why = found.get(address) or [f"after {above}" for above in upstream(stages[address], stages) if above in todo]
        why = [*last_failure(root, address), *why]
        more = [f"{len(why) - SHOWN} more"] if len(why) > SHOWN else []
        console.print(f"  {address:<26} {', '.join([*why[:SHOWN], *more])}", highlight=False, soft_wrap=True)
    return todo


def last_failure(root: Path, address: str) -> Iterator[str]:
    """Yield why a stage failed when it was last tried, if it did."""
    try:
        yield f"failed: {json.loads(failure_note(root, address).read_text())['error']},"
    except (OSError, ValueError):
        return


def reasons(entries: list[Any]) -> Iterator[str]:
    """Yield what DVC says of one stage in words.

    Example:
        >>> list(reasons([{"changed deps": {"outputs/code.yaml": {"base": "modified"}, "inputs": "deleted"}}]))
        ['its code modified', 'inputs missing']
        >>> list(reasons([{"changed deps": {"params.yaml": "new"}}, {"changed outs": {"outputs/base": "deleted"}}]))
        ['never run']
    """
    if {"params.yaml": "new"}.items() <= _changed(entries).items():
        yield "never run"
        return
    for entry in entries:
        if isinstance(entry, str):
            yield entry
    for path, what in _changed(entries).items():
        if path == CODE:
            yield "its code modified"
        elif isinstance(what, dict):
            yield from (f"{path} {name} {_word(state)}" for name, state in what.items())
        else:
            yield f"{path} {_word(what)}"


def _changed(entries: list[Any]) -> dict[str, Any]:
    """The changed dependencies and outputs of one stage, with how each changed."""
    return {
        path: what
        for entry in entries
        if isinstance(entry, dict)
        for part in entry.values()
        for path, what in part.items()
    }


def _word(state: str) -> str:
    return "missing" if state == "deleted" else state
