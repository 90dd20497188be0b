"""Print the plan of the next run with its reasons, and the results of the last one."""

import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flows.dvc_commands import (
    REGISTER,
    changes,
    registration_lost,
    writers,
)
from mergeflow import layout
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.commands.options import print_table
from mergeflow.documents import Registration, Selection, Test, read_document
from mergeflow.errors import MergeflowError, first_line, hide_passwords, without_passwords
from mergeflow.layout import CODE
from mergeflow.merging import configure
from tasks.plotting.rows import experts_behind_base, task_title
from tasks.project.files import is_free, read_yaml
from tasks.project.graph import downstream_closure, load_graph, upstream
from tasks.project.stage import STATE, Stage
from tasks.project.studies import EMBEDDED
from tasks.running.runner import failure_note, has_finished, progress_lock

SHOWN = 4  # reasons in a line


def print_status(root: Path, console: Console, studies: bool = False) -> list[str]:
    """Print which stages are stale for the present code, parameters and data, with the reason for each."""
    from tasks.project.validate_params import validate_params  # here, because `results` needs no torch

    say = partial(console.print, highlight=False, soft_wrap=True)
    validate_params(root)
    for pid, words in writers(root):
        say(f"`dvc {words.partition(' ')[2]}` (process {pid}) is at work here; what it runs now counts as stale.")
    for line in at_work(root):
        say(f"[bold]At work:[/] {line}")
    stages = load_graph(root, studies)
    causes = {address: list(reasons(entries)) for address, entries in changes(root, stages).items()}
    stale = downstream_closure(set(causes), stages)
    finished = finished_stages(root, stale, stages)
    todo = [address for address in stale if address not in finished]
    if REGISTER not in stale and registration_lost(root):
        todo, causes[REGISTER] = [*todo, REGISTER], ["the configured registry lacks this project's version"]
    if not stale and not todo:
        console.print("[bold]Nothing changed:[/] every stage is up to date.")
        return []
    say(f"[bold]{len(todo)} of {len(stages)} stages to run[/]")
    for address in todo:
        why = causes.get(address) or [f"after {above}" for above in upstream(stages[address], stages) if above in todo]
        why = [*last_failure(root, address), *why]
        more = [f"{len(why) - SHOWN} more"] if len(why) > SHOWN else []
        say(f"  {address:<26} {', '.join([*why[:SHOWN], *more])}")
    if finished:
        say(f"[bold]{len(finished)} more have finished:[/] {', '.join(finished)}. DVC records them when a run ends.")
    return todo


def finished_stages(root: Path, stale: Sequence[str], stages: dict[str, Stage]) -> list[str]:
    """List the stages that finished after DVC's last record, as a killed run leaves them."""
    finished: list[str] = []
    for address in stale:
        stage = stages[address]
        lock = root / stage.file.replace(".yaml", ".lock")
        recorded = lock.stat().st_mtime if lock.exists() else 0.0
        above = [up for up in upstream(stage, stages) if up in stale and up not in finished]
        if not above and has_finished(root, stage, since=recorded):
            finished.append(address)
    return finished


def at_work(root: Path) -> Iterator[str]:
    """Yield each stage that a run in this folder works on, with its present work and progress."""
    for path in sorted((root / STATE / "progress").glob("*.json")):
        if is_free(progress_lock(path)):
            continue  # its run was killed
        with suppress(OSError, ValueError):  # it ended just now
            progress = json.loads(path.read_text())
            yield f"{path.stem} · {progress['what']} ({progress['done']} of {progress['total']})"


def last_failure(root: Path, address: str) -> Iterator[str]:
    """Yield why a stage failed when it was last tried, if it did."""
    try:
        yield f"failed: {json.loads(failure_note(root, address).read_text())['error']},"
    except (OSError, ValueError):
        return


def reasons(entries: list[Any]) -> Iterator[str]:
    """Describe DVC's status of one stage in words.

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
    return {
        path: what
        for entry in entries
        if isinstance(entry, dict)
        for part in entry.values()
        for path, what in part.items()
    }


def _word(state: str) -> str:
    return "missing" if state == "deleted" else state


def print_summary(root: Path, console: Console) -> None:
    path = root / layout.TEST
    if not path.exists():
        raise MergeflowError(f"{path.name} is missing: run the pipeline first with `mergeflow run`.")
    test = read_document(path, Test)
    print_table(console, result_table(test))
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(f"Chosen on validation: {chosen_arguments(test)}.")
    for line in grid_ends(root):
        say(f"[bold yellow]At the end of its grid:[/] {line}")
    behind = experts_behind_base(test["rows"])
    if behind:
        figures = ", ".join(
            f"{task} ({100 * expert:.1f} against {100 * base:.1f})" for task, (expert, base) in behind.items()
        )
        say(
            f"[bold yellow]Experts no better than the base on test:[/] {figures}. Look at how they were trained: the "
            "report shows their courses.",
        )
    sources = _section(root, "tasks")
    drawn = [task for task in test["tasks"] if str(sources.get(task)).startswith(EMBEDDED)]
    if drawn:
        which = "Embedded suite" if len(drawn) == len(test["tasks"]) else f"Embedded suite ({', '.join(drawn)})"
        say(
            f"[dim]{which}: examples drawn by this project. They show mechanisms; do not compare these numbers "
            "with tables of papers.[/]",
        )
    registration = root / layout.REGISTRATION
    if registration.exists():
        _print_registration(read_document(registration, Registration), console)
    report = root / layout.REPORT
    if report.exists():
        say(f"[bold]Report[/]      {report.relative_to(root)}")


def result_table(test: Test) -> Table:
    """Return the table task × method on the locked test set: accuracy in percent, and the normalised mean."""
    rows = test["rows"]
    table = Table(title="Test accuracy in %", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("task", overflow="fold", min_width=8)
    for row in rows:
        style = "bold green" if row["name"] == test["winner"] else None
        table.add_column(row["name"].replace("_", "\n"), justify="right", style=style, min_width=5, overflow="fold")
    for task in test["tasks"]:
        table.add_row(task_title(test, task), *(f"{100 * row['accuracy'][task]:.1f}" for row in rows))
    table.add_section()
    table.add_row("mean", *(f"{100 * row['mean']:.1f}" for row in rows), style="bold")
    table.add_row("normalised", *(f"{100 * row['normalised']:.1f}" for row in rows), style="bold")
    return table


def chosen_arguments(test: Test) -> str:
    """Return the arguments that validation chose for each method, on one line."""
    chosen = [
        f"{row['name']} {', '.join(f'{name} {value}' for name, value in row['args'].items())}"
        for row in test["rows"]
        if row["args"]
    ]
    return "; ".join(chosen)


def grid_ends(root: Path) -> Iterator[str]:
    """Yield a line for each argument whose chosen value is at an end of its grid, with values to add."""
    path = root / layout.SELECTION
    if not path.exists():
        return
    grids = _section(root, "sweep")
    for method, choice in read_document(path, Selection)["methods"].items():
        for name in choice["at_grid_edge"]:
            grid = sorted(value for value in grids.get(method, {}).get(name, []) if isinstance(value, int | float))
            chosen = choice["args"][name]
            if len(grid) < 3 or chosen not in (grid[0], grid[-1]):
                continue  # the grid has changed since
            beyond = values_beyond(grid, chosen)
            halfway = [float(f"{(chosen + value) / 2:.3g}") for value in beyond]  # for a bound closer than a step
            args = choice["args"]
            more = valid_values(method, args, name, beyond) or valid_values(method, args, name, halfway)
            advice = f"; add {', '.join(map(str, more))} to sweep.{method}.{name}" if more else ""
            yield f"{method} {name} {chosen} of {grid[0]} … {grid[-1]}{advice}"


def _section(root: Path, name: str) -> dict[str, Any]:
    """Return a section of params.yaml, which may have been changed since the run; nothing where there is none."""
    values = read_yaml(root / "params.yaml")
    section = values.get(name) if isinstance(values, dict) else None
    return section if isinstance(section, dict) else {}


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


def valid_values(method: str, args: Mapping[str, Any], name: str, values: Sequence[float]) -> list[float]:
    """Return those values of an argument that a method takes, with the other arguments as they are."""
    valid = []
    for value in values:
        with suppress(MergeflowError):
            configure(method, {**args, name: value})
            valid.append(value)
    return valid


def _print_registration(registration: Registration, console: Console) -> None:
    """Print what the run registered, as it was then; people may have promoted another version since."""
    names = ", ".join(f"@{alias}" for alias in registration["aliases"])
    alias = f"as {names}" if names else "without an alias"
    version = f"{registration['model']} version {registration['version']}"
    text = f"[bold]Registered[/]  {version} {alias}, method {registration['method']}"
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(text)
    decision = registration["decision"]
    if decision and not decision["promote"]:
        over = f" over version {registration['champion']}" if registration["champion"] else ""
        say(f"[bold]The run did not promote it[/]{over}:")
        for reason in decision["reasons"]:
            say(f"  · {reason}")


NOTHING, CHAMPION, REFUSED, DONE, FAILED = "Nothing to do", "New champion", "Refused", "Done", "Failed"


def outcome(root: Path, ran: list[str]) -> str:
    """Name the outcome of a run."""
    if not ran:
        return NOTHING
    if REGISTER not in ran:
        return DONE
    decision = read_document(root / layout.REGISTRATION, Registration)["decision"]
    return DONE if decision is None else CHAMPION if decision["promote"] else REFUSED


def outcome_of(promoted: bool, refused: bool) -> str:
    return CHAMPION if promoted else REFUSED if refused else NOTHING


@contextmanager
def reported(root: Path, file: Path | None, metrics: Path | None = None) -> Iterator[list[str]]:
    """Write files about the run in the block, however it ends; the block fills in the stages that ran."""
    started, ran = time.time(), list[str]()
    report: dict[str, Any] = {"project": root.name, "started": started, "stages": ran}
    try:
        yield ran
        report |= {"outcome": outcome(root, ran), "error": None}
    except BaseException as error:
        status = getattr(error, "exit_code", None)  # of a stage's fault, whose traceback has been printed
        message = without_passwords(first_line(error)) if status is None else f"exit status {status}"
        report |= {"outcome": FAILED, "error": message}
        raise
    finally:
        report |= {"seconds": round(time.time() - started, 3), "failed": _failures(root, started)}
        report |= _registered(root)
        if file is not None:
            write_atomically(file, json.dumps(report, indent=1))
        if metrics is not None:
            write_metrics(root, report, metrics)


def write_metrics(root: Path, report: Mapping[str, Any], file: Path) -> None:
    """Write the figures of a run's report and the seconds of its stages, for Prometheus's textfile collector."""
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()

    def gauge(name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"mergeflow_{name}", about, ("project", *labels), registry=registry)

    project = report["project"]
    gauge("run_start_timestamp_seconds", "When the last run started.").labels(project).set(report["started"])
    gauge("run_duration_seconds", "How long the last run took.").labels(project).set(report["seconds"])
    gauge("run_failed_stages", "Stages that failed in the last run.").labels(project).set(len(report["failed"]))
    outcomes = gauge("run_outcome", "1 for what came of the last run.", "outcome")
    for word in (NOTHING, CHAMPION, REFUSED, DONE, FAILED):
        outcomes.labels(project, word).set(word == report["outcome"])
    champion = gauge("champion_version", "The champion after the last registration.", "model")
    if report["champion"] is not None:
        champion.labels(project, report["model"]).set(int(report["champion"]))
    seconds = gauge("stage_duration_seconds", "How long the stage took when it was last run.", "stage")
    for path in sorted((root / STATE / "records").glob("*.json")):
        record = json.loads(path.read_text())
        seconds.labels(project, record["stage"]).set(record["seconds"])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(file), registry)


def _registered(root: Path) -> dict[str, Any]:
    path = root / layout.REGISTRATION
    registered: Mapping[str, Any] = read_document(path, Registration) if path.exists() else {}
    facts = {key: registered.get(key) for key in ("model", "version", "champion")}
    return facts | {"reasons": (registered.get("decision") or {}).get("reasons", [])}


def _failures(root: Path, since: float) -> dict[str, str]:
    notes = (root / STATE / "failed").glob("*.json")
    return {path.stem: json.loads(path.read_text())["error"] for path in sorted(notes) if path.stat().st_mtime >= since}


def publish_report(root: Path) -> None:
    """Write `outputs/report.html` where there are results, and log it in the version's run where it is registered."""
    results, registration = root / layout.TEST, root / layout.REGISTRATION
    if not results.exists():
        return
    from tasks.report import write_report

    report = write_report(root, root / layout.REPORT)
    if not registration.exists() or registration_lost(root):
        return
    from registry.logging import log_file
    from registry.store import connect
    from registry.versions import find_version

    registered = read_document(registration, Registration)
    store = connect(project_root=root)
    version = find_version(store, registered["model"], registered["version"])
    if version.run_id:
        log_file(store, version.run_id, report)


def keep_traceback(error: BaseException) -> None:
    """Attach the traceback as a note to an error that bad input did not cause: notes survive between processes.

    The error is Prefect's to log afterwards, so its secrets are hidden.
    """
    hide_passwords(error)
    if not isinstance(error, MergeflowError):
        error.add_note(without_passwords("".join(traceback.format_exception(error))))


def own_traceback(error: BaseException) -> str | None:
    """Return the traceback that `keep_traceback` attached to an error; None if it did not come through it."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes[-1] if notes else None
