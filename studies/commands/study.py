"""`mergeflow study`: run a paper's experiment with all it needs, log it, print what was found."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from mergeflow.errors import MergeflowError, unknown_name

if TYPE_CHECKING:
    import pyarrow as pa

    from studies.old.results import StudyResult, Table
    from tasks.project.studies import Study


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
            Path | None,
            typer.Option(help="Run nothing: write the study's raw rows into this new file, .csv or .parquet."),
        ] = None,
        judge: Annotated[
            bool,
            typer.Option(
                help="Train nothing: judge the rows in docs/studies by today's rules, and write pages and index anew."
            ),
        ] = False,
    ) -> None:
        """Run studies and the training runs they need; without a name, list them; `new NAME` writes a new one."""
        if names and names[0] == "new":
            make_study(root, names[1:])
            return
        write_graphs(root)
        found = find_studies(root)
        chosen = [study for name in names or [] for study in find_named(name, found, root)]
        chosen = list(dict.fromkeys(found.values() if everything else chosen))
        if rows:
            if everything or document or judge:
                raise MergeflowError(
                    "`--rows` runs nothing: it takes a study alone, mergeflow study NAME --rows FILE.csv"
                )
            check_rows_file(rows, chosen)
            write_rows(chosen[0], home_of(root, chosen[0], found), rows)
        elif judge:
            judge_records(root, chosen, found)
        elif chosen:
            run_studies(root, chosen, document, Console())
        else:
            show_list(found, Console())


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
    """Return the project `root` and those in its folder `worlds`, of which those on embedded suites come first."""
    from mergeflow.application import find_project
    from tasks.project.studies import is_embedded

    worlds = [path for path in root.glob("worlds/*") if find_project(path) == path]
    return [root, *sorted(worlds, key=lambda path: (not is_embedded(path), path))]


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


def home_of(root: Path, study: "Study", every: Mapping[str, "Study"]) -> Path:
    """Return the folder whose docs have a study's page: its world's where its name is another study's in `root`.

    Args:
        root: the project folder.
        study: one of those that `every` names; its graph may have been written anew since.
        every: all studies, as of `find_studies`.
    """
    return root if every[study.stage.name].root == study.root else study.root


def listed_in(home: Path, root: Path, every: Mapping[str, "Study"]) -> list["Study"]:
    """Return the studies that the index in a folder's docs lists.

    Args:
        home: `root`, or a world.
        root: the project folder.
        every: all studies, as of `find_studies`.
    """
    return [study for study in every.values() if home_of(root, study, every) == home]


def find_named(name: str, studies: dict[str, "Study"], root: Path) -> list["Study"]:
    """Return the study with this name, or all that cover this system of the papers.

    Args:
        name: of a study or of a system.
        studies: of `find_studies`.
        root: the project folder.

    Raises:
        MergeflowError: no study has this name or covers this system.
    """
    from tasks.project.stage import CHOICES
    from tasks.project.studies import find_study_modules

    if name in studies:
        return [studies[name]]
    if covering := [study for study in studies.values() if name.upper() in study.stage.systems]:
        return covering
    if name in find_study_modules(root):
        raise MergeflowError(
            f"{CHOICES} does not choose study '{name}': give its choices there, under `studies`, as docs/extending.md "
            "shows. `mergeflow study new NAME` makes a file with one."
        )
    systems = {one for study in studies.values() for one in study.stage.systems}
    raise unknown_name("study", name, {*studies, *systems})


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
    every = find_studies(root) if document else {}  # once more: the graphs may have been written anew
    try:
        for study in studies:
            _show(root, study, home_of(root, study, every) if document else None, console)
    finally:
        if document:
            write_indexes(root, studies, every)


def write_indexes(root: Path, studies: Sequence["Study"], every: Mapping[str, "Study"]) -> None:
    """Write the index of every folder whose docs have a page of these studies.

    Args:
        root: the project folder.
        studies: whose pages were written.
        every: all studies, as of `find_studies`.
    """
    from studies.old.page import write_index

    for home in dict.fromkeys(home_of(root, study, every) for study in studies):
        write_index(home, listed_in(home, root, every))


def judge_records(root: Path, studies: Sequence["Study"], every: Mapping[str, "Study"]) -> None:
    """Judge recorded rows by today's rules, and write pages and index.

    Args:
        root: the project folder whose docs have the records.
        studies: whose records are judged.
        every: all studies, by name.

    Raises:
        MergeflowError: no study, or one without a record whose rows tell all; studies before it are written.
    """
    from studies.old.judging.again import judge_again

    if not studies:
        raise MergeflowError("`--judge` takes studies: mergeflow study NAME --judge")
    try:
        for study in studies:
            page = judge_again(home_of(root, study, every), study, date.today().isoformat())
            typer.echo(f"Judged {study.stage.name}; page {page.relative_to(root)}")
    finally:
        write_indexes(root, studies, every)


def _show(root: Path, study: "Study", home: Path | None, console: Console) -> None:
    """Print a study's result, log it in the MLflow of its project, write its page in the docs of `home`, if given."""
    from flows.lockfile import locked_stages
    from registry.store import connect
    from registry.study_log import log_study
    from studies.old.page import write_page
    from studies.old.results import StudyResult

    name, folder = study.stage.name, study.folder
    if not (folder / "result.json").exists():
        raise MergeflowError(f"study {name} left no result in {folder}.")
    result = StudyResult.read(folder)
    _print(study.text[0], result, console)
    locked = locked_stages(study.root, study.stage.file).get(name, {})
    log_study(connect(project_root=study.root), name, result, folder, locked)
    console.print(f"[bold]Outputs[/]   {folder.relative_to(root)}", highlight=False)
    if home:
        console.print(f"[bold]Page[/]      {write_page(home, study).relative_to(root)}", highlight=False)


def _print(title: str, result: "StudyResult", console: Console) -> None:
    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    for table in result.tables:
        console.print(_rich(table) if table.rows else f"{escape(table.title)}: no rows")
    for finding in result.findings:
        mark = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        said = escape(f"{finding.claim}\n      {finding.measured}")
        console.print(f"{escape(finding.system)}  {mark}  {said}", highlight=False)
    for note in result.notes:
        console.print(f"[dim]{escape(note)}[/]", highlight=False)


def _rich(table: "Table") -> RichTable:
    drawn = RichTable(title=escape(table.title), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    columns = table.rows[0]
    for name, value in columns.items():
        drawn.add_column(escape(name), justify="left" if isinstance(value, str) and value[:1].isalpha() else "right")
    for row in table.rows:
        drawn.add_row(*("" if row[name] is None else escape(str(row[name])) for name in columns))
    return drawn


def show_list(studies: dict[str, "Study"], console: Console) -> None:
    """Print the studies that there are; where there are none, how to get one."""
    drawn = RichTable("study", "systems", "question", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, study in studies.items():
        drawn.add_row(name, " ".join(study.stage.systems), escape(study.question))
    console.print(drawn)
    if not studies:
        console.print("No study is chosen here. `mergeflow study new NAME` makes one of your own.", highlight=False)


def check_rows_file(path: Path, studies: Sequence["Study"]) -> None:
    """Refuse a file that `--rows` cannot write.

    Args:
        path: the file.
        studies: whose rows are asked for.

    Raises:
        MergeflowError: none or several studies, an unknown ending, a file that exists, a folder that does not or where
            nothing may be written.
    """
    if len(studies) != 1:
        found = ", ".join(study.stage.name for study in studies) or "none"
        raise MergeflowError(f"`--rows` takes one study, found {found}: mergeflow study NAME --rows FILE.csv")
    if path.suffix not in {".csv", ".parquet"}:
        raise MergeflowError(f"--rows {path}: rows are written as .csv or .parquet. Name such a file.")
    if path.exists() or not path.parent.is_dir():
        found = "the file exists already" if path.exists() else f"there is no folder {path.parent}"
        raise MergeflowError(f"--rows {path}: {found}. Name a new file in an existing folder.")
    if not os.access(path.parent, os.W_OK):
        raise MergeflowError(f"--rows {path}: nothing may be written in {path.parent}. Name a file in another folder.")


def write_rows(study: "Study", home: Path, path: Path) -> None:
    """Write the raw rows of a study's last run here, or else of its record, one per seed, task and setting.

    In a .csv a list is a cell of JSON.

    Args:
        study: whose rows.
        home: the folder whose docs may have its record.
        path: a new file, .csv or .parquet.

    Raises:
        MergeflowError: there is neither, or the study keeps no rows.
    """
    from pyarrow import csv, parquet

    from studies.old.results import ROWS

    name, ran = study.stage.name, (study.folder / "result.json").exists()
    kept = study.folder / ROWS if ran else home / f"docs/studies/results/{name}.parquet"
    if not kept.exists() and ran:
        raise MergeflowError(f"study {name} keeps no raw rows; its tables are in {study.folder}/result.json.")
    if not kept.exists():
        raise MergeflowError(f"study {name} has not run here and has no record: run it, mergeflow study {name}")
    table = parquet.read_table(kept)
    making = path.with_name(f".{path.name}.new{os.getpid()}")
    try:
        csv.write_csv(_in_cells(table), making) if path.suffix == ".csv" else parquet.write_table(table, making)
        making.replace(path)
    finally:
        making.unlink(missing_ok=True)
    source = "the last run" if ran else "the record in docs/studies"
    typer.echo(f"Wrote {table.num_rows} rows of {source} to {path}.")


def _in_cells(table: "pa.Table") -> "pa.Table":
    """Return a table whose lists and records are texts of JSON."""
    from pyarrow import array, string, types

    for place, field in enumerate(table.schema):
        if types.is_nested(field.type):
            texts = [None if value is None else json.dumps(value) for value in table.column(place).to_pylist()]
            table = table.set_column(place, field.name, array(texts, string()))
    return table
