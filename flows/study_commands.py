"""`mergeflow study`: run a paper's experiment with all it needs, log it, print what was found."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from mergeflow.errors import MergeflowError, unknown_name

if TYPE_CHECKING:
    from tasks.project.studies import Study
    from tasks.studies.results import StudyResult, Table


_COLOURS = {"holds": "green", "does not hold": "yellow", "undecided": "cyan"}


def add_commands(app: typer.Typer, root: Path) -> None:
    """Add `study` for the project folder `root`."""

    @app.command("study")
    def study(
        names: Annotated[
            list[str] | None, typer.Argument(help="Studies, or systems of the papers such as M3; or `new NAME`.")
        ] = None,
        everything: Annotated[bool, typer.Option("--all", help="Every study.")] = False,
        document: Annotated[bool, typer.Option(help="Write the studies' pages in docs/studies.")] = False,
        rows: Annotated[
            Path | None, typer.Option(help="Write the study's raw rows into this new file, .csv or .parquet.")
        ] = None,
    ) -> None:
        """Run studies and the training runs they need; without a name, list them; `new NAME` writes a new one."""
        if names and names[0] == "new":
            make_study(root, names[1:])
            return
        write_graphs(root)
        found = find_studies(root)
        if rows:
            check_rows_file(rows, names or [])
        chosen = list(found.values()) if everything else [find_study(name, found) for name in names or []]
        if chosen:
            run_studies(root, list(dict.fromkeys(chosen)), document, Console())
            if rows:
                write_rows(chosen[0], rows)
        else:
            Console().print(_list(found))


def make_study(root: Path, names: list[str]) -> None:
    """Write the files of one new study in the project's folder `studies`.

    Raises:
        MergeflowError: none or several names, or as `new_study`.
    """
    from tasks.project.new_study import new_study

    if len(names) != 1:
        raise MergeflowError("`mergeflow study new` takes one name: mergeflow study new my_study")
    folder = new_study(root, names[0])
    typer.echo(f"Made {folder.relative_to(root)}. Next: edit it and studies/params.yaml; mergeflow study {names[0]}")


def check_rows_file(path: Path, names: list[str]) -> None:
    """Refuse, before anything runs, a file that `--rows` cannot write.

    Raises:
        MergeflowError: none or several studies, an unknown ending, a file that exists, a folder that does not.
    """
    if len(names) != 1:
        raise MergeflowError("`--rows` takes one study: mergeflow study NAME --rows FILE.csv")
    if path.suffix not in {".csv", ".parquet"}:
        raise MergeflowError(f"--rows {path}: rows are written as .csv or .parquet. Name such a file.")
    if path.exists() or not path.parent.is_dir():
        found = "the file exists already" if path.exists() else f"there is no folder {path.parent}"
        raise MergeflowError(f"--rows {path}: {found}. Name a new file in an existing folder.")


def write_rows(study: "Study", path: Path) -> None:
    """Write a study's raw rows, one per seed, task and setting.

    Args:
        study: one that has run.
        path: a new file, .csv or .parquet.

    Raises:
        MergeflowError: the study keeps no rows.
    """
    from pyarrow import csv, parquet

    from tasks.studies.results import ROWS

    kept = study.folder / ROWS
    if not kept.exists():
        raise MergeflowError(
            f"study {study.stage.name} keeps no raw rows; its tables are in {study.folder}/result.json."
        )
    table = parquet.read_table(kept)
    with open(path, "xb") as file:
        csv.write_csv(table, file) if path.suffix == ".csv" else parquet.write_table(table, file)
    typer.echo(f"Wrote {table.num_rows} rows to {path}.")


def write_graphs(root: Path) -> None:
    """Write studies/dvc.yaml of every project whose choices name other studies than it has.

    Raises:
        MergeflowError: what is wrong in the choices.
    """
    from tasks.project.study_graph import names_differ, write_study_graph

    for folder in _projects(root):
        if names_differ(folder):
            write_study_graph(folder)


def _projects(root: Path) -> list[Path]:
    from mergeflow.application import find_project

    return [root, *sorted(path for path in root.glob("worlds/*") if find_project(path) == path)]


def find_studies(root: Path) -> dict[str, "Study"]:
    """Return the studies of the project `root` and of the projects in its folder `worlds`, by name.

    A name that is taken already gets its world's name before it.
    """
    from tasks.project.graph import load_graph
    from tasks.project.studies import Study

    found: dict[str, Study] = {}
    for folder in _projects(root):
        for stage in load_graph(folder, studies=True).values():
            if stage.is_study:
                found[f"{folder.name}/{stage.name}" if stage.name in found else stage.name] = Study(folder, stage)
    return found


def find_study(name: str, studies: dict[str, "Study"]) -> "Study":
    """Return the study with this name, or the one that covers this system of the papers.

    Raises:
        MergeflowError: no study has this name or covers this system.
    """
    for known, study in studies.items():
        if name == known or name.upper() in study.stage.systems:
            return study
    raise unknown_name("study", name, [*studies, *(one for study in studies.values() for one in study.stage.systems)])


def run_studies(root: Path, studies: list["Study"], document: bool, console: Console) -> None:
    """Bring studies up to date, each in its own project, log each result once in MLflow, print it.

    Args:
        root: the project folder whose docs get the pages.
        studies: of `find_studies`.
        document: write the pages.
        console: where results are shown.

    Raises:
        MergeflowError: a parameter is wrong or a stage failed.
    """
    from flows.local import bring_up_to_date
    from tasks.project.study_graph import write_study_graph

    projects = list(dict.fromkeys(study.root for study in studies))
    for project in projects:
        write_study_graph(project)
    for project in projects:
        targets = [study.stage.address for study in studies if study.root == project]
        if not bring_up_to_date(project, console, targets=targets):
            console.print("[bold]Nothing changed:[/] the studies are up to date.")
    for study in studies:
        _show(root, study, document, console)


def _show(root: Path, study: "Study", document: bool, console: Console) -> None:
    """Print a study's result, log it in the MLflow of its project, write its page if asked to."""
    from flows.lockfile import locked_stages
    from registry.store import connect
    from registry.study_log import log_study
    from tasks.studies.page import write_index, write_page
    from tasks.studies.results import StudyResult

    name, folder = study.stage.name, study.folder
    if not (folder / "result.json").exists():
        raise MergeflowError(f"study {name} left no result in {folder}.")
    result = StudyResult.read(folder)
    _print(study.text[0], result, console)
    locked = locked_stages(study.root, study.stage.file).get(name, {})
    log_study(connect(project_root=study.root), name, result, folder, locked)
    console.print(f"[bold]Outputs[/]   {folder.relative_to(root)}", highlight=False)
    if document:
        console.print(f"[bold]Page[/]      {write_page(root, study).relative_to(root)}", highlight=False)
        write_index(root, find_studies(root).values())


def _print(title: str, result: "StudyResult", console: Console) -> None:
    console.print(f"\n[bold]{title}[/]", highlight=False)
    for table in result.tables:
        console.print(_rich(table))
    for finding in result.findings:
        mark = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
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


def _list(studies: dict[str, "Study"]) -> RichTable:
    drawn = RichTable("study", "systems", "question", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, study in studies.items():
        drawn.add_row(name, " ".join(study.stage.systems), study.question)
    return drawn
