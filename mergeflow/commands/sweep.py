"""The command `sweep`: many recipes scored on validation."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from mergeflow.application import call, find_project
from mergeflow.commands.allocation import reuse_freed_memory
from mergeflow.commands.options import print_remarks, progress_bars

if TYPE_CHECKING:
    from mergeflow.evaluation.scoring import Score
    from mergeflow.search.sweep import SweepResult, Trial
    from mergeflow.search.sweep_file import Sweep

# Candidates of one method that the table shows, and the columns that method, arguments and summary need.
_SHOWN = 3
_COMMON_WIDTH = 74


def add_commands(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(metavar="SWEEP", help="The sweep file (YAML): what to merge, how to score, what to try."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; sweeps/NAME by default, NAME the file's.")
    ] = None,
    to_log: Annotated[bool, typer.Option("--log", help="Log all trials to the project's tracking server.")] = False,
) -> None:
    """Score many merges on validation, a grid or an Optuna search; a stopped sweep continues."""
    from mergeflow.errors import MergeflowError
    from mergeflow.search.sweep import WINNER
    from mergeflow.search.sweep_file import SourceError, load_sweep

    project = find_project(Path.cwd())
    if to_log and project is None:
        raise MergeflowError("--log needs a project's tracking server: run the command in a project folder.")
    reuse_freed_memory()
    loaded = load_sweep(file)
    console = Console()
    if not console.is_terminal:  # a file or pipe: whole names, whatever the width of the screen
        console = Console(width=160)
    try:
        result = _run(loaded, out or Path("sweeps") / file.stem, context.obj, console)
    except SourceError as error:
        raise MergeflowError(f"sweep '{file}', {error}") from None
    console.print(result_table(result, console.width))
    for line in remarks(result):
        console.print(line, highlight=False, soft_wrap=True)
    winner = result.folder / WINNER
    console.print(f"[bold]{winner}[/], for `mergeflow merge {winner}`:", highlight=False, soft_wrap=True)
    console.print(winner.read_text(), highlight=False, soft_wrap=True, markup=False)
    if to_log:
        console.print(call("flows.commands", "log_sweep", project, result), highlight=False, soft_wrap=True)


def _run(sweep: "Sweep", folder: Path, resolve: Callable[[str], str] | None, console: Console) -> "SweepResult":
    from mergeflow.search.sweep import run_sweep

    if sweep.device != "cpu":
        from mergeflow.merging.execution.device import check_device
        from mergeflow.search.forecast import estimate_sweep_memory

        check_device(sweep.device)
        estimate_sweep_memory(sweep, resolve).announce(console)
    with progress_bars(console, MofNCompleteColumn(), TimeElapsedColumn()) as bars:
        bar = bars.add_task("sweep", total=None)
        return run_sweep(
            sweep,
            folder,
            resolve=resolve,
            progress=lambda what, done, total: bars.update(bar, description=what, completed=done, total=total),
            remark=print_remarks,
        )


def result_table(result: "SweepResult", width: int) -> Table:
    """Return the best candidates of each method, the base and the experts; the winner marked, edges marked.

    Columns of tasks stand only where all fit beside the rest.
    """
    tasks = list(result.base.accuracy)
    if _COMMON_WIDTH + sum(max(len(task), 5) + 2 for task in tasks) > width:
        tasks = []
    images = result.sweep.score is None
    title = "Validation accuracy in %" if images else "Scores on validation, larger is better"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("arguments", overflow="fold", min_width=24)
    summaries = ("mean", "normalised") if images or result.individual is not None else ("mean",)
    for name in (*tasks, *summaries):
        table.add_column(name, justify="right", no_wrap=True)

    def numbers(accuracy: dict[str, float], *summary: float | None) -> list[str]:
        cells = ["-" if value is None else _number(value, images) for value in (*map(accuracy.get, tasks), summary[0])]
        if "normalised" in summaries:
            cells.append("-" if summary[1] is None else _number(summary[1], True))
        return cells

    table.add_row("base", "", *numbers(result.base.accuracy, result.base.mean, result.base.normalised), style="dim")
    if result.individual is not None:
        average = sum(result.individual.values()) / len(result.individual)
        table.add_row("experts", "", *numbers(result.individual, average, 1.0), style="dim")
    for method in result.sweep.methods:
        best = sorted((t for t in result.trials if t.method == method), key=lambda t: (-t.objective, t.number))
        table.add_section()
        for trial in _distinct(best)[:_SHOWN]:
            won = trial.number == result.winner.number
            score = trial.score
            cells = numbers(score.accuracy, score.mean, score.normalised)
            table.add_row(f"{method}{' *' * won}", arguments(trial), *cells, style="bold green" if won else None)
    return table


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}" if percent else f"{value:.4g}"


def _distinct(trials: "list[Trial]") -> "list[Trial]":
    """A search may try the same arguments again; the table shows them once."""
    distinct: dict[str, Trial] = {}
    for trial in trials:
        distinct.setdefault(repr(trial.args), trial)
    return list(distinct.values())


def arguments(trial: "Trial") -> str:
    """Return the arguments a sweep varied; those at an end of what was tried carry an exclamation mark."""
    shown = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in trial.varied.items()}
    return ", ".join(f"{name} {value}{'!' * (name in trial.edges)}" for name, value in shown.items())


def remarks(result: "SweepResult") -> list[str]:
    """Say what the table cannot: the winner by task, its score on test, and what speaks against it."""
    images = result.sweep.score is None

    def each(score: "Score") -> str:
        return ", ".join(f"{task} {_number(value, images)}" for task, value in score.accuracy.items())

    counts = f"{len(result.trials)} trials; models scored now: {result.scored}, {result.seconds:.1f} s."
    lines = [counts, f"* the winner: {each(result.winner.score)}."]
    if result.winner.score.mean <= result.base.mean:
        means = [_number(score.mean, images) for score in (result.winner.score, result.base)]
        lines.append(f"[yellow]The winner is no better than the base: mean {means[0]} against {means[1]}.[/]")
    if result.test is not None:
        lines.append(f"On test, looked at once: {each(result.test)}; mean {_number(result.test.mean, images)}.")
    if result.winner.edges:
        lines.append(
            f"[yellow]The winner is at an end of the values tried for {', '.join(result.winner.edges)} (marked !): "
            "a better value may be outside. Widen the sweep; known trials are kept.[/]"
        )
    return lines
