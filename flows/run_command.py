"""Run the pipeline from the command line; Prefect is imported only if a stage is stale."""

from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from flows.dvc_commands import plan_run, push_outputs, record_outputs
from flows.status import own_traceback, print_summary, reported
from mergeflow import layout
from mergeflow.errors import MergeflowError
from tasks.project.stage import STATE
from tasks.running.progress import progress_bars
from tasks.running.runner import check_disk


def run_pipeline(
    root: Path, console: Console, push: bool = False, report: Path | None = None, metrics: Path | None = None
) -> None:
    from tasks.report import write_report

    with reported(root, report, metrics) as ran:
        ran += bring_up_to_date(root, console, push)
        if not ran:
            console.print("[bold]Nothing changed:[/] every stage is up to date.")
            # After `dvc checkout` or `dvc repro` the page on disk is of other results.
            write_report(root, root / layout.REPORT)
            if push:
                push_outputs(root)
        print_summary(root, console)


def bring_up_to_date(root: Path, console: Console, push: bool = False, targets: list[str] | None = None) -> list[str]:
    """Run the stale stages and show the progress; return the addresses of the submitted stages.

    DVC is asked first; when nothing is stale, Prefect is not even imported. Otherwise the flow runs against the
    server of PREFECT_API_URL, or one inside this process.
    """
    say = partial(console.print, highlight=False, markup=False)
    params, stages, todo = plan_run(root, push, targets, say)
    if todo:
        if params.run.device != "cpu":
            from tasks.memory import print_device_memory  # torch comes with it

            print_device_memory(root, params, todo, console)
        console.print(f"[bold]{len(todo)} of {len(stages)} stages to run[/] (starting Prefect)", highlight=False)
        _run_flow(root, console, todo, push, targets)
    else:
        record_outputs(root, [])  # a stage that this run does not ask for may have other code than dvc.lock says
    return todo


def _run_flow(root: Path, console: Console, todo: list[str], push: bool, targets: list[str] | None) -> None:
    from flows.ephemeral_server import embedded_server
    from flows.pipeline import pipeline
    from flows.signals import stoppable

    home = root / STATE / "prefect"
    try:
        with stoppable(), embedded_server(home), progress_bars(root, todo, console):
            pipeline(str(root), push=push, targets=targets)
    except MergeflowError:
        raise
    except Exception as error:
        check_disk(error, root, home)
        trace = own_traceback(error)
        if trace is None:
            raise
        typer.echo(trace, err=True)  # the stage's own, without the frames of Prefect and the command line
        raise typer.Exit(1) from None
