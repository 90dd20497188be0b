"""What the commands' tables and bars show on any terminal."""

from io import StringIO

import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from mergeflow.commands.options import print_table, progress_bars


@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize("columns", [2, 5, 13])
@pytest.mark.parametrize("whole", [True, False])
def test_no_cell_is_cut_however_narrow_the_terminal(width: int, columns: int, whole: bool) -> None:
    names = [f"subspace_boosting_{index}" for index in range(columns)]
    table = Table()
    for name in names:
        table.add_column(name, no_wrap=whole)
    table.add_row(*("100.0" for _ in names))
    printed = StringIO()
    print_table(Console(file=printed, width=width), table)
    assert "…" not in printed.getvalue()
    assert printed.getvalue().count("100.0") == columns
    assert all(name in printed.getvalue() for name in names)


def test_bars_say_how_much_time_is_left() -> None:
    printed = StringIO()
    console = Console(file=printed, width=120, force_terminal=True)
    with progress_bars(console, MofNCompleteColumn()) as bars:
        bars.add_task("merge", total=10, completed=3)
    assert "merge" in printed.getvalue()
    assert "-:--:--" in printed.getvalue()  # nothing is known of the speed yet
