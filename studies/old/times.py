"""What the studies and their training runs took, which lies beside the results: it differs from run to run."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergeflow import layout
from studies.old.results import Table
from tasks.project.stage import STUDIES, read_record
from tasks.project.studies import Study

_COSTS = "results/costs.json"
_RUNS = "results/runs.json"
_ABOUT = (
    "What the studies' times leave out: every run is trained once and read by all studies that name it. *Processor*: "
    "seconds of one core that the training of all its seeds and tasks took."
)


def write_times(root: Path, study: Study) -> None:
    """Write below `docs/studies` what a study took that has run here, and each training run of its that has.

    Args:
        root: the folder whose `docs` have the pages.
        study: whose stages have records; those that lack one keep what is written of them.
    """
    folder, name, on = root / "docs" / "studies", study.stage.name, hardware()
    record = read_record(study.root, study.stage.address)
    if "seconds" in record:
        tables = {"tables": record["tables"]} if "tables" in record else {}
        entry = {"seconds": round(record["seconds"]), "hardware": on, **tables}
        write_json(folder / _COSTS, read_costs(folder) | {name: entry})
    made = {run: read_record(study.root, f"{STUDIES}:train@{run}") for run in _runs_of(study)}
    entries = {
        f"{_place(root, study)}{run}": {
            "processor_seconds": round(sum(one["processor_seconds"] for one in record["training"].values())),
            "hardware": on,
        }
        for run, record in made.items()
        if "training" in record
    }
    if entries:
        write_json(folder / _RUNS, read_json(folder / _RUNS) | entries)


def read_json(path: Path) -> dict[str, Any]:
    """Return the entries that `write_json` wrote; none where there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write one entry for each study, or run, into a file beside the results."""
    path.write_text(json.dumps(dict(sorted(values.items())), indent=1, ensure_ascii=False) + "\n")


def read_costs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return study → `seconds`, `hardware` and perhaps `tables`; `folder` has the pages."""
    return read_json(folder / _COSTS)


def read_times(folder: Path, study: str) -> list[Table]:
    """Return a study's tables of times and memory, which lie beside the results."""
    return [Table(**table) for table in read_costs(folder).get(study, {}).get("tables", [])]


def runs_section(folder: Path, studies: Sequence[Study]) -> list[str]:
    """Return the index's lines on the training runs, and what all studies and runs took together.

    Args:
        folder: of the pages.
        studies: all that the index lists.
    """
    root, costs, times = folder.parents[1], read_costs(folder), read_json(folder / _RUNS)
    readers: dict[str, list[str]] = {}
    for study in studies:
        for run in _runs_of(study):
            readers.setdefault(f"{_place(root, study)}{run}", []).append(study.stage.name)
    rows = [
        f"| {run} | {', '.join(names)} | {times.get(run, {}).get('processor_seconds', '')} | "
        f"{times.get(run, {}).get('hardware', '')} |"
        for run, names in sorted(readers.items())
    ]
    known = [times[run]["processor_seconds"] for run in readers if run in times]
    clock = hours(one["seconds"] for one in costs.values())
    total = (
        f"All studies add up to {clock} by the clock, beside other work at times; "
        f"the training runs to {hours(known)} of one core ({len(known)} of {len(readers)} are on record)."
    )
    head = ["| run | read by | processor, s | on |", "|---|---|--:|---|"]
    return ["## Training runs", "", _ABOUT, "", total, "", *head, *rows]


def _runs_of(study: Study) -> list[str]:
    place = layout.study_run("")
    return [path.removeprefix(place) for path in study.stage.deps if path.startswith(place)]


def _place(root: Path, study: Study) -> str:
    """Return what stands before a world's runs, as `worlds/pocket20/`; nothing for those of the project in `root`."""
    inside = study.root != root and study.root.is_relative_to(root)
    return f"{study.root.relative_to(root).as_posix()}/" if inside else ""


def hours(seconds: Iterable[float]) -> str:
    """Return a sum of seconds as hours and minutes.

    Example:
        >>> hours([3600, 299])
        '1 h 05 min'
    """
    minutes = round(sum(seconds) / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def hardware() -> str:
    """Return the number of cores and the processor's name, as the pages say on what a study ran."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
