"""What a study leaves: tables, findings that hold or do not, figures; and how they become a page of the docs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mergeflow.evaluation.statistics import mean_interval
from tasks.plotting.drawing import to_svg

Cell = str | int | float | None


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
        claim: what should be seen, one sentence.
        measured: what was seen, with numbers.
        holds: whether it holds.
    """

    system: str
    claim: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class StudyResult:
    """All that a study found. A finding that does not hold is a result like any other; `notes` say what decides it."""

    tables: list[Table]
    findings: list[Finding]
    notes: list[str]

    def write(self, folder: Path, figures: Mapping[str, Figure]) -> None:
        """Write `result.json` and one SVG per figure into a new folder."""
        folder.mkdir(parents=True)
        for name, figure in figures.items():
            (folder / f"{name}.svg").write_bytes(to_svg(figure, name))
        content = {**asdict(self), "figures": list(figures)}
        (folder / "result.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "StudyResult":
        content: dict[str, Any] = json.loads((folder / "result.json").read_text())
        tables = [Table(**table) for table in content["tables"]]
        return cls(tables, [Finding(**finding) for finding in content["findings"]], content["notes"])


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
