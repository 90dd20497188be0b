"""A study's page in the docs, from its outputs: its docstring and a remark on the record alone are written by hand."""

import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mergeflow.layout import CODE
from studies.old.results import ROWS, Finding, StudyResult, Table, markdown_table
from studies.old.times import read_costs, read_json, read_times, runs_section, write_json, write_times
from studies.old.verdicts import WORDS
from tasks.project.digests import code_digest
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph
from tasks.project.stage import CHOICES, Stage
from tasks.project.studies import Study

_INDEX = (
    "The papers' experiments, on the project's model and tasks or on small nets and tasks that a study makes itself. "
    "Findings are counted by their verdicts; one that does not hold, or that the seeds leave undecided, is reported "
    "with its numbers. "
    "[Systems](systems.md) lists every claim by the system of the papers that it is of. "
    "`mergeflow study NAME` runs a study; `--document` writes its page and this table; `--rows FILE` hands over the "
    "raw rows of its last run or of its record; `--judge` holds the rows of a record against today's rules and writes "
    "its page anew; neither of the two trains anything. Another model and other tasks are a matter of `params.yaml`."
)
_RECORD = (
    "*Record*: whether a run of the study today would begin from what made the record, by the lock file: *today's* "
    "code, choices and training runs; *older code*; *other choices* than `params.yaml` and `studies/params.yaml` have; "
    "*other runs*, of training runs or a base that the lock file has other bits for, or whose own code or choices are "
    "others today; *not locked*, made by a run that the lock file does not know."
)
_EMBEDDED = "The embedded suite shows mechanisms: do not compare its numbers with tables of papers."
_SYSTEMS = (
    "Every claim of every study by the system of the papers that it is of: G of *On Task Vectors and Gradients*, M of "
    "MIMA, C of CART, L of *Cross-Task Linearity*, P of the provable task vectors, B beyond the papers. Rules and "
    "margins stand on the studies' pages. *Seeds*: distinct seeds in the study's raw rows; a finding on a training run "
    "that took fewer of them has as many as that run, one that counts bytes or compares bits rests on one, and one on "
    "a theorem on the draws that it tells. ± is half a 95 % interval."
)
_EARLIER = (
    "**Recorded earlier.** All that follows was recorded by an earlier version of this study: the text above says what "
    "the study measures today, not what gave these numbers."
)
_JUDGED = (
    "**Judged again.** These verdicts are of {day}, by rules that are younger than the record, from its rows alone. "
    "Tables and figures are as they were recorded, and so is what decides the findings, unless the rows tell it."
)
DAYS = "results/judged.json"
REMARKS = "results/remarks.yaml"
_UNDEFINED = "nan ± nan"


def write_page(root: Path, study: Study) -> Path:
    """Write a study's page, its figures, its result and its rows below `docs/studies`; return the page's path.

    Args:
        root: the folder whose `docs` get the page.
        study: a study that has run.
    """
    folder, name, made = root / "docs" / "studies", study.stage.name, study.folder
    for part in ("figures", "results"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    shutil.copy(made / "result.json", folder / "results" / f"{name}.json")
    if (made / ROWS).exists():
        shutil.copy(made / ROWS, folder / "results" / f"{name}.parquet")
    found = StudyResult.read(made)
    for figure in found.figures:
        shutil.copy(made / f"{figure}.svg", folder / "figures" / figure_file(name, figure))
    write_times(root, study)
    write_json(folder / DAYS, {other: day for other, day in read_days(folder).items() if other != name})
    return render_page(folder, study, found)


def render_page(folder: Path, study: Study, found: StudyResult) -> Path:
    """Write a study's page alone, and return its path.

    Args:
        folder: of the pages.
        study: its name and text.
        found: its recorded result.
    """
    name = study.stage.name
    page = folder / f"{name}.md"
    told = read_days(folder).get(name, ""), read_remarks(folder).get(name, "")
    page.write_text(page_text(study, found, read_times(folder, name), *told))
    return page


def read_remarks(folder: Path) -> dict[str, str]:
    """Return study → what is to be known of its record alone, which is written by hand; none where there is no file."""
    found: dict[str, str] = _read(folder / REMARKS)
    return found


def read_days(folder: Path) -> dict[str, str]:
    """Return study → the day on which its record was judged again; those whose verdicts are as old as they are not."""
    return read_json(folder / DAYS)


def page_text(study: Study, found: StudyResult, times: Sequence[Table] = (), judged: str = "", remark: str = "") -> str:
    """Return a study's page: a function of its docstring, of what was recorded, and of a remark on that.

    Args:
        study: its name and text.
        found: the recorded result.
        times: tables of times and memory, which no result holds, because they differ from run to run.
        judged: the day on which the record was judged again.
        remark: what is to be known of this record alone.
    """
    name, (title, text) = study.stage.name, study.text
    parts = [
        f"# {title}",
        text,
        f"Command: `mergeflow study {name}`. Arguments are chosen on validation, and no label of test decides any. ± "
        "is half a 95 % interval over seeds. Verdicts are made of values that are not rounded: where the printed end "
        f"of an interval stands on its limit, later digits decide.{f' {_EMBEDDED}' if study.is_embedded else ''}",
        *([_EARLIER] if found.earlier else []),
        "## Findings",
        *([_JUDGED.format(day=judged)] if judged else []),
        *(_finding(one) for one in found.findings),
        *([f"**What decides it.** {' '.join(found.notes)}"] if found.notes else []),
        *([f"**Of this record.** {remark}"] if remark else []),
        "## Measured",
        *(_measured(table) for table in (*found.tables, *times)),
        *(f"![{figure}](figures/{figure_file(name, figure)})" for figure in found.figures),
    ]
    return "\n\n".join(parts) + "\n"


def _measured(table: Table) -> str:
    text = markdown_table(table)
    dashed = text.replace(_UNDEFINED, "–")
    told = "" if dashed == text else "\n\n–: not defined, as where a baseline is too small to divide by."
    return f"**{table.title}**\n\n{dashed}{told}"


def figure_file(study: str, figure: str) -> str:
    """Return the name of a figure's file in the docs, fit for a link.

    Example:
        >>> figure_file("pairs", "digits, two layers")
        'pairs_digits_two_layers.svg'
    """
    return f"{study}_{re.sub(r'[^A-Za-z0-9]+', '_', figure)}.svg"


def write_index(root: Path, studies: Collection[Study]) -> Path:
    """Write what stands above the studies' pages, README.md and systems.md; return the path of the first."""
    folder = root / "docs" / "studies"
    page = folder / "README.md"
    page.write_text(index_text(folder, studies))
    (folder / "systems.md").write_text(systems_text(folder, studies))
    return page


def systems_text(folder: Path, studies: Iterable[Study]) -> str:
    """Return the claims by system, from the recorded results in `folder`; studies without one are said to lack it."""
    rows: list[tuple[str, str, str, str, str, str]] = []
    for study in studies:
        name = study.stage.name
        link, path = f"[{name}]({name}.md)", folder / "results" / f"{name}.json"
        if not path.exists():
            rows += [(system, study.question, "not run yet", "", "", name) for system in study.stage.systems]
            continue
        seeds = _seeds(path.with_suffix(".parquet"))
        for one in StudyResult.parse(path.read_text()).findings:
            claim = f"{one.claim} (Ours.)" if one.ours else one.claim
            rows.append((one.system, claim, one.verdict, one.measured, seeds, link))
    rows.sort(key=lambda row: ("GMCLPB".find(row[0][0]), int(re.sub(r"\D", "", row[0]) or 0)))
    heads = ["system", "claim", "verdict", "measured", "seeds", "study"]
    head = ["# Systems", "", _SYSTEMS, "", f"| {' | '.join(heads)} |", "|---|---|---|---|--:|---|"]
    return (
        "\n".join([*head, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)])
        + "\n"
    )


def _seeds(rows: Path) -> str:
    """Return how many distinct seeds the raw rows of a study have; nothing where they have none."""
    import pyarrow.parquet as pq

    if not rows.exists() or "seed" not in pq.read_schema(rows).names:
        return ""
    return str(len(pq.read_table(rows, columns=["seed"])["seed"].drop_null().unique()))


def index_text(folder: Path, studies: Iterable[Study]) -> str:
    """Return the index of the pages in `folder`, from the recorded results."""
    known = list(studies)
    costs, rows = read_costs(folder), []
    for study in known:
        stage = study.stage
        path = folder / "results" / f"{stage.name}.json"
        if path.exists():
            found = Counter(finding.verdict for finding in StudyResult.parse(path.read_text()).findings)
            cost = costs.get(stage.name)
            measured = f"{cost['seconds']} s, {cost['hardware']}" if cost else ""
            locked = record_state(study)
            cells = [f"[{stage.name}]({stage.name}.md)", " ".join(stage.systems), study.question]
            rows.append(f"| {' | '.join([*cells, *(str(found[word]) for word in WORDS.values()), locked, measured])} |")
    heads = ["study", "systems", "question", *WORDS.values(), "record", "time without training runs"]
    embedded = [_EMBEDDED, ""] if any(study.is_embedded for study in known) else []
    head = [f"| {' | '.join(heads)} |", "|---|---|---|--:|--:|--:|---|---|"]
    return (
        "\n".join(["# Studies", "", _INDEX, "", _RECORD, "", *embedded, *head, *rows, "", *runs_section(folder, known)])
        + "\n"
    )


def _finding(one: Finding) -> str:
    rule = f" *Rule:* {one.margin}." if one.margin else ""
    claim = f"{one.claim} (This claim is ours.)" if one.ours else one.claim
    return f"- **{one.system}, {one.verdict}.** {claim}{rule} *Measured:* {one.measured}"


def record_state(study: Study) -> str:
    """Return what the lock file of a study's project says of its record: today's, or in which way it is not."""
    stages = _read(study.root / "studies/dvc.lock").get("stages", {})
    locked = stages.get(study.stage.name)
    if locked is None:
        return "not locked"
    if state := _difference(study.root, locked, study.stage, study.stage.name):
        return state
    everything = [*stages.items(), *_read(study.root / "dvc.lock").get("stages", {}).items()]
    made = {out["path"]: (address, out.get("md5")) for address, stage in everything for out in stage.get("outs", [])}
    read = {used["path"]: used.get("md5") for used in locked.get("deps", []) if used["path"] in made}
    if any(made[path][1] != md5 for path, md5 in read.items()):
        return "other runs"
    for address in stages.keys() & {made[path][0] for path in read}:
        run = _runs(study.root).get(address)
        if run and _difference(study.root, stages[address], run, f"{run.name}.{run.item}"):
            return "other runs"
    return "today's"


def has_other_choices(study: Study) -> bool:
    """Whether a study's own section of studies/params.yaml is another than the one that the lock file has."""
    stages = _read(study.root / "studies/dvc.lock").get("stages", {})
    locked = stages.get(study.stage.name, {}).get("params", {}).get(CHOICES, {})
    own = {key: value for key, value in locked.items() if key.startswith("studies.")}
    return own != _chosen(study.root / CHOICES, own)


def _difference(root: Path, locked: Mapping[str, Any], stage: Stage, key: str) -> str:
    """Return in what a stage differs today from its entry in the lock file, choices or code; "" where in neither.

    Args:
        root: the project folder.
        locked: the entry.
        stage: the stage today.
        key: under what outputs/code.yaml has its digest.
    """
    made = dict(locked.get("params", {}))
    code = made.pop(CODE, {})
    if made != {file: _chosen(root / file, values) for file, values in made.items()}:
        return "other choices"
    return "" if code == {key: code_digest(root, stage, _read)} else "older code"


@cache
def _runs(root: Path) -> dict[str, Stage]:
    """Return the training runs of a project's studies by their names in its lock file."""
    return {stage.address.partition(":")[2]: stage for stage in load_graph(root, studies=True).values() if stage.item}


def _chosen(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values that a file of parameters has for keys such as `studies.mima`."""
    found: dict[str, Any] = {}
    for key in keys:
        value = _read(path)
        for part in key.split("."):
            value = (value or {}).get(part)
        found[key] = value
    return found


@cache
def _read(path: Path) -> Any:
    """Return what a YAML file says, which is read once; nothing where there is none."""
    return read_yaml(path) if path.exists() else {}
