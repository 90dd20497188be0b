"""The report's section of advice: how tasks are related, which λ were suggested, and what the sweep then chose."""

from collections.abc import Sequence
from dataclasses import dataclass

from mergeflow.advice_document import SUM, AdviceDocument, AdviceNote, advice_note, range_text
from mergeflow.analysis.provable.advice import RELATED
from tasks.report.files import RunFiles
from tasks.report.tables import Cell, Column, Row, Table

_DEAREST = 2


@dataclass(frozen=True)
class AdviceSection:
    """What the page says of advice.

    Attributes:
        sentences: On the λ, and on what the sweep chose.
        tables: Those that could be computed.
        pairs: What to expect of each pair; long, so that it is folded.
        remarks: What was not computed, and why.
    """

    sentences: list[str]
    tables: list[Table]
    pairs: Table | None
    remarks: list[str]


def advice_section(run: RunFiles) -> AdviceSection | None:
    """Return the section; None for a run without the stage `advise`.

    Args:
        run: its files.
    """
    if (advice := run.advice) is None:
        return None
    tables = [found for found in (_matrix(advice), _unlearning(advice)) if found]
    sentences = _sentences(advice, advice_note(advice, run.selection))
    if "scale" in run.selection["methods"].get(SUM, {}).get("at_grid_edge", []):
        sentences.append("That λ is at the edge of the grid, so a better one may lie outside of what the sweep tried.")
    return AdviceSection(sentences, tables, _pairs(advice), advice["remarks"])


def _sentences(advice: AdviceDocument, note: AdviceNote) -> list[str]:
    found = []
    if suggested := note["suggested"]:
        values = ", ".join(f"{value:g}" for value in suggested)
        found.append(f"Suggested for the sum of all task vectors, by their lengths: λ {values}.")
    if note["theory"]:
        found.append(f"The theory expects all tasks to be solved with λ {range_text(note['theory'])}.")
    elif advice["answered"] == advice["experts"]:
        found.append("The theory expects no λ to solve all tasks.")
    if note["chosen"] is None:
        found.append(f"The sweep tried no plain sum ({SUM}), so that there is nothing to compare.")
    else:
        places = {"in the suggested range": note["inside"], "in the theory's": note["theory_inside"]}
        told = [where if lies else f"not {where}" for where, lies in places.items() if lies is not None]
        lies = f" It lies {' and '.join(told)}." if told else ""
        found.append(f"The sweep chose λ {note['chosen']:g} for {SUM}.{lies}")
    return found


def _matrix(advice: AdviceDocument) -> Table | None:
    """Return α̂ of what tuning changed, of all pairs, with the verdict where it is not `irrelevant`."""
    names, changes, alphas = advice["answered"], advice["changes"], advice["alphas"]
    if names is None or changes is None or alphas is None:
        return None
    columns = [Column("task", numeric=False), *(Column(name) for name in names)]
    rows = [
        Row([Cell(name, name), *(_alpha(changes[i][j], alphas[i][j], i == j) for j in range(len(names)))])
        for i, name in enumerate(names)
    ]
    return Table("α̂ of what tuning changed of the answers; bold: aligned or contradictory", columns, rows)


def _alpha(change: float, alpha: float, own: bool) -> Cell:
    if own:
        return Cell("–", 2.0)
    note = f"α̂ of the whole answers {alpha:+.2f}"
    return Cell(f"{change:+.2f}", change, abs(change) >= RELATED, round(min(abs(change), 1.0), 3), note)


def _unlearning(advice: AdviceDocument) -> Table | None:
    """Return for each task those that lose most when it is taken away."""
    if not advice["unlearning"]:
        return None
    rows = []
    for task, costs in advice["unlearning"].items():
        dearest = sorted(costs.items(), key=lambda one: -one[1])[:_DEAREST]
        text = ", ".join(f"{name} ({cosine:+.2f})" for name, cosine in dearest)
        rows.append(Row([Cell(task, task), Cell(text, dearest[0][1] if dearest else -2.0)]))
    columns = [Column("unlearning", numeric=False), Column("costs most", numeric=False)]
    return Table("What unlearning a task costs: the tasks whose vectors are nearest (cosine)", columns, rows)


def _pairs(advice: AdviceDocument) -> Table | None:
    if not advice["pairs"]:
        return None
    words = ("pair", "α̂", "change", "cosine", "verdict", "add, λ", "unlearn, λ")
    columns = [Column(word, numeric=word in ("α̂", "change", "cosine")) for word in words]
    rows = []
    for pair in advice["pairs"]:
        name = f"{pair['first']} – {pair['second']}"
        figures = [Cell(f"{pair[key]:+.2f}", pair[key]) for key in ("alpha", "changes", "cosine")]
        ranges = [_range(pair[key]) for key in ("addition", "unlearning")]
        rows.append(Row([Cell(name, name), *figures, Cell(pair["relation"], pair["relation"]), *ranges]))
    return Table("What the theory expects of each pair: Ψ⁰ + ΔΨ₁ + λ ΔΨ₂", columns, rows)


def _range(interval: Sequence[float | None] | None) -> Cell:
    return Cell(range_text(interval), range_text(interval))
