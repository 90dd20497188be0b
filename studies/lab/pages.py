"""One page a paper, written from the records: each claim with the paper's number, ours, and the verdict."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from studies.lab.claims import WORDS, Finding
from studies.lab.records import FOLDER, find_record, recorded
from studies.lab.study import Result
from tasks.project.studies import Study

PAGES = "docs/research"
PAPERS = {
    "G": ("gradients", "On Task Vectors and Gradients"),
    "M": ("mima", "MIMA: merging while tuning"),
    "C": ("cart", "CART: centred task vectors, low-rank"),
    "L": ("linearity", "Cross-Task Linearity"),
    "P": ("provable", "Provable task vectors"),
    "B": ("provable", "Beyond the papers"),
}
_HEAD = """\
# {title}

Written by `mergeflow study --pages` from the records in `studies/records`; nothing on this page is typed by hand.
The documentation site has the figures; `mergeflow study --pages --figures` writes them, and all tables, into
docs/research/studies.
{verdicts}. ± is half a 95 % interval over seeds; a rule was written before its run; arguments are chosen on validation.
Where the embedded suite was measured, its numbers show mechanisms and are not to be compared with tables of papers.
"""
_INDEX = """\
# The papers' experiments

Five papers, claim by claim: what each says, the number that it prints, what was measured here, and the verdict. Written
by `mergeflow study --pages` from the records in `studies/records`. The figures are not tracked: the documentation site
shows them here, and `mergeflow study --pages --figures` writes a page with method, tables and figures for each study
into docs/research/studies. `mergeflow study NAME` runs one study. Verdicts of the papers' own claims are counted apart
from those of claims that are additions of this project (*ours*).

"""


def write_pages(home: Path, studies: Iterable[Study], figures: bool = False) -> list[Path]:
    """Write the pages of the papers whose claims have records; return their paths.

    Args:
        home: the folder whose `docs/research` gets them.
        studies: those that may have a record.
        figures: write a page of tables and figures for each study too; these are not tracked.
    """
    chosen = [study for study in studies if (home / FOLDER / f"{study.stage.name}.parquet").exists()]
    results = {study.stage.name: recorded(home, study) for study in chosen}
    folder = home / PAGES
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    for letter, (page, title) in PAPERS.items():
        if text := _paper(home, letter, title, chosen, results):
            written[page] = f"{written[page]}\n{text.replace('# ', '## ', 1)}" if page in written else text
    written["README"] = _index(results)
    for page, text in written.items():
        (folder / f"{page}.md").write_text(text, encoding="utf-8")
    if figures:
        draw(folder / "figures", results)
        for study in chosen:
            name = study.stage.name
            own = folder / "studies" / f"{name}.md"
            own.parent.mkdir(exist_ok=True)
            own.write_text(study_page(*study.text, name, results[name]), encoding="utf-8")
    return [folder / f"{page}.md" for page in written]


def _index(results: Mapping[str, Result]) -> str:
    """Return the index: a line for each paper with its verdicts, and where each study is."""
    lines = ["| paper | holds | does not hold | undecided | ours | studies |", "|---|--:|--:|--:|--:|---|"]
    for letter, (page, title) in PAPERS.items():
        own = {name: [f for f in result.findings if f.system.startswith(letter)] for name, result in results.items()}
        names = [name for name, findings in own.items() if findings]
        counts = Counter("ours" if f.ours else f.verdict for findings in own.values() for f in findings)
        numbers = " | ".join(str(counts[word]) for word in [*WORDS.values(), "ours"])
        studies = ", ".join(f"[{name}]({page}.md#{name})" for name in names)
        if names:
            lines.append(f"| [{title}]({page}.md) | {numbers} | {studies} |")
    return _INDEX + "\n".join(lines) + "\n"


def draw(folder: Path, results: Mapping[str, Result]) -> None:
    """Write the figures of studies as `NAME.FIGURE.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        for figure, svg in result.draw().items():
            (folder / figure_file(name, figure)).write_bytes(svg)


def figure_file(study: str, figure: str) -> str:
    """Return the name of a figure's file, fit for a link.

    Example:
        >>> figure_file("pairs", "digits, two layers")
        'pairs.digits_two_layers.svg'
    """
    return f"{study}.{re.sub(r'[^A-Za-z0-9]+', '_', figure)}.svg"


def _paper(home: Path, letter: str, title: str, studies: list[Study], results: Mapping[str, Result]) -> str:
    claims = [(f, s) for s in studies for f in results[s.stage.name].findings if f.system.startswith(letter)]
    if not claims:
        return ""
    counts = Counter(finding.verdict for finding, _ in claims if not finding.ours)
    verdicts = "Of the paper's claims " + ", ".join(f"{counts[word]} {word}" for word in WORDS.values())
    parts = [_HEAD.format(title=title, verdicts=verdicts if letter != "B" else "All claims here are ours")]
    shown: set[str] = set()
    for system in sorted({finding.system for finding, _ in claims}, key=lambda name: int(name[1:])):
        rows = [(finding, study) for finding, study in claims if finding.system == system]
        parts.append(f"## {system}\n\n{claims_table(rows)}")
        for study in dict.fromkeys(study for _, study in rows):
            if study.stage.name not in shown:
                shown.add(study.stage.name)
                parts.append(_study(home, study, results[study.stage.name]))
    return "\n".join(parts)


def claims_table(rows: Iterable[tuple[Finding, Study]]) -> str:
    """Return one line a claim, the paper's first."""
    lines = ["| claim | in the paper | rule | measured | verdict | study |", "|---|---|---|---|---|---|"]
    for finding, study in sorted(rows, key=lambda row: row[0].ours):
        claim = f"{finding.claim} (Ours.)" if finding.ours else finding.claim
        cells = [claim, finding.paper, finding.rule, finding.measured, f"**{finding.verdict}**", study.stage.name]
        lines.append("| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _study(home: Path, study: Study, result: Result) -> str:
    """Return the lines on one study: its question and its record."""
    name, facts = study.stage.name, find_record(home, study.stage.name).facts
    took = f", {facts['seconds']} s on {facts['hardware']}" if facts.get("seconds") else ""
    measured = f"measured {facts.get('day', '')} at commit {facts.get('commit', '')}{took}"
    remarks = [f"Remark of {one['day']}: {one['text']}" for one in facts.get("remarks", [])]
    kept = facts.get("tables", [])
    times = [f"**{table['title']}**\n\n{markdown_table(pd.DataFrame(table['rows']))}" for table in kept]
    question = f"*{study.question[:1].upper()}{study.question[1:]}* {measured[:1].upper()}{measured[1:]}."
    parts = [f"### {name}", question, *remarks, *result.notes, *times]
    return "\n\n".join(parts) + "\n"


def study_page(title: str, text: str, name: str, result: Result) -> str:
    """Return the page of one study: text, findings, notes, tables and figures."""
    findings = [
        f"- **{one.system}, {one.verdict}.** {one.claim} *Rule:* {one.rule}. *Measured:* {one.measured}"
        for one in result.findings
    ]
    tables = [f"**{title}**\n\n{markdown_table(table)}" for title, table in result.tables.items()]
    figures = result.study.figures(result.options) if callable(result.study.figures) else result.study.figures
    pictures = [f"![{figure}](../figures/{figure_file(name, figure)})" for figure in figures]
    return "\n\n".join([f"# {title}", text, *findings, *result.notes, *tables, *pictures]) + "\n"


def markdown_table(table: pd.DataFrame) -> str:
    """Return a table in Markdown, with its index as the first columns unless it is only counted."""
    whole = table if isinstance(table.index, pd.RangeIndex) else table.reset_index()
    heads = [" ".join(map(str, name)).strip() if isinstance(name, tuple) else str(name) for name in whole.columns]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join("" if pd.isna(cell) else str(cell) for cell in row) + " |" for row in whole.to_numpy()]
    return "\n".join(lines)
