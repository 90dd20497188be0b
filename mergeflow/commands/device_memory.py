"""What a command will take of a device's memory, printed before it starts."""

from rich.console import Console
from rich.table import Table

from mergeflow.memory import Forecast
from mergeflow.merging.device_memory import in_bytes


def print_forecast(forecast: Forecast, console: Console | None = None) -> None:
    """Print what will be taken, and refuse what cannot fit."""
    if forecast.works:
        (console or Console()).print(memory_table(forecast))
        forecast.refuse()


def memory_table(forecast: Forecast) -> Table:
    """Return a table of the work on the device, a column each, and of the memory that it takes."""
    free = "" if forecast.free is None else f", {in_bytes(forecast.free)} free"
    table = Table(title=f"Memory of {forecast.devices}{free}", box=None, title_justify="left", pad_edge=False)
    table.add_column("")
    for work in forecast.works:
        table.add_column(work.name, justify="right")
    parts = [work.need.parts() for work in forecast.works]
    for name in parts[0]:
        if any(row[name] for row in parts):
            table.add_row(name, *(in_bytes(row[name]) if row[name] else "–" for row in parts))
    rows = [work.need.rows for work in forecast.works]
    if any(rows):
        each = [in_bytes(row["activations"] / count) if count else "–" for row, count in zip(parts, rows, strict=True)]
        table.add_row("examples at once", *(str(count or "–") for count in rows))
        table.add_row("activations of one", *each)
    table.add_row("[bold]peak[/]", *(f"[bold]{in_bytes(work.need.total)}[/]" for work in forecast.works))
    return table
