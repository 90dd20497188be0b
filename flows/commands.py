"""The project's commands, which `mergeflow` offers inside a project folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mergeflow import layout

if TYPE_CHECKING:
    from mergeflow.search.sweep import SweepResult


def new(
    folder: Annotated[Path, typer.Argument(help="The project folder to make; its name is the project's.")],
    modality: Annotated[
        str, typer.Option(help="What the models are: vision, text, causal, toy or another modality.")
    ] = "vision",
    world: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Real data: real-texts, real-pictures, real-books or real-ocr (`mergeflow docs real-data`).",
        ),
    ] = None,
) -> None:
    """Make a new project: a folder of choices that runs as it is. No code is copied."""
    from tasks.project.new import new_project

    made = new_project(Path.cwd() / folder, modality, world)
    then = "python inputs/make.py" if world else "edit params.yaml"
    last = "mergeflow run" if (made / "params.yaml").exists() else "mergeflow sweep sweep.yaml"
    typer.echo(f"Made {made}. Next: cd {folder}; {then}; {last}")


def add_commands(app: typer.Typer, root: Path) -> None:
    _add_accept(app, root)
    _add_release(app)
    _add_stages(app, root)
    _add_results(app, root)
    app.command("new")(new)

    @app.command("run")
    def run(
        push: Annotated[bool, typer.Option(help="Send the outputs to DVC's remote at the end.")] = False,
        report: Annotated[Path | None, typer.Option(help="Write the outcome of the run to this JSON file.")] = None,
        metrics: Annotated[
            Path | None, typer.Option(help="Write it for Prometheus's textfile collector too, as NAME.prom.")
        ] = None,
    ) -> None:
        """Run the pipeline: every stage that is stale, through Prefect; then print the result."""
        from flows.run_command import run_pipeline

        run_pipeline(root, Console(), push, report and report.resolve(), metrics and metrics.resolve())

    @app.command("status")
    def status(
        studies: Annotated[bool, typer.Option(help="Include the studies.")] = False,
    ) -> None:
        """Print which stages are stale for the code, parameters and data as they are now, and why."""
        from flows.status import print_status

        print_status(root, Console(), studies)


def _add_results(app: typer.Typer, root: Path) -> None:
    @app.command("results")
    def results() -> None:
        """Print the result table, the registered model and the path of the report."""
        from flows.status import print_summary

        print_summary(root, Console())

    @app.command("report")
    def report() -> None:
        """Write the HTML report again from the pipeline's results."""
        from tasks.report import write_report

        typer.echo(write_report(root, root / layout.REPORT))


def _add_stages(app: typer.Typer, root: Path) -> None:
    stages = typer.Typer(help="The stages of dvc.yaml, one at a time.", no_args_is_help=True)
    app.add_typer(stages, name="stage")

    @stages.command("run")
    def stage_run(
        name: Annotated[str, typer.Argument(help="A stage of dvc.yaml.")],
        item: Annotated[str | None, typer.Option(help="The item of a stage that is repeated.")] = None,
        force: Annotated[bool, typer.Option(help="Run even if nothing changed.")] = False,
    ) -> None:
        """Run one stage; it is skipped when its inputs, parameters and outputs are unchanged."""
        from tasks.project.graph import find_stage, load_graph
        from tasks.running.progress import progress_bars
        from tasks.running.runner import run_stage

        stage = find_stage(load_graph(root, studies=True), name, item)
        console = Console()
        with progress_bars(root, [stage.address], console):
            ran = run_stage(root, stage, force)
        if not ran:
            console.print(f"  [dim]= {stage.address} is up to date[/]", highlight=False)

    @stages.command("digests")
    def stage_digests() -> None:
        """Write the digest of the code that each stage depends on, for DVC."""
        from tasks.running.digests import write_digests

        write_digests(root)

    @stages.command("list")
    def stage_list() -> None:
        """List the stages in running order."""
        from tasks.project.graph import load_graph

        for address, stage in load_graph(root).items():
            typer.echo(f"{address}{'  (frozen)' if stage.frozen else ''}")


def _add_accept(app: typer.Typer, root: Path) -> None:
    @app.command("accept")
    def accept(
        stages: Annotated[list[str], typer.Argument(metavar="STAGE", help="A stage, or one of its items: sweep@ties.")],
        because: Annotated[str, typer.Option(metavar="TEXT", help="Why its outputs need not be made again.")],
        who: Annotated[str, typer.Option(help="Who decided; by default the user of this machine.")] = "",
    ) -> None:
        """Accept outputs of older code as up to date; the lineage records who decided it and why."""
        from flows.dvc_commands import accept_outputs

        accepted = accept_outputs(root, stages, because, who)
        lines = [f"{stage}: its outputs, of code {code}, count as they are." for stage, code in accepted.items()]
        typer.echo("\n".join(lines) or "The code of these stages has not changed.")


def _add_release(app: typer.Typer) -> None:
    release = typer.Typer(help="Compare a new release with the one before.", no_args_is_help=True)
    app.add_typer(release, name="release")

    @release.command("check")
    def check(
        older: Annotated[Path, typer.Argument(help="The previous release: its wheel, or a checkout.")],
        project: Annotated[
            list[Path] | None,
            typer.Option(help="A project that both run, in addition to small ones of numbers; repeatable."),
        ] = None,
        write: Annotated[bool, typer.Option(help="Add equal stages to the table that the release carries.")] = False,
    ) -> None:
        """Run small projects by the previous release and by this code, and compare the bits that each stage makes."""
        from tempfile import TemporaryDirectory

        from tasks.running.digests import write_equivalents
        from tasks.running.release import check_release

        with TemporaryDirectory(prefix="mergeflow-release-") as folder:
            proofs = check_release(older, Path(folder), project or [])
        for proof in proofs:
            typer.echo(f"{proof.stage} {proof.older} → {proof.newer}: {'; '.join(proof.faults[:3]) or 'equal'}")
        if not proofs:
            typer.echo("The code of no stage has changed.")
        if write:
            write_equivalents({proof.newer: proof.older for proof in proofs if not proof.faults})


def log_sweep(root: Path, result: "SweepResult") -> str:
    """Log a finished sweep in the project's MLflow; return what to print."""
    from registry import logging
    from registry.store import connect

    run_id = logging.log_sweep(connect(project_root=root), result.folder.name, result.rows(), result.folder)
    return f"Logged in MLflow as run {run_id}."
