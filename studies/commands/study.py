"""`mergeflow study`: run a paper's experiment with all it needs, log it, print what was found."""

import fnmatch
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from mergeflow.errors import MergeflowError, unknown_name

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from studies.lab.claims import Finding
    from studies.lab.study import Result
    from tasks.project.studies import Study


_COLOURS = {"holds": "green", "does not hold": "yellow", "undecided": "cyan", "not testable here": "magenta"}
_GAP = 3  # characters between two columns of a table


def add_commands(app: typer.Typer, root: Path) -> None:
    """Add `study` for the project folder `root`."""

    @app.command("study")
    def study(
        names: Annotated[
            list[str] | None, typer.Argument(help="Studies, patterns ('texts_*'), systems (M3); or `new NAME`.")
        ] = None,
        everything: Annotated[bool, typer.Option("--all", help="Every study.")] = False,
        record: Annotated[
            bool, typer.Option(help="Run, then keep the rows as the study's record in studies/records.")
        ] = False,
        judge: Annotated[bool, typer.Option(help="Run nothing: judge the recorded rows by today's rules.")] = False,
        changed: Annotated[
            bool, typer.Option(help="Run nothing: say whether code, choices or inputs differ from the record's.")
        ] = False,
        rows: Annotated[
            Path | None,
            typer.Option(help="Run nothing: write the study's raw rows into this new file, .csv or .parquet."),
        ] = None,
        pages: Annotated[bool, typer.Option(help="Run nothing: write docs/research from all records.")] = False,
        figures: Annotated[bool, typer.Option(help="With --pages: tables and figures of each study too.")] = False,
    ) -> None:
        """Run studies and the training runs they need; without a name, list them; `new NAME` writes a new one."""
        if names and names[0] == "new":
            make_study(root, names[1:])
            return
        write_graphs(root)
        studies = find_studies(root)
        chosen = [study for name in names or [] for study in find_named(name, studies, root)]
        chosen = list(dict.fromkeys(studies.values() if everything else chosen))
        check_options(chosen, figures, record=record, judge=judge, changed=changed, rows=rows is not None, pages=pages)
        if rows:
            check_rows_file(rows, chosen)
            write_rows(chosen[0], home_of(root, chosen[0], studies), rows)
        elif pages:
            _write_pages(root, studies, figures)
        elif judge or changed:
            _show_records(root, chosen, studies, judge)
        elif chosen:
            run_studies(root, chosen, record, Console())
        else:
            show_list(studies, Console())


def check_options(chosen: Sequence["Study"], figures: bool = False, **options: bool) -> None:
    """Refuse options that do not go together, or that need a study."""
    asked = [f"--{name}" for name, value in options.items() if value]
    if figures and asked != ["--pages"]:
        raise MergeflowError(
            "`--figures` is for the pages, found no `--pages`: mergeflow study --pages --figures. A run draws its "
            "figures anyway."
        )
    if len(asked) > 1:
        raise MergeflowError(
            f"`mergeflow study` does one thing at a time, found {' and '.join(asked)}: give one of them."
        )
    if asked and asked != ["--pages"] and not chosen:
        raise MergeflowError(f"`{asked[0]}` takes studies: mergeflow study NAME {asked[0]}, or --all")
    if asked == ["--pages"] and chosen:
        raise MergeflowError(
            f"`--pages` writes every paper's page and takes no study, found {chosen[0].stage.name}: mergeflow study "
            "--pages. One study's tables are printed by --judge."
        )


def make_study(root: Path, names: list[str]) -> None:
    """Write the file of one new study in the project's folder `studies`."""
    from tasks.project.new import new_study

    if len(names) != 1:
        raise MergeflowError("`mergeflow study new` takes one name: mergeflow study new my_study")
    file = new_study(root, names[0])
    typer.echo(f"Made {file.relative_to(root)}. Next: edit it and studies/params.yaml; mergeflow study {names[0]}")


def write_graphs(root: Path) -> None:
    """Write studies/dvc.yaml of every project whose choices name other studies than it has."""
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

    studies: dict[str, Study] = {}
    for folder in _projects(root):
        for stage in load_graph(folder, studies=True).values():
            if stage.is_study:
                studies[f"{folder.name}/{stage.name}" if stage.name in studies else stage.name] = Study(folder, stage)
    return studies


def home_of(root: Path, study: "Study", every: Mapping[str, "Study"]) -> Path:
    """Return the folder that has a study's record: its world's where its name is another study's in `root`.

    Args:
        study: one of those that `every` names; its graph may have been written anew since.
    """
    return root if every[study.stage.name].root == study.root else study.root


def find_named(name: str, studies: dict[str, "Study"], root: Path) -> list["Study"]:
    """Return the study with this name, or all that a pattern matches or that cover this system of the papers."""
    from tasks.project.stage import CHOICES
    from tasks.project.studies import find_study_modules

    if name in studies:
        return [studies[name]]
    if covering := [study for study in studies.values() if name.upper() in study.stage.systems]:
        return covering
    if matching := [studies[study] for study in fnmatch.filter(studies, name)]:
        return matching
    if name in find_study_modules(root):
        raise MergeflowError(
            f"{CHOICES} does not choose study '{name}': give its choices there, under `studies`, as docs/extending.md "
            "shows. `mergeflow study new NAME` makes a file with one."
        )
    systems = {system for study in studies.values() for system in study.stage.systems}
    raise unknown_name("study", name, {*studies, *systems})


def run_studies(root: Path, studies: list["Study"], record: bool, console: Console) -> None:
    """Bring studies up to date, each in its own project, log each result once in MLflow, print it.

    Args:
        root: the project folder whose studies/records get the records.
        record: keep the rows as records.
    """
    from flows.run_command import bring_up_to_date
    from tasks.project.study_graph import write_study_graph

    projects = list(dict.fromkeys(study.root for study in studies))
    for project in projects:
        write_study_graph(project)
    for project in projects:
        targets = [study.stage.address for study in studies if study.root == project]
        if not bring_up_to_date(project, console, targets=targets):
            console.print("[bold]Nothing changed:[/] the studies are up to date.")
    every = find_studies(root) if record else {}  # once more: the graphs may have been written anew
    for study in studies:
        _show(root, study, home_of(root, study, every) if record else None, console)


def _show(root: Path, study: "Study", home: Path | None, console: Console) -> None:
    """Print a study's result, log it in the MLflow of its project, keep it as a record of `home`, if given."""
    from registry.logging import log_study
    from registry.store import connect
    from studies.lab.records import last_run, write_record
    from tasks.project.recorded import locked_stages

    name, folder = study.stage.name, study.folder
    result = last_run(study)
    _print(study.text[0], result, console)
    locked = locked_stages(study.root, study.stage.file).get(name, {})
    log_study(connect(project_root=study.root), name, result.logged(), folder, locked)
    console.print(f"[bold]Outputs[/]   {folder.relative_to(root)}", highlight=False)
    if home:
        console.print(f"[bold]Record[/]    {write_record(home, study).relative_to(root)}", highlight=False)


def _show_records(root: Path, chosen: Sequence["Study"], every: Mapping[str, "Study"], judge: bool) -> None:
    """Judge recorded rows by today's rules, or say what differs today from what they were measured with."""
    console, faults = Console(), []
    for study in chosen:
        try:
            _show_record(home_of(root, study, every), study, judge, console)
        except MergeflowError as error:
            faults.append(str(error))
    if faults:
        raise MergeflowError("\n".join(faults))


def _show_record(home: Path, study: "Study", judge: bool, console: Console) -> None:
    from studies.lab.records import changes, find_record, recorded

    if judge:
        _print(study.text[0], recorded(home, study), console)
        return
    facts, differences = find_record(home, study.stage.name).facts, changes(home, study)
    console.print(f"{study.stage.name}: measured {facts['day']} at {facts['commit']}", highlight=False)
    for difference in differences or ["code, choices and inputs are the record's"]:
        console.print(f"  {escape(difference)}", highlight=False, soft_wrap=True)


def _write_pages(root: Path, studies: Mapping[str, "Study"], figures: bool) -> None:
    from studies.lab.pages import write_pages

    for home in dict.fromkeys(home_of(root, study, studies) for study in studies.values()):
        of_home = [study for study in studies.values() if home_of(root, study, studies) == home]
        for page in write_pages(home, of_home, figures):
            typer.echo(f"Wrote {page.relative_to(root)}")


def _print(title: str, result: "Result", console: Console) -> None:
    from studies.lab.plots import PLUS_MINUS

    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    for heading, table in result.tables.items():
        console.print(escape(heading), highlight=False)
        for part in _parts(table, console.width):
            console.print(part)
    if any("±" in str(cell) for table in result.tables.values() for cell in table.to_numpy().ravel()):
        console.print(f"[dim]{PLUS_MINUS}[/]", highlight=False)
    for finding in result.findings:
        _print_finding(finding, console)
    for note in result.notes:
        console.print(f"[dim]{escape(note)}[/]", highlight=False)


def _print_finding(finding: "Finding", console: Console) -> None:
    mark = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
    setting = f" ({finding.setting})" if finding.setting else ""
    says = f"{finding.claim}{setting}{' (a claim of this project)' if finding.ours else ''}"
    console.print(f"{escape(finding.system)}  {mark}  {escape(says)}", highlight=False)
    needs = f"{finding.needs}; {finding.has}" if finding.needs else ""
    lines = {"here": finding.measured, "rule": finding.rule, "paper": finding.paper, "needs": needs}
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for name, text in lines.items():
        if text:
            grid.add_row(f"    [dim]{name}[/]", escape(text))
    console.print(grid, highlight=False)


def _parts(table: "pd.DataFrame", width: int) -> Iterator[RichTable]:
    """Yield the table; where it needs more than `width` characters several, each of which begins with its index."""
    from studies.lab.pages import cells_of

    heads, *rows = cells_of(table)
    columns = list(zip(heads, *rows, strict=True))
    index = len(heads) - table.shape[1]  # columns that it takes
    narrow = [max(map(cell_len, (*head.split(), *cells)), default=0) + _GAP for head, *cells in columns]
    narrow = [min(needed, width // 2) for needed in narrow]
    fits = sum(max(map(cell_len, column)) + _GAP for column in columns) <= width
    part = list(range(index))
    for number in range(index, len(columns)):
        if not fits and len(part) > index and sum(narrow[n] for n in part) + narrow[number] > width:
            yield _rich([(columns[n], narrow[n] - _GAP) for n in part])
            part = list(range(index))
        part.append(number)
    yield _rich([(columns[n], None if fits else narrow[n] - _GAP) for n in part])


def _rich(columns: Sequence[tuple[Sequence[str], int | None]]) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for (heading, first, *_), width in columns:
        drawn.add_column(escape(heading), justify="left" if first[:1].isalpha() else "right", width=width)
    for row in zip(*(cells[1:] for cells, _ in columns), strict=True):
        drawn.add_row(*map(escape, row))
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
    """Refuse a file that `--rows` cannot write."""
    if len(studies) != 1:
        fault = ", ".join(study.stage.name for study in studies) or "none"
        raise MergeflowError(f"`--rows` takes one study, found {fault}: mergeflow study NAME --rows FILE.csv")
    if path.suffix not in {".csv", ".parquet"}:
        raise MergeflowError(f"--rows {path}: rows are written as .csv or .parquet. Name such a file.")
    if path.exists() or not path.parent.is_dir():
        fault = "the file exists already" if path.exists() else f"there is no folder {path.parent}"
        raise MergeflowError(f"--rows {path}: {fault}. Name a new file in an existing folder.")
    if not os.access(path.parent, os.W_OK):
        raise MergeflowError(f"--rows {path}: nothing may be written in {path.parent}. Name a file in another folder.")


def write_rows(study: "Study", home: Path, path: Path) -> None:
    """Write the raw rows of a study's last run here, or else of its record, one per seed, task and setting.

    In a .csv a list is a cell of JSON.
    """
    from pyarrow import csv, parquet

    from studies.lab.records import find_record
    from studies.lab.study import ROWS

    name, ran = study.stage.name, (study.folder / ROWS).exists()
    table = parquet.read_table(study.folder / ROWS if ran else find_record(home, name).rows)
    making = path.with_name(f".{path.name}.new{os.getpid()}")
    try:
        csv.write_csv(_in_cells(table), making) if path.suffix == ".csv" else parquet.write_table(table, making)
        making.replace(path)
    finally:
        making.unlink(missing_ok=True)
    source = "the last run" if ran else "the record in studies/records"
    typer.echo(f"Wrote {table.num_rows} rows of {source} to {path}.")


def _in_cells(table: "pa.Table") -> "pa.Table":
    """Return a table whose lists and records are texts of JSON."""
    from pyarrow import array, string, types

    for place, field in enumerate(table.schema):
        if types.is_nested(field.type):
            texts = [None if value is None else json.dumps(value) for value in table.column(place).to_pylist()]
            table = table.set_column(place, field.name, array(texts, string()))
    return table
