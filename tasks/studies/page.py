"""A study's page in the docs, written from its outputs: nothing on it is typed by hand but the study's docstring."""

import json
import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tasks.project.stage import Stage, read_record
from tasks.project.study_graph import study_text
from tasks.studies.results import StudyResult, markdown_table

_INDEX = (
    "The papers' experiments on the project's model and tasks, measured on the embedded suite with three seeds; a "
    "finding that does not hold is reported with its numbers. `mergeflow study NAME` runs one; with `--document` it "
    "writes its page and this table. Another model and other tasks are a matter of `params.yaml`."
)


@dataclass(frozen=True)
class Study:
    """A study and the project that it reads.

    Attributes:
        root: that project's folder.
        stage: the study's stage in its graph.
    """

    root: Path
    stage: Stage

    @property
    def folder(self) -> Path:
        """Where the result is."""
        return self.root / self.stage.outs[0]

    @property
    def text(self) -> tuple[str, str]:
        """The title and the text of its module's docstring."""
        return study_text(self.root, self.stage.module)

    @property
    def question(self) -> str:
        """What it asks: the title, without the study's name before it."""
        title = self.text[0]
        return title.partition(": ")[2] or title


def write_page(root: Path, study: Study) -> Path:
    """Write `docs/studies/<name>.md`, its figures and `results/<name>.json`; return the page's path.

    Args:
        root: the folder whose `docs` get the page.
        study: a study that has run.
    """
    folder, name, made = root / "docs" / "studies", study.stage.name, study.folder
    result = StudyResult.read(made)
    for part in ("figures", "results"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    shutil.copy(made / "result.json", folder / "results" / f"{name}.json")
    figures = json.loads((made / "result.json").read_text())["figures"]
    for figure in figures:
        shutil.copy(made / f"{figure}.svg", folder / "figures" / f"{name}_{figure}.svg")
    title, text = study.text
    seconds = read_record(study.root, study.stage.address).get("seconds", 0)
    parts = [
        f"# {title}",
        text,
        f"Command: `mergeflow study {name}`. Measured on {_hardware()}, {seconds:.0f} s without the training runs; "
        "selection on validation, one look at test; ± is half a 95 % interval over the seeds. The embedded suite shows "
        "mechanisms: do not compare its numbers with tables of papers.",
        "## Findings",
        *(_finding(one.system, one.claim, one.measured, one.holds) for one in result.findings),
        *([f"**What decides it.** {' '.join(result.notes)}"] if result.notes else []),
        "## Measured",
        *(f"**{table.title}**\n\n{markdown_table(table)}" for table in result.tables),
        *(f"![{figure}](figures/{name}_{figure}.svg)" for figure in figures),
    ]
    page = folder / f"{name}.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def write_index(root: Path, studies: Iterable[Study]) -> Path:
    """Write `docs/studies/README.md`: every study that has a page, its systems, and how many of its findings hold."""
    folder = root / "docs" / "studies"
    rows = []
    for study in studies:
        stage = study.stage
        path = folder / "results" / f"{stage.name}.json"
        if path.exists():
            findings = json.loads(path.read_text())["findings"]
            holding = sum(finding["holds"] for finding in findings)
            question = study.question
            systems = " ".join(stage.systems)
            rows.append(f"| [{stage.name}]({stage.name}.md) | {systems} | {question} | {holding} of {len(findings)} |")
    head = ["# Studies", "", _INDEX, "", "| study | systems | question | findings that hold |", "|---|---|---|---|"]
    page = folder / "README.md"
    page.write_text("\n".join([*head, *rows]) + "\n")
    return page


def _finding(system: str, claim: str, measured: str, holds: bool) -> str:
    return f"- **{system}, {'holds' if holds else 'does not hold here'}.** {claim} *Measured:* {measured}"


def _hardware() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
