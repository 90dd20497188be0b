"""Whether new code makes the bits of the previous release, stage by stage, on small projects of every regime.

What is shown equal gets the older code's digest, so that an upgrade runs none of it again. Equal outputs prove nothing
of a function that no run has entered: a stage whose code changed in such a function stays stale.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml

from mergeflow.application import HOME, TEMPLATE
from mergeflow.errors import MergeflowError
from mergeflow.training.settings import Regime
from tasks.project.graph import load_graph
from tasks.project.new import modalities
from tasks.running.digests import code_files, meaning_of_functions
from tasks.running.scratch_project import link, write_params

_STAGES = ("prepare", "base", "multitask", "finetune", "vectors", "sweep", "select", "evaluate", "figures")
_DRIVER = """
import json, sys, threading
from pathlib import Path
entered, imported = set(), set()
def enter(frame, event, argument):
    if event == "call":
        code = frame.f_code
        (imported if code.co_name == "<module>" else entered).add((code.co_filename, code.co_qualname))
threading.setprofile(enter)
sys.setprofile(enter)
from mergeflow.application import HOME, make_importable
make_importable()
from tasks.project.graph import load_graph
try:
    from tasks.running.digests import code_digest
    from tasks.running.runner import digest, run_stage
except ModuleNotFoundError:  # before these modules had a folder of their own
    from tasks.project.digests import code_digest
    from tasks.project.runner import digest, run_stage

report, homes = {}, (str(HOME), str(Path(sys.modules["mergeflow"].__file__).parent.parent))
for root in map(Path, sys.argv[3:]):
    for address, stage in load_graph(root).items():
        if stage.name in sys.argv[2].split(","):
            entered.clear()
            sys.setprofile(enter)
            run_stage(root, stage)
            names = {f"{file.removeprefix(home).lstrip('/')}:{name}"
                     for file, name in entered | imported for home in homes if file.startswith(home)}
            outs = {out: digest(root / out) for out in stage.outs}
            code = code_digest(root, stage)
            report[f"{root.name} {address}"] = {"code": code, "outs": outs, "entered": sorted(names)}
Path(sys.argv[1]).write_text(json.dumps(report))
"""


@dataclass(frozen=True)
class Proof:
    """What was found of one stage's code: the two digests, and why its older outputs do not count; none: they do."""

    stage: str
    older: str
    newer: str
    faults: tuple[str, ...]


def check_release(
    older: Path, folder: Path, projects: Iterable[Path] = (), regimes: Iterable[str] = get_args(Regime)
) -> list[Proof]:
    """Run small projects by the code of the previous release and by this one, and compare what their stages made.

    Args:
        projects: more projects, of other modalities say, that are run by both from the beginning, in copies.
    """
    home = _unpacked(older, folder / "older")
    choices = {f"toy-{regime}": _toy(regime) for regime in regimes}
    choices |= {path.name: (path, yaml.safe_load((path / "params.yaml").read_text("utf-8"))) for path in projects}
    first, second = (_run(code, folder / name, choices) for name, code in (("by-older", home), ("by-newer", HOME)))
    pairs: dict[tuple[str, str, str], list[str]] = {}
    for key, made in second.items():
        stage = key.partition(" ")[2].partition("@")[0]
        pairs.setdefault((stage, first[key]["code"], made["code"]), []).append(key)
    return [
        Proof(*names, tuple(_faults(home, _files(folder / "by-newer", keys), [(first[k], second[k], k) for k in keys])))
        for names, keys in sorted(pairs.items())
        if names[1] != names[2]
    ]


def _files(folder: Path, keys: list[str]) -> set[str]:
    """Return the files that decide the digest of stages, relative to this code."""
    files: set[Path] = set()
    for name, _, address in (key.partition(" ") for key in keys):
        files |= code_files(folder / name, load_graph(folder / name)[address])
    return {path.relative_to(HOME).as_posix() for path in files if path.is_relative_to(HOME)}


def _faults(home: Path, files: Iterable[str], runs: list[tuple[Any, Any, str]]) -> Iterable[str]:
    for first, other, key in runs:
        yield from (f"{key}: {out} differs" for out, made in first["outs"].items() if other["outs"].get(out) != made)
    entered = {name for _, made, _ in runs for name in made["entered"]}
    changed = {name for file in files for name in _changed(home, file)}
    yield from (f"{name} has changed and no run entered it" for name in sorted(changed - entered))


def _changed(home: Path, file: str) -> set[str]:
    older = home / file if (home / file).is_file() else home.parents[1] / file  # in a wheel the library lies above
    if not file.endswith(".py"):
        return set() if older.is_file() and older.read_bytes() == (HOME / file).read_bytes() else {file}
    now, before = _functions(HOME / file), _functions(older)
    return {f"{file}:{name}" for name, meaning in now.items() if before.get(name) != meaning}


@cache
def _functions(path: Path) -> Mapping[str, str]:
    return meaning_of_functions(path.read_bytes()) if path.is_file() else {}


def _toy(regime: str) -> tuple[Path, dict[str, Any]]:
    values = yaml.safe_load(modalities()["toy"].read_text("utf-8").replace("$NAME", "release"))
    values["finetune"] |= {"regime": regime, "steps": 20}
    values["run"]["device"] = "cpu"
    return TEMPLATE, values


def _run(home: Path, folder: Path, projects: Mapping[str, tuple[Path, Any]]) -> Any:
    roots = []
    for name, (source, values) in projects.items():
        roots.append(folder / name)
        roots[-1].mkdir(parents=True)
        shutil.copy(source / "dvc.yaml", roots[-1])
        write_params(roots[-1], values)
        if (source / "inputs").exists():
            link(source / "inputs", roots[-1] / "inputs")
    report = folder / "report.json"
    path = os.pathsep.join([str(home), *([str(home.parents[1])] if home.name == "application" else [])])
    command = [sys.executable, "-c", _DRIVER, str(report), ",".join(_STAGES), *map(str, roots)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MergeflowError(f"the small projects do not run by the code in {home}: {done.stderr.strip()[-2000:]}")
    return json.loads(report.read_text())


def _unpacked(older: Path, folder: Path) -> Path:
    """Return the folder that holds the packages of a release."""
    if older.suffix == ".whl":
        with zipfile.ZipFile(older) as files:
            files.extractall(folder)
        older = folder / "mergeflow/application"
    if not (older / "tasks/project/graph.py").exists():
        raise MergeflowError(f"'{older}' is not mergeflow: give a wheel of the previous release, or its checkout.")
    return older.resolve()
