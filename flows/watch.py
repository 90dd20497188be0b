"""Show a running pipeline: one bar for the stages, one for each stage at work."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tasks.project.stage import STATE, file_name, read_record

SECONDS = 0.3


@contextmanager
def progress_bars(root: Path, addresses: list[str], console: Console) -> Iterator[None]:
    """Show progress until the block ends.

    On a terminal: live bars. Elsewhere (a log file, CI): one line for each stage that finished.

    Args:
        root: the project folder, whose progress files are read.
        addresses: the stages that will run.
        console: where to print.
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
    last_round = False
    while not last_round:
        last_round = stop.wait(SECONDS)  # one more look after the end
        for address in addresses:
            if address not in finished and _finish(root, address) != before[address]:
                finished.add(address)
                if file_name(address) in live:
                    bars.remove_task(live.pop(file_name(address)))
                _print_end(address, read_record(root, address), started[address], console)
        bars.update(whole, completed=len(finished))
        for path in (root / STATE / "progress").glob("*.json"):
            if path.stem not in map(file_name, finished):
                _show(path, bars, live)


def _finish(root: Path, address: str) -> float:
    """Return when the stage was last found or made up to date; 0 for never."""
    path = root / STATE / "manifests" / f"{file_name(address)}.json"
    return path.stat().st_mtime if path.exists() else 0.0


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
