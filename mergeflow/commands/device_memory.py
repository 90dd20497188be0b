"""What a command will take of a device's memory, printed before it starts."""

from rich.console import Console
from rich.table import Table

from mergeflow.memory import Forecast
from mergeflow.merging.device_memory import in_bytes


def tell(found: Forecast, console: Console | None = None) -> None:
    """Print what will be taken, and refuse what cannot fit.

    Args:
        found: the forecast; one without work is passed over.

    Raises:
        MergeflowError: naming the setting with which it would fit.
    """
    if found.works:
        (console or Console()).print(memory_table(found))
        found.refuse()


def memory_table(found: Forecast) -> Table:
    """Return what is done on the device, a column each, with what takes its memory."""
    free = "" if found.free is None else f", {in_bytes(found.free)} free"
    table = Table(title=f"Memory of {found.devices}{free}", box=None, title_justify="left", pad_edge=False)
    table.add_column("")
    for work in found.works:
        table.add_column(work.name, justify="right")
    parts = [work.need.parts() for work in found.works]
    for name in parts[0]:
        if any(one[name] for one in parts):
            table.add_row(name, *(in_bytes(one[name]) if one[name] else "–" for one in parts))
    rows = [work.need.rows for work in found.works]
    if any(rows):
        each = [in_bytes(one["activations"] / count) if count else "–" for one, count in zip(parts, rows, strict=True)]
        table.add_row("examples at once", *(str(count or "–") for count in rows))
        table.add_row("activations of one", *each)
    table.add_row("[bold]peak[/]", *(f"[bold]{in_bytes(work.need.total)}[/]" for work in found.works))
    return table
