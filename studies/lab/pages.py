"""One page a paper, written from the records: a line for each claim, with the paper's number, ours and the verdict."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from studies.lab.claims import VERDICTS, Finding, overall
from studies.lab.plots import PLUS_MINUS
from studies.lab.records import find_record, recorded
from studies.lab.study import Result
from tasks.project.stage import RECORDS
from tasks.project.studies import Study

PAGES = "docs/research"
CHANGES = f"{RECORDS}/changed_verdicts.json"
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
{verdicts}. How a verdict is reached, and what ± leaves out, is on [the index](README.md). Arguments are chosen on
validation. Where the embedded suite was measured, its numbers show mechanisms and are not to be compared with tables of
papers.
"""
_INDEX = """\
# The papers' experiments

Five papers, claim by claim: what each says, the number that it prints, what was measured here, and the verdict. Written
by `mergeflow study --pages` from the records in `studies/records`. The figures are not tracked: the documentation site
shows them here, and `mergeflow study --pages --figures` writes a page with method, tables and figures for each study
into docs/research/studies. `mergeflow study NAME` runs one study. A paper's claims have one line each, whatever the
number of settings that they were tested in; additions of this project (*ours*) are counted and listed apart.
"""
_RULES = """\
## How a verdict is reached

- ± is half a 95 % interval of Student's t over seeds: the order of batches, and what else a study draws by seed. Where
  rows keep the score of each test example, it is *over seeds and test examples*: the examples of a task are drawn
  again, the same for all models and seeds, and both variances are added. Records from before 2026-11-30 have no
  scores: of 500 images a task, sampling alone is ± 0.8 points where two merges disagree on 6 % of 4000 images. No
  interval covers another base or other drawings.
- A claim *holds* where the whole interval of every part lies within the limits of its rule. It *does not hold* where a
  part lies outside by Holm's step-down at 2.5 % over all parts of the claim, with one-sided p of the t-test over seeds;
  the number of parts is printed. Otherwise it is *undecided*.
- A claim with a precondition (*needs*; what was measured of it is in brackets) is *not testable here* where the
  precondition does not hold for certain, by the same test (undecided is not enough): at a floor, at a ceiling, or where
  the phenomenon is absent, nothing is refuted. So it is where a study's choices do not measure what a claim asks for.
- A claim tested in several settings holds where it holds in every one that can test it, does not hold where it does not
  in some and holds in none, and is undecided otherwise.
- Margins: where the paper prints a lead, the margin is half of the paper's own share of the headroom, which is experts
  less zero-shot in the same run (over N, the experts of the smallest N); where it prints a loss or a gap that it calls
  small, twice its share. Points are not carried over from another headroom; the paper's points and share are printed
  beside ours. A threshold that is part of the paper's sentence stays as it is. Rules where the paper prints no number
  are this project's, written before the run unless a remark or the table of changes says otherwise. The thresholds of
  the preconditions (85 % of a task's labels read from shape, 90 % of random labels fitted, 20 % of what experts gain,
  room of 1 or 2 points, a barrier of .1 nat) were set on 2026-11-28, when the records were known; a new run is their
  first test.

## What is missing

- On real texts there are C1 to C3, C5 to C7, C9, L6, L7, M2, M3, M5, M6 and what their N allow of M4: three seeds, a
  tenth to a third of the papers' steps. C4, M1, M7 and G5 to G9 are of drawn data alone.
- P18 to P21 have generated books; `worlds/real-books` has the choices for real ones, two hours a seed, and was not run.
- C1 and C2's bell are measured on four bases, C3 to C8 on one. M4, M6 and M7 have S = 240, and 480 for some N, of the
  paper's 2,000. Methods differ in how many candidates and rates validation chooses among; the lines above say where.
- No test set was drawn anew: remarks tell which look at test a record is.
- P1, P3, P4, P20 and P24 make no claim; what they ask for is code, which tests hold to its definitions.
"""


@dataclass(frozen=True)
class Line:
    """A claim with what every study and setting found of it."""

    system: str
    claim: str
    ours: bool
    findings: Sequence[tuple[Finding, str]]

    @property
    def verdict(self) -> str:
        return overall(finding for finding, _ in self.findings)


def write_pages(home: Path, studies: Iterable[Study], figures: bool = False) -> list[Path]:
    """Write the pages of the papers whose claims have records; return their paths.

    Args:
        home: the folder whose `docs/research` gets them.
        figures: write a page of tables and figures for each study too; these are not tracked.
    """
    chosen = [study for study in studies if (home / RECORDS / f"{study.stage.name}.parquet").exists()]
    results = {study.stage.name: recorded(home, study) for study in chosen}
    folder = home / PAGES
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    shown: set[str] = set()
    for letter, (page, title) in PAPERS.items():
        if text := _paper(home, letter, title, chosen, results, shown):
            written[page] = f"{written[page]}\n{text.replace('# ', '## ', 1)}" if page in written else text
    written["README"] = _index(home, results)
    for page, text in written.items():
        (folder / f"{page}.md").write_text(text, encoding="utf-8")
    if figures:
        draw(folder / "figures", results)
        for study in chosen:
            name = study.stage.name
            file = folder / "studies" / f"{name}.md"
            file.parent.mkdir(exist_ok=True)
            file.write_text(study_page(*study.text, name, results), encoding="utf-8")
    return [folder / f"{page}.md" for page in written]


def lines_of(letter: str, results: Mapping[str, Result]) -> list[Line]:
    """Return the claims on one paper, each once, by system."""
    claims: dict[tuple[str, str, bool], list[tuple[Finding, str]]] = {}
    for name, result in results.items():
        for finding in result.findings:
            if finding.system.startswith(letter):
                claims.setdefault((finding.system, finding.claim, finding.ours), []).append((finding, name))
    lines = [Line(*key, findings) for key, findings in claims.items()]
    return sorted(lines, key=lambda line: int(line.system[1:]))


def _index(home: Path, results: Mapping[str, Result]) -> str:
    """Return the index: verdicts of each paper's claims and of ours, the rules, and what changed."""
    lines = {letter: lines_of(letter, results) for letter in PAPERS}
    parts = [_INDEX]
    for title, ours in (("Claims of the papers", False), ("Claims of this project", True)):
        parts.append(f"## {title}\n\n{_counts(lines, ours)}")
    parts += [_RULES, _studies(results), _changes(home, results)]
    return "\n".join(part for part in parts if part)


def _counts(lines: Mapping[str, list[Line]], ours: bool) -> str:
    rows = [f"| paper | claims | {' | '.join(VERDICTS)} | settings |", "|---|" + "--:|" * (len(VERDICTS) + 2)]
    for letter, (page, title) in PAPERS.items():
        chosen = [line for line in lines[letter] if line.ours == ours]
        counts = Counter(line.verdict for line in chosen)
        numbers = [len(chosen), *(counts[word] for word in VERDICTS), sum(len(line.findings) for line in chosen)]
        if chosen:
            rows.append(f"| [{title}]({page}.md) | {' | '.join(map(str, numbers))} |")
    return "\n".join(rows) + "\n"


def _studies(results: Mapping[str, Result]) -> str:
    rows = ["## Studies", "", "| page | studies |", "|---|---|"]
    for page in dict.fromkeys(page for page, _ in PAPERS.values()):
        letters = [letter for letter, (of_page, _) in PAPERS.items() if of_page == page]
        names = dict.fromkeys(
            name for letter in letters for line in lines_of(letter, results) for _, name in line.findings
        )
        if names:
            rows.append(f"| [{page}]({page}.md) | {', '.join(f'[{name}]({page}.md#{name})' for name in names)} |")
    return "\n".join(rows) + "\n"


def _changes(home: Path, results: Mapping[str, Result]) -> str:
    """Return the table of verdicts that a change of rules changed, with the reasons."""
    path = home / CHANGES
    if not path.exists():
        return ""
    rows = ["## Verdicts that changed", "", "No row was measured again; rules were mended, each for the reason given."]
    verdicts = {(n, f.claim, f.setting): f for n, result in results.items() for f in result.findings}
    for change in json.loads(path.read_text(encoding="utf-8")):
        rows += ["", f"**{change['day']}: {change['why']}**", "", "| claim | study | was | is |", "|---|---|---|---|"]
        for name, claim, setting, was in change["claims"]:
            finding = verdicts[name, claim, setting]
            cells = [f"{finding.system}: {claim}", f"{name}{f', {setting}' if setting else ''}", was, finding.verdict]
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(rows) + "\n"


def draw(folder: Path, results: Mapping[str, Result]) -> None:
    """Write the figures of studies as `NAME.FIGURE.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        for figure, svg in result.draw(results).items():
            (folder / figure_file(name, figure)).write_bytes(svg)


def figure_file(study: str, figure: str) -> str:
    """Return the name of a figure's file, fit for a link.

    Example:
        >>> figure_file("pairs", "digits, two layers")
        'pairs.digits_two_layers.svg'
    """
    return f"{study}.{re.sub(r'[^A-Za-z0-9]+', '_', figure)}.svg"


def _paper(
    home: Path, letter: str, title: str, studies: list[Study], results: Mapping[str, Result], shown: set[str]
) -> str:
    """Return a paper's page: its claims, ours, and the studies that no earlier page has shown."""
    lines = lines_of(letter, results)
    if not lines:
        return ""
    counts = Counter(line.verdict for line in lines if not line.ours)
    verdicts = ", ".join(f"{word} {counts[word]}" for word in VERDICTS)
    verdicts = f"Verdicts on the paper's {counts.total()} claims: {verdicts}" if counts else "All claims here are ours"
    parts = [_HEAD.format(title=title, verdicts=verdicts)]
    for heading, ours in (("Claims of the paper", False), ("Claims of this project", True)):
        if of_origin := [line for line in lines if line.ours == ours]:
            parts.append(f"## {heading}\n\n{claims_table(of_origin)}")
    names = {name for line in lines for _, name in line.findings} - shown
    shown |= names
    parts.append("## Studies\n")
    parts += [_study(home, study, results[study.stage.name]) for study in studies if study.stage.name in names]
    return "\n".join(parts)


_COMMON: dict[str, Callable[[Finding], str]] = {
    "Rule": lambda finding: finding.rule,
    "Needs": lambda finding: finding.needs,
    "Open": lambda finding: finding.caveat,
}


def claims_table(lines: Iterable[Line]) -> str:
    """Return one line a claim; what its settings have in common is said once."""
    rows = ["| | claim | in the paper | measured here | verdict |", "|---|---|---|---|---|"]
    for line in lines:
        findings = [finding for finding, _ in line.findings]
        common = {word: sorted({text(f) for f in findings} - {""}) for word, text in _COMMON.items()}
        says = [line.claim, *(f"*{word}:* {'; '.join(texts)}." for word, texts in common.items() if texts)]
        paper = "; ".join(dict.fromkeys(finding.paper for finding in findings if finding.paper))
        measured = [_measured(finding, name, len(findings) > 1) for finding, name in line.findings]
        cells = [line.system, "<br>".join(says), paper, "<br>".join(measured), f"**{line.verdict}**"]
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(rows) + "\n"


def _measured(finding: Finding, study: str, several: bool) -> str:
    where = f"{study}, {finding.setting}" if finding.setting else study
    verdict = f" – {finding.verdict}" if several else ""
    has = f" [{finding.has}]" if finding.has else ""
    return f"*{where}:* {finding.measured}{has}{verdict}"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _study(home: Path, study: Study, result: Result) -> str:
    """Return the lines on one study: its question and its record."""
    name, facts = study.stage.name, find_record(home, study.stage.name).facts
    took = f", {facts['seconds']} s on {facts['hardware']}" if facts.get("seconds") else ""
    measured = f"measured {facts.get('day', '')} at commit {facts.get('commit', '')}{took}"
    remarks = [f"Remark of {remark['day']}: {remark['text']}" for remark in facts.get("remarks", [])]
    times = [
        f"**{table['title']}**\n\n{markdown_table(pd.DataFrame(table['rows']))}" for table in facts.get("tables", [])
    ]
    asks = result.study.question or study.question
    question = f"*{asks[:1].upper()}{asks[1:]}* {measured[:1].upper()}{measured[1:]}."
    parts = [f"### {name}", question, *remarks, *result.notes, *times]
    return "\n\n".join(parts) + "\n"


def study_page(title: str, text: str, name: str, results: Mapping[str, Result]) -> str:
    """Return the page of one study: text, findings, notes, tables and figures."""
    result = results[name]
    findings = [
        f"- **{finding.system}, {finding.verdict}.** {finding.claim} *Rule:* {finding.rule}. "
        f"{f'*Needs:* {finding.needs}; {finding.has}. ' if finding.needs else ''}*Measured:* {finding.measured}"
        for finding in result.findings
    ]
    tables = [f"**{title}**\n\n{markdown_table(table)}" for title, table in result.tables.items()]
    tables += [PLUS_MINUS] if any("±" in table for table in tables) else []
    pictures = [f"![{figure}](../figures/{figure_file(name, figure)})" for figure in result.figures(results)]
    return "\n\n".join([f"# {title}", text, *findings, *result.notes, *tables, *pictures]) + "\n"


def markdown_table(table: pd.DataFrame) -> str:
    heads, *rows = cells_of(table)
    return "\n".join(f"| {' | '.join(row)} |" if row else "|" + "---|" * len(heads) for row in (heads, [], *rows))


def cells_of(table: pd.DataFrame) -> list[list[str]]:
    """Return the texts of a table, its headings first; its index is the first columns unless it is only counted."""
    counts = {  # rows that lack a number made them floats
        name: column.astype(int)
        for name, column in table.index.to_frame(index=False).items()
        if column.dtype.kind == "f" and (column % 1 == 0).all()
    }
    whole = table if isinstance(table.index, pd.RangeIndex) else table.reset_index().assign(**counts).astype(object)
    heads = [" ".join(map(str, name)).strip() if isinstance(name, tuple) else str(name) for name in whole.columns]
    return [heads, *(["" if pd.isna(cell) else str(cell) for cell in row] for row in whole.to_numpy())]
