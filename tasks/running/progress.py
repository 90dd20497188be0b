"""Show a running pipeline: one bar for the stages, one for each stage at work."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tasks.project.stage import STATE, file_name, read_record
from tasks.running.runner import failure_note

SECONDS = 0.3


@contextmanager
def progress_bars(root: Path, addresses: list[str], console: Console) -> Iterator[None]:
    """Show progress until the block ends.

    On a terminal: live bars. Elsewhere (a log file, CI): one line for each stage that finished.
    """
    stop = threading.Event()
    columns = [TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        watcher = threading.Thread(target=_watch, args=(root, addresses, bars, console, stop), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()


def _watch(root: Path, addresses: list[str], bars: Progress, console: Console, stop: threading.Event) -> None:
    before = {address: _finish(root, address) for address in addresses}
    started = {address: read_record(root, address).get("started") for address in addresses}
    whole = bars.add_task("stages", total=len(addresses))
    live: dict[str, TaskID] = {}
    finished: set[str] = set()
    failed = {address: _failed(root, address) for address in addresses}
    last_round = False
    while not last_round:
        last_round = stop.wait(SECONDS)  # one more look after the end
        for address in addresses:
            if address not in finished and _finish(root, address) != before[address]:
                finished.add(address)
                if file_name(address) in live:
                    bars.remove_task(live.pop(file_name(address)))
                _print_end(address, read_record(root, address), started[address], console)
            if (now := _failed(root, address)) != failed[address]:
                failed[address] = now
                _print_failure(root, address, console)
        bars.update(whole, completed=len(finished))
        for path in (root / STATE / "progress").glob("*.json"):
            if path.stem not in map(file_name, finished):
                _show(path, bars, live)


def _finish(root: Path, address: str) -> float:
    """Return when the stage was last found or made up to date; 0 for never."""
    return _time_of(root / STATE / "manifests" / f"{file_name(address)}.json")


def _failed(root: Path, address: str) -> float:
    """Return when the stage last failed; 0 where it has not, or is tried again."""
    return _time_of(failure_note(root, address))


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _print_failure(root: Path, address: str, console: Console) -> None:
    try:
        note = json.loads(failure_note(root, address).read_text())
    except (OSError, ValueError):  # it is tried again
        return
    line = f"  [red]✗[/] {address:<26} {note['seconds']:7.1f} s  {escape(note['error'])}"
    console.print(line, highlight=False, soft_wrap=True)


def _print_end(address: str, record: dict[str, Any], started_before: float | None, console: Console) -> None:
    if record.get("started") == started_before:
        console.print(f"  [dim]= {address:<26} up to date[/]", highlight=False)
    else:
        console.print(f"  [green]✓[/] {address:<26} {record['seconds']:7.1f} s", highlight=False)


def _show(path: Path, bars: Progress, live: dict[str, TaskID]) -> None:
    name = path.stem
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):  # it ended just now
        return
    if name not in live:
        live[name] = bars.add_task(name)
    bars.update(live[name], description=f"{name} · {state['what']}", completed=state["done"], total=state["total"])
