"""What a study leaves: raw rows, tables, findings with their verdicts, figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from mergeflow import layout
from mergeflow.evaluation.averages import mean_interval
from studies.old.verdicts import WORDS, Verdict
from tasks.plotting.drawing import to_svg
from tasks.project.stage import StageIO

Cell = str | int | float | None
ROWS = "rows.parquet"


@dataclass(frozen=True)
class Table:
    """A table: rows with the same keys; a number is printed as it is, so round it or use `with_interval`."""

    title: str
    rows: list[dict[str, Cell]]


@dataclass(frozen=True)
class Finding:
    """What a paper says, and whether it holds here.

    Attributes:
        system: the row of the papers' systems it belongs to, for example `M2`.
        claim: what should be seen, one sentence, as the paper puts it.
        measured: what was seen, with numbers.
        holds: True, False, or None where the interval over seeds leaves it undecided (`verdicts.within`).
        margin: the rule of the verdict, written before the run, for example `difference ≥ 2 points`.
        ours: whether the claim is an addition of this project, not the paper's.
    """

    system: str
    claim: str
    measured: str
    holds: Verdict
    margin: str = ""
    ours: bool = False

    @property
    def verdict(self) -> str:
        """`holds`, `does not hold` or `undecided`."""
        return WORDS[self.holds]


@dataclass(frozen=True)
class StudyResult:
    """All that a study found. A finding that does not hold is a result like any other; `notes` say what decides it.

    Attributes:
        tables: what is printed.
        findings: the claims with their verdicts.
        notes: what decides them.
        rows: one tidy row per seed, task and setting, from which every interval can be recomputed. Rows have the same
            columns; a column has one type.
        figures: names of the figures; `write` knows them.
        earlier: whether the result was recorded by a version of the study that had no rules for its verdicts.
    """

    tables: list[Table]
    findings: list[Finding]
    notes: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    earlier: bool = False

    def write(self, io: StageIO, figures: Mapping[str, Figure]) -> Path:
        """Write the folder of the study that runs, and return it: `result.json`, one SVG per figure, and its rows.

        Args:
            io: the files of the study's stage.
            figures: name → figure.
        """
        folder = io.out(layout.study(io.stage.name))
        folder.mkdir(parents=True)
        for name, figure in figures.items():
            (folder / f"{name}.svg").write_bytes(to_svg(figure, name))
        content: dict[str, Any] = {
            "tables": [vars(table) for table in self.tables],
            "findings": [vars(finding) for finding in self.findings],
            "notes": self.notes,
            "figures": list(figures),
        }
        (folder / "result.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        if self.rows:
            pq.write_table(pa.Table.from_pylist(self.rows), folder / ROWS)
        return folder

    @classmethod
    def read(cls, folder: Path) -> "StudyResult":
        """Read what `write` wrote."""
        result = cls.parse((folder / "result.json").read_text())
        if (folder / ROWS).exists():
            result.rows.extend(pq.read_table(folder / ROWS).to_pylist())
        return result

    @classmethod
    def parse(cls, text: str) -> "StudyResult":
        """Return the result whose `result.json` holds `text`, without its rows."""
        content: dict[str, Any] = json.loads(text)
        tables = [Table(**table) for table in content["tables"]]
        findings = [Finding(**finding) for finding in content["findings"]]
        earlier = any("margin" not in finding for finding in content["findings"])
        return cls(tables, findings, content["notes"], figures=content["figures"], earlier=earlier)


def keep_times(io: StageIO, tables: Sequence[Table]) -> None:
    """Keep tables of times and memory beside the stage's cost: they differ from run to run, so no result has them."""
    io.costs["tables"] = [vars(table) for table in tables]


def with_interval(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± half the 95 % interval over seeds.

    Example:
        >>> with_interval([70.0, 71.0, 72.0])
        '71.0 ± 2.5'
    """
    centre, half = mean_interval(values)
    return f"{centre:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{centre:.{digits}f}"


def markdown_table(table: Table) -> str:
    """Return the table in Markdown."""
    columns = list(table.rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join("" if row[name] is None else str(row[name]) for name in columns) + " |" for row in table.rows
    ]
    return "\n".join(lines)
