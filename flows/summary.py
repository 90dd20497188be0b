"""Prints the end of a run: the result table, the registered model, the path of the report."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from mergeflow import layout
from mergeflow.documents import Registration, Test, read_registration, read_test
from mergeflow.errors import MergeflowError
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
    behind = experts_behind_base(test["rows"])
    if behind:
        told = ", ".join(f"{task} ({100 * own:.1f} against {100 * base:.1f})" for task, (own, base) in behind.items())
        console.print(
            f"[bold yellow]Experts worse than the base on test:[/] {told}. Look at how they were trained: the report "
            "shows their courses.",
            highlight=False,
            soft_wrap=True,
        )
    sources = read_yaml(root / "params.yaml")["tasks"]
    if any(source.startswith(EMBEDDED) for source in sources.values()):
        console.print(
            "[dim]Embedded suite: examples drawn by this project. It shows mechanisms; do not compare these numbers "
            "with tables of papers.[/]"
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


def _print_registration(found: Registration, console: Console) -> None:
    """Print what the run registered, as it was then; people may have promoted another version since."""
    names = ", ".join(f"@{alias}" for alias in found["aliases"])
    alias = f"as {names}" if names else "without an alias"
    text = f"[bold]Registered[/]  {found['model']} version {found['version']} {alias}, method {found['method']}"
    console.print(text, highlight=False, soft_wrap=True)
    decision = found["decision"]
    if decision and not decision["promote"]:
        over = f" over version {found['champion']}" if found["champion"] else ""
        console.print(f"[bold]Not promoted then[/]{over}:", highlight=False)
        for reason in decision["reasons"]:
            console.print(f"  · {reason}", highlight=False, soft_wrap=True)
