"""`mergeflow study`: run a paper's experiment with all it needs, log it, print what was found."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from mergeflow.errors import MergeflowError, unknown_name

if TYPE_CHECKING:
    from tasks.project.stage import Stage
    from tasks.studies.results import StudyResult, Table


def add_commands(app: typer.Typer, root: Path) -> None:
    """Add `study` for the project folder `root`."""

    @app.command("study")
    def study(
        names: Annotated[list[str] | None, typer.Argument(help="Studies, or systems of the papers such as M3.")] = None,
        everything: Annotated[bool, typer.Option("--all", help="Every study.")] = False,
        document: Annotated[bool, typer.Option(help="Write the studies' pages in docs/studies.")] = False,
    ) -> None:
        """Run studies and the training runs they need; without a name, list them."""
        found = study_stages(root)
        chosen = list(found.values()) if everything else [find_study(name, found) for name in names or []]
        if chosen:
            run_studies(root, list(dict.fromkeys(chosen)), document, Console())
        else:
            Console().print(_list(root, found))


def study_stages(root: Path) -> dict[str, "Stage"]:
    """Return the studies' stages by name, without what they share."""
    from tasks.project.graph import load_graph

    return {stage.name: stage for stage in load_graph(root, studies=True).values() if stage.systems}


def find_study(name: str, studies: dict[str, "Stage"]) -> "Stage":
    """Return the study with this name, or the one that covers this system of the papers."""
    for stage in studies.values():
        if name == stage.name or name.upper() in stage.systems:
            return stage
    raise unknown_name("study", name, [*studies, *(system for stage in studies.values() for system in stage.systems)])


def run_studies(root: Path, stages: list["Stage"], document: bool, console: Console) -> None:
    """Bring the studies up to date, log each result once in MLflow, print it.

    Raises:
        MergeflowError: a parameter is wrong or a stage failed.
    """
    from flows.local import bring_up_to_date
    from registry.store import connect
    from registry.study_log import log_study
    from tasks.project.parameters import load_params, load_study_params
    from tasks.project.study_options import check_study_options
    from tasks.studies.page import study_text, write_index, write_page
    from tasks.studies.results import StudyResult

    check_study_options(root, load_study_params(root, load_params(root / "params.yaml")))
    if not bring_up_to_date(root, console, targets=[stage.address for stage in stages]):
        console.print("[bold]Nothing changed:[/] the studies are up to date.")
    for stage in stages:
        folder = root / stage.outs[0]
        if not (folder / "result.json").exists():
            raise MergeflowError(f"study {stage.name} left no result in {stage.outs[0]}.")
        result = StudyResult.read(folder)
        _print(study_text(root, stage)[0], result, console)
        log_study(connect(project_root=root), stage.name, result.findings, folder)
        console.print(f"[bold]Outputs[/]   {stage.outs[0]}", highlight=False)
        if document:
            console.print(f"[bold]Page[/]      {write_page(root, stage).relative_to(root)}", highlight=False)
            write_index(root, study_stages(root).values())


def _print(title: str, result: "StudyResult", console: Console) -> None:
    console.print(f"\n[bold]{title}[/]", highlight=False)
    for table in result.tables:
        console.print(_rich(table))
    for finding in result.findings:
        mark = "[green]holds[/]" if finding.holds else "[yellow]does not hold here[/]"
        console.print(f"{finding.system}  {mark}  {finding.claim}\n      {finding.measured}", highlight=False)
    for note in result.notes:
        console.print(f"[dim]{note}[/]", highlight=False)


def _rich(table: "Table") -> RichTable:
    drawn = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name, value in table.rows[0].items():
        drawn.add_column(name, justify="left" if isinstance(value, str) and value[:1].isalpha() else "right")
    for row in table.rows:
        drawn.add_row(*("" if cell is None else str(cell) for cell in row.values()))
    return drawn


def _list(root: Path, studies: dict[str, "Stage"]) -> RichTable:
    from tasks.studies.page import study_text

    drawn = RichTable("study", "systems", "question", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, stage in studies.items():
        drawn.add_row(name, " ".join(stage.systems), study_text(root, stage)[0].partition(": ")[2])
    return drawn
