"""Prints the end of a run: the result table, the registered model, the path of the report."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mergeflow import layout
from mergeflow.documents import Registration, Test, read_registration, read_selection, read_test
from mergeflow.errors import MergeflowError
from mergeflow.merging import configure
from tasks.plotting.rows import experts_behind_base, task_title
from tasks.project.files import read_yaml
from tasks.project.studies import EMBEDDED


def print_summary(root: Path, console: Console) -> None:
    """Print what the pipeline found.

    Raises:
        MergeflowError: the pipeline has not run yet.
    """
    path = root / layout.TEST
    if not path.exists():
        raise MergeflowError(f"{path.name} is missing: run the pipeline first with `mergeflow run`.")
    test = read_test(path)
    console.print(result_table(test))
    console.print(f"Chosen on validation: {chosen_arguments(test)}.", highlight=False)
    for line in grid_ends(root):
        console.print(f"[bold yellow]At the end of its grid:[/] {line}", highlight=False, soft_wrap=True)
    behind = experts_behind_base(test["rows"])
    if behind:
        figures = ", ".join(
            f"{task} ({100 * expert:.1f} against {100 * base:.1f})" for task, (expert, base) in behind.items()
        )
        console.print(
            f"[bold yellow]Experts worse than the base on test:[/] {figures}. Look at how they were trained: the "
            "report shows their courses.",
            highlight=False,
            soft_wrap=True,
        )
    sources = read_yaml(root / "params.yaml")["tasks"]
    drawn = [task for task in test["tasks"] if str(sources.get(task)).startswith(EMBEDDED)]
    if drawn:
        which = "Embedded suite" if len(drawn) == len(test["tasks"]) else f"Embedded suite ({', '.join(drawn)})"
        console.print(
            f"[dim]{which}: examples drawn by this project. They show mechanisms; do not compare these numbers "
            "with tables of papers.[/]",
            highlight=False,
            soft_wrap=True,
        )
    registration = root / layout.REGISTRATION
    if registration.exists():
        _print_registration(read_registration(registration), console)
    report = root / layout.REPORT
    if report.exists():
        console.print(f"[bold]Report[/]      {report.relative_to(root)}", highlight=False, soft_wrap=True)


def result_table(test: Test) -> Table:
    """Return the table task × method on the locked test set: accuracy in percent, and the normalised mean."""
    rows = test["rows"]
    table = Table(title="Test accuracy in %", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("task", no_wrap=True)
    for row in rows:
        style = "bold green" if row["name"] == test["winner"] else None
        table.add_column(row["name"].replace("_", "\n"), justify="right", style=style, no_wrap=True)
    for task in test["tasks"]:
        table.add_row(task_title(test, task), *(f"{100 * row['accuracy'][task]:.1f}" for row in rows))
    table.add_section()
    table.add_row("mean", *(f"{100 * row['mean']:.1f}" for row in rows), style="bold")
    table.add_row("normalised", *(f"{100 * row['normalised']:.1f}" for row in rows), style="bold")
    return table


def chosen_arguments(test: Test) -> str:
    """Return what validation chose for each method, on one line."""
    chosen = [
        f"{row['name']} {', '.join(f'{name} {value}' for name, value in row['args'].items())}"
        for row in test["rows"]
        if row["args"]
    ]
    return "; ".join(chosen)


def grid_ends(root: Path) -> Iterator[str]:
    """Yield a line for each argument whose chosen value is at an end of its grid, with values to add.

    Args:
        root: the project folder, whose `select` has run.
    """
    path = root / layout.SELECTION
    if not path.exists():
        return
    grids = read_yaml(root / "params.yaml")["sweep"]
    for method, choice in read_selection(path)["methods"].items():
        for name in choice["at_grid_edge"]:
            grid = sorted(value for value in grids.get(method, {}).get(name, []) if isinstance(value, int | float))
            chosen = choice["args"][name]
            if len(grid) < 3 or chosen not in (grid[0], grid[-1]):
                continue  # the grid has changed since
            more = [value for value in values_beyond(grid, chosen) if is_valid(method, choice["args"] | {name: value})]
            advice = f"; add {', '.join(map(str, more))} to sweep.{method}.{name}" if more else ""
            yield f"{method} {name} {chosen} of {grid[0]} … {grid[-1]}{advice}"


def values_beyond(grid: Sequence[float], chosen: float) -> list[float]:
    """Continue a sorted grid by two values beyond the end that was chosen.

    Steps are repeated where the grid has equal ones, else ratios. Grids of positive numbers stay positive.

    Example:
        >>> values_beyond([0.1, 0.2, 0.3, 0.4], 0.4), values_beyond([1.0, 2.0, 4.0], 1.0)
        ([0.5, 0.6], [0.25, 0.5])
    """
    end, inner = (grid[-1], grid[-2]) if chosen == grid[-1] else (grid[0], grid[1])
    step, positive = end - inner, grid[0] > 0
    equal = all(abs((b - a) - (grid[1] - grid[0])) < 1e-9 for a, b in pairwise(grid))
    added = [end + step, end + 2 * step] if equal or not positive else [end * end / inner, end * (end / inner) ** 2]
    return sorted(float(f"{value:.3g}") for value in added if value > 1e-9 or not positive)


def is_valid(method: str, args: Mapping[str, Any]) -> bool:
    """Return whether a method takes these arguments."""
    try:
        configure(method, dict(args))
    except MergeflowError:
        return False
    return True


def _print_registration(registration: Registration, console: Console) -> None:
    """Print what the run registered, as it was then; people may have promoted another version since."""
    names = ", ".join(f"@{alias}" for alias in registration["aliases"])
    alias = f"as {names}" if names else "without an alias"
    version = f"{registration['model']} version {registration['version']}"
    text = f"[bold]Registered[/]  {version} {alias}, method {registration['method']}"
    console.print(text, highlight=False, soft_wrap=True)
    decision = registration["decision"]
    if decision and not decision["promote"]:
        over = f" over version {registration['champion']}" if registration["champion"] else ""
        console.print(f"[bold]Not promoted then[/]{over}:", highlight=False)
        for reason in decision["reasons"]:
            console.print(f"  · {reason}", highlight=False, soft_wrap=True)
