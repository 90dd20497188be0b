"""Show a running pipeline: one bar for the stages, one for each stage at work."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tasks.runner import STATE, read_record

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
    before = {address: read_record(root, address).get("started") for address in addresses}
    whole = bars.add_task("stages", total=len(addresses))
    live: dict[str, TaskID] = {}
    finished: set[str] = set()
    last_round = False
    while not last_round:
        last_round = stop.wait(SECONDS)  # one more look after the end
        for address in addresses:
            record = read_record(root, address)
            if address not in finished and record.get("started") != before[address]:
                finished.add(address)
                if address in live:
                    bars.remove_task(live.pop(address))
                console.print(f"  [green]✓[/] {address:<26} {record['seconds']:7.1f} s", highlight=False)
        bars.update(whole, completed=len(finished))
        for path in (root / STATE / "progress").glob("*.json"):
            _show(path, bars, live, finished)


def _show(path: Path, bars: Progress, live: dict[str, TaskID], finished: set[str]) -> None:
    address = path.stem
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):  # it ended just now
        return
    if address in finished:
        return
    if address not in live:
        live[address] = bars.add_task(address)
    bars.update(
        live[address], description=f"{address} · {state['what']}", completed=state["done"], total=state["total"]
    )
