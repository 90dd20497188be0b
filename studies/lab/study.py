"""A study: one file that declares its choices, its measurement, and the claims, tables and figures of its rows."""

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from pydantic import BaseModel

from mergeflow import layout
from mergeflow.errors import MergeflowError
from studies.lab.claims import Claim, Finding
from studies.lab.inputs import Laboratory
from studies.lab.rows import Row, tidy
from tasks.plotting.drawing import to_svg
from tasks.project.stage import StageIO
from tasks.project.studies import Declaration

ROWS = "rows.parquet"
Tables = Mapping[str, Callable[[pd.DataFrame], pd.DataFrame]]
Figures = Mapping[str, Callable[[pd.DataFrame], Figure]]
Joined = Mapping[str, tuple[str, Callable[[pd.DataFrame, pd.DataFrame], Figure]]]


@dataclass(frozen=True, kw_only=True)
class Study(Declaration[Any]):
    """All that there is of a study: `STUDY` of its module, whose docstring is its question, method and source.

    A file has this order: choices, measurement, what the rows are asked, claims, what is shown.

    What is judged and shown is a function of the tidy rows alone, so a record can be judged again at any time. Each of
    `claims`, `tables`, `figures`, `joined`, `notes` may be a function that takes the study's choices and returns it.

    Attributes:
        measure: yields tidy rows from the laboratory and the choices: flat, of JSON values, with the column `seed`.
            Use `lab.cached`, `lab.by_seed` or `lab.by_run`, so that a killed study goes on where it was.
        claims: held against the rows.
        tables: by title, made of the rows; the index is printed.
        figures: by name, drawn of the rows.
        joined: figures by name that take another study's rows as well: its name, and what draws both. The papers' pages
            have them.
        notes: sentences on what decides the findings, made of the rows.
        question: what it asks, where its file holds studies of several questions.
    """

    measure: Callable[[Laboratory, Any], Iterable[Row]]
    claims: Sequence[Claim] | Callable[[Any], Sequence[Claim]] = ()
    tables: Tables | Callable[[Any], Tables] = field(default_factory=dict)
    figures: Figures | Callable[[Any], Figures] = field(default_factory=dict)
    joined: Joined | Callable[[Any], Joined] = field(default_factory=dict)
    notes: Callable[[pd.DataFrame, Any], Sequence[str]] = lambda rows, options: ()
    question: str = ""

    def run(self, io: StageIO) -> None:
        """Measure, and write the rows and the figures into the study's folder."""
        options, folder = self.chosen(io), io.out(layout.study(io.stage.name))
        folder.mkdir(parents=True)
        write_rows(self.measure(Laboratory(io), options), folder / ROWS)
        for name, figure in Result(self, options, read_rows(folder / ROWS)).draw().items():
            (folder / f"{name}.svg").write_bytes(figure)


@dataclass(frozen=True)
class Result:
    """What a study's claims, tables and figures make of its rows."""

    study: Study
    options: BaseModel
    rows: pd.DataFrame

    @cached_property
    def findings(self) -> list[Finding]:
        """The claims with their verdicts.

        Raises:
            MergeflowError: names every claim that fails on these rows, and where.
        """
        findings, faults, judged = [], [], dict[Claim, Finding]()
        for claim in self._of(self.study.claims):
            try:
                findings.append(claim.judge(self.rows, judged))
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                says = claim.says if isinstance(claim.says, str) else claim.of
                fault = str(error) if isinstance(error, MergeflowError) else f"{type(error).__name__}: {error}"
                faults.append(f"{claim.system} '{says}': {fault} ({Path(at.filename).name}, line {at.lineno})")
        if faults:
            columns = ", ".join(self.rows.columns)
            raise MergeflowError("\n".join(["claims that fail on rows with " + columns + ":", *faults]))
        return findings

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """By title; a table without rows is left out."""
        made = {title: table(self.rows) for title, table in self._of(self.study.tables).items()}
        return {title: table for title, table in made.items() if len(table)}

    @property
    def notes(self) -> list[str]:
        return list(self.study.notes(self.rows, self.options))

    def logged(self) -> SimpleNamespace:
        """Return findings and rows as MLflow's log takes them: a mapping a row, without scores and what it lacks."""
        rows = self.rows.drop(columns="scores", errors="ignore").to_dict("records")
        rows = [{k: v for k, v in row.items() if not _missing(v)} for row in rows]
        return SimpleNamespace(findings=self.findings, rows=rows)

    def figures(self, others: "Mapping[str, Result]" = MappingProxyType({})) -> dict[str, Callable[[], Figure]]:
        """Make a function that draws each figure, by name; joined ones where `others` have the other study."""
        joined = self._of(self.study.joined).items()
        return {name: partial(figure, self.rows) for name, figure in self._of(self.study.figures).items()} | {
            name: partial(figure, self.rows, others[other].rows) for name, (other, figure) in joined if other in others
        }

    def draw(self, others: "Mapping[str, Result]" = MappingProxyType({})) -> dict[str, bytes]:
        """Return the figures as SVG, by name."""
        return {name: to_svg(figure(), name) for name, figure in self.figures(others).items()}

    def _of(self, declared: Any) -> Any:
        return declared(self.options) if callable(declared) else declared


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write tidy rows as Parquet; a column keeps its type beside rows that lack it."""
    given = tidy(rows)
    if not given or "seed" not in given[0]:
        what = f"rows with {', '.join(given[0])} alone" if given else "no rows"
        raise MergeflowError(f"`measure` gave {what}: it yields rows with the column `seed`, one value for each seed.")
    columns = dict[str, pa.Array]()
    for name in given[0]:
        try:
            columns[name] = pa.array([row[name] for row in given])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise MergeflowError(
                f"`measure` gave column '{name}' values of several types: {error}. Give one."
            ) from error
        if any(isinstance(row[name], float) and math.isnan(row[name]) for row in given):
            raise MergeflowError(
                f"`measure` gave NaN in column '{name}', and claims would count the other seeds alone: leave such a "
                "row out, or find what was divided by 0."
            )
    pq.write_table(pa.table(columns), path)


def read_rows(path: Path) -> pd.DataFrame:
    """Read the rows of a study's last run or of its record."""
    return pd.read_parquet(path)
