"""Records: the tidy rows of a study as one commit measured them, and the facts of that run. A record stays true.

`studies/records/NAME.parquet` has the rows, `NAME.json` the facts: commit, day, hardware and seconds, the study's
digest of code, its choices, the hashes of its inputs, processor seconds of the training runs that it read, tables of
times that the study kept, and remarks, each with its day. Verdicts, tables and figures are functions of the rows and
are not stored.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import write_text
from mergeflow.errors import MergeflowError
from studies.lab.study import ROWS, Result, read_rows
from studies.lab.study import Study as Declared
from tasks.project.files import read_yaml
from tasks.project.parameters import params_of
from tasks.project.stage import CHOICES, RECORDS, STUDIES, read_record
from tasks.project.studies import Study, load_declaration
from tasks.running.digests import code_digest, code_files

SHOWN = 8  # changed files that are named


@dataclass(frozen=True)
class Record:
    """Where a study's record is, and what it says.

    Attributes:
        rows: the file of the rows.
        facts: of the run that measured them.
    """

    rows: Path
    facts: dict[str, Any]


def find_record(home: Path, name: str) -> Record:
    rows, facts = (home / RECORDS / f"{name}.{ending}" for ending in ("parquet", "json"))
    if not rows.exists():
        raise MergeflowError(
            f"study {name} has no record in {RECORDS}: measure it and keep the rows, `mergeflow study {name} --record`."
        )
    if not facts.exists():
        raise MergeflowError(f"{facts} is missing, which says how the rows beside it were measured: restore it.")
    return Record(rows, json.loads(facts.read_text("utf-8")))


def last_run(study: Study) -> Result:
    """Read a study's last run here, with the project's choices of today."""
    rows, name = study.folder / ROWS, study.stage.name
    if not rows.exists():
        raise MergeflowError(f"study {name} has no rows in {study.folder}: run it, `mergeflow study {name}`.")
    written = (read_yaml(study.root / CHOICES).get("studies") or {}).get(name) or {}
    return _result(study, rows, written)


def recorded(home: Path, study: Study) -> Result:
    """Judge the rows of a study's record by today's rules, with the choices that they were measured with."""
    record, name = find_record(home, study.stage.name), study.stage.name
    return _result(study, record.rows, record.facts["choices"][CHOICES][f"studies.{name}"])


def _result(study: Study, rows: Path, choices: Mapping[str, Any]) -> Result:
    declared = load_declaration(study.root, study.stage.module, study.stage.name)
    assert isinstance(declared, Declared)
    try:
        options = declared.options.model_validate(choices)
    except (MergeflowError, ValueError) as error:
        raise MergeflowError(
            f"{rows}: mergeflow refuses today the choices that these rows were measured with: {error}. Measure again, "
            f"`mergeflow study {study.stage.name} --record`, or mend them in the .json beside it, with a remark."
        ) from error
    return Result(declared, options, read_rows(rows))


def write_record(home: Path, study: Study) -> Path:
    """Keep the rows of a study's last run as its record, and the facts of that run; return the file of the rows.

    Remarks of an earlier record are kept: they have their day.
    """
    name, folder = study.stage.name, home / RECORDS
    last_run(study)  # refuses a study that has not run
    folder.mkdir(parents=True, exist_ok=True)
    path, cost = folder / f"{name}.parquet", read_record(study.root, study.stage.address)
    earlier = json.loads(path.with_suffix(".json").read_text()) if path.with_suffix(".json").exists() else {}
    facts = {
        "commit": _git(home, "rev-parse", "--short", "HEAD"),
        "day": date.today().isoformat(),
        "project": study.root.name if study.root != home else "",
        "seconds": round(cost["seconds"]) if "seconds" in cost else None,
        "hardware": hardware(),
        **_now(study),
        "training": _training(study),
        "tables": cost.get("tables", []),
        "remarks": earlier.get("remarks", []),
    }
    making = path.with_suffix(".new")
    shutil.copy(study.folder / ROWS, making)
    write_text(path.with_suffix(".json"), json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    making.replace(path)
    return path


def changes(home: Path, study: Study) -> list[str]:
    """List the differences between today and a study's record: code, choices, inputs."""
    facts, now = find_record(home, study.stage.name).facts, _now(study)
    differences = [_changed_code(study, facts["commit"])] if facts["code"] != now["code"] else []
    for file, values in now["choices"].items():
        then = facts["choices"].get(file, {})
        if file == "params.yaml":
            values, then = (_with_defaults(study.root, sections) for sections in (values, then))
        differences += [
            f"{file}: {key} was {then.get(key)}, is {values[key]}" for key in values if values[key] != then.get(key)
        ]
    for path, md5 in facts["inputs"].items():
        if md5 and now["inputs"].get(path) != md5:
            differences.append(f"input {path}: {'not made here' if path not in now['inputs'] else 'other content'}")
    return differences


def _changed_code(study: Study, commit: str) -> str:
    """Say which files that decide a study's result, claims and figures among them, differ from those of a commit."""
    files = {path.resolve() for path in code_files(study.root, study.stage)}
    top = Path(_git(study.root, "rev-parse", "--show-toplevel"))
    names = _git(study.root, "diff", "--name-only", commit, "--", ":/").splitlines() if commit else []
    changed = [name for name in names if (top / name).resolve() in files]
    changed.sort(key=lambda name: not name.startswith("studies/"))
    if not changed:
        return "code: other code measured it; which, git does not say here"
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    plural = "" if len(changed) == 1 else "s"
    return f"code: {len(changed)} file{plural} changed since: {', '.join(changed[:SHOWN])}{more}"


def _with_defaults(root: Path, sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in the options that sections leave out, as older ones do; those refused today stay as they are."""
    whole = read_yaml(root / "params.yaml")
    for key, value in sections.items():
        *outer, last = key.split(".")
        place = whole
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    try:
        params = params_of(whole.get("model")).model_validate(whole)
    except (MergeflowError, ValueError):
        return sections
    return {key: params.lookup_json(key) for key in sections}


def _now(study: Study) -> dict[str, Any]:
    """Return the digest of code, the choices and the hashes of inputs that a run of today would have."""
    params: dict[str, dict[str, Any]] = {}
    for key in study.stage.params:
        file, _, name = key.rpartition(":")
        file = file or "params.yaml"
        if file != layout.CODE:
            params.setdefault(file, {})[name] = _lookup(read_yaml(study.root / file), name)
    files = (study.root / name for name in ("dvc.lock", STUDIES.replace(".yaml", ".lock")))
    locks = (read_yaml(file).get("stages", {}) for file in files if file.exists())
    made = {out["path"]: out.get("md5") for lock in locks for stage in lock.values() for out in stage.get("outs", [])}
    inputs = {path: made[path] for path in study.stage.deps if path in made}
    return {"code": code_digest(study.root, study.stage), "choices": params, "inputs": inputs}


def _lookup(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = (values or {}).get(part)
    return values


def _training(study: Study) -> dict[str, int]:
    """Return the processor seconds of each training run that the study read and that was trained here."""
    place = layout.study_run("")
    names = [path.removeprefix(place) for path in study.stage.deps if path.startswith(place)]
    costs = {name: read_record(study.root, f"{STUDIES}:train@{name}").get("training", {}) for name in names}
    return {
        name: round(sum(seed["processor_seconds"] for seed in cost.values())) for name, cost in costs.items() if cost
    }


def _git(folder: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def hardware() -> str:
    """Return the number of cores and the processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
