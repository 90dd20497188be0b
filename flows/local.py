"""Run the pipeline from the command line, without any server started by hand."""

from pathlib import Path

import typer
from rich.console import Console

from flows.choices import read_choices
from flows.device_memory import tell_device_memory
from flows.dvc_process import wait_for_dvc
from flows.faults import own_traceback
from flows.orphans import remove_orphans
from flows.outcome import reported
from flows.plan import REGISTER, are_results_wanted, registration_lost, stages_to_run
from flows.staleness import push_outputs, record_outputs
from flows.summary import print_summary
from flows.watch import progress_bars
from mergeflow import layout
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.project.runner import check_disk
from tasks.project.stage import STATE


def run_pipeline(root: Path, console: Console, push: bool = False, report: Path | None = None) -> None:
    """Bring the whole project up to date and print the result.

    Args:
        root: the project folder.
        console: where progress and the result are shown.
        push: whether the outputs are sent to DVC's remote at the end.
        report: a JSON file that says what came of it, however it ends; None: none.

    Raises:
        MergeflowError: a parameter is wrong or a stage failed.
    """
    from tasks.report import write_report

    with reported(root, report) as ran:
        ran += bring_up_to_date(root, console, push)
        if not ran:
            console.print("[bold]Nothing changed:[/] every stage is up to date.")
            # After `dvc checkout` or `dvc repro` the page on disk is of other results.
            write_report(root, root / layout.REPORT)
            if push:
                push_outputs(root)
        print_summary(root, console)


def bring_up_to_date(root: Path, console: Console, push: bool = False, targets: list[str] | None = None) -> list[str]:
    """Run what is stale and show the progress; return the addresses of the stages that were submitted.

    DVC is asked first; when nothing is stale, Prefect is not even imported. Otherwise the flow runs against the
    server of PREFECT_API_URL, or one inside this process.

    Args:
        root: the project folder.
        console: where progress is shown.
        push: send the outputs to DVC's remote at the end.
        targets: only these stages and what they need, by address or name, studies too; None for all of dvc.yaml.

    Raises:
        MergeflowError: a parameter is wrong or a stage failed.
    """
    params = read_choices(root)
    wait_for_dvc(root)
    remove_orphans(root, lambda text: console.print(text, highlight=False, markup=False))
    stages = load_graph(root, studies=targets is not None)
    todo = stages_to_run(root, stages, targets)
    lost = are_results_wanted(targets, stages) and REGISTER not in todo and registration_lost(root)
    todo = todo or ([REGISTER] if lost else [])
    if todo:
        tell_device_memory(root, params, todo, console)
        console.print(f"[bold]{len(todo)} of {len(stages)} stages to run[/] (starting Prefect)", highlight=False)
        _run_flow(root, console, todo, lost, push, targets)
    else:
        record_outputs(root, [])  # a stage that this run does not ask for may have other code than dvc.lock says
    return todo


def _run_flow(
    root: Path, console: Console, todo: list[str], force_register: bool, push: bool, targets: list[str] | None
) -> None:
    from flows.embedded import embedded_server
    from flows.pipeline import pipeline
    from flows.stopping import stoppable

    home = root / STATE / "prefect"
    try:
        with stoppable(), embedded_server(home), progress_bars(root, todo, console):
            pipeline(str(root), force_register=force_register, push=push, targets=targets)
    except MergeflowError:
        raise
    except Exception as error:
        check_disk(error, root, home)
        trace = own_traceback(error)
        if trace is None:
            raise
        typer.echo(trace, err=True)  # the stage's own, without the frames of Prefect and the command line
        raise typer.Exit(1) from None
