"""Run the pipeline from the command line, without any server started by hand."""

import os
from pathlib import Path

from rich.console import Console

from flows.staleness import stale_stages
from flows.summary import print_summary
from flows.watch import progress_bars
from tasks.graph import downstream_closure, load_graph
from tasks.parameters import load_params


def run_pipeline(root: Path, console: Console, push: bool = False) -> None:
    """Bring the whole project up to date and print the result.

    DVC is asked first; when nothing is stale, Prefect is not even imported. Otherwise the flow runs against the
    server of PREFECT_API_URL, or an ephemeral one that lives as long as the run.

    Raises:
        MergeflowError: a parameter is wrong or a stage failed.
    """
    load_params(root / "params.yaml")
    stages = load_graph(root)
    todo = downstream_closure(stale_stages(root, stages), stages)
    lost = "register" not in todo and not _registered(root)
    if todo or lost:
        console.print(f"[bold]{len(todo) or 1} of {len(stages)} stages to run[/] (starting Prefect)", highlight=False)
        _quiet_prefect(root)
        from flows.pipeline import pipeline

        with progress_bars(root, todo or ["register"], console):
            pipeline(str(root), force_register=lost, push=push)
        from tasks.report import write_report

        write_report(root, root / "outputs" / "report.html")
    else:
        console.print("[bold]Nothing changed:[/] every stage is up to date.")
    print_summary(root, console)


def _registered(root: Path) -> bool:
    """Whether the registry that is configured now holds the version this project registered."""
    from registry.stage import is_registered

    return bool(is_registered(root))


def _quiet_prefect(root: Path) -> None:
    """Keep Prefect's own output off the terminal unless a server or a log level was chosen."""
    if "PREFECT_API_URL" in os.environ:
        return
    home = root / ".mergeflow" / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
