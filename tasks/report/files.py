"""What a finished run left on disk, as the report needs it: two files must be there, everything else may."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mergeflow import layout
from mergeflow.documents import (
    Document,
    Geometry,
    Manifest,
    Registration,
    Selection,
    StageCost,
    Sweep,
    Test,
    Training,
    read_document,
)
from mergeflow.errors import MergeflowError
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph
from tasks.project.stage import STATE

Json = Mapping[str, Any]
READ = (layout.SELECTION, layout.TEST, layout.SWEEPS, layout.GEOMETRY, layout.REGISTRATION, layout.FIGURES)


@dataclass(frozen=True)
class RunFiles:
    """The files of one run, read.

    Attributes:
        params: params.yaml, but model, tasks and seed of the run as far as it wrote them down.
        sweeps: method to its scored candidates; those of a method that has none are left out.
        registration: what became of the winner in the registry; None where the file is missing.
        costs: a record per stage that has one, in the order in which they started.
    """

    params: Json
    selection: Json
    test: Json
    sweeps: Mapping[str, Json]
    experts: Mapping[str, Json]
    manifests: Mapping[str, Json]
    geometry: Json | None
    registration: Json | None
    costs: list[Json]
    figures: Mapping[str, str]


def read_run(root: Path) -> RunFiles:
    selection, test = _required(root, layout.SELECTION, Selection), _required(root, layout.TEST, Test)
    _check_one_run(selection, test)
    tasks = selection["tasks"]
    experts = _each(root, layout.expert_training, tasks, Training)
    sweeps = _each(root, layout.sweep, selection["methods"], Sweep)
    _check_whole(selection, test, sweeps)
    figures = sorted((root / layout.FIGURES).glob("*.svg"))
    return RunFiles(
        params=_params(root) | _of_run(test, experts),
        selection=selection,
        test=test,
        sweeps=sweeps,
        experts=experts,
        manifests=_each(root, layout.manifest, tasks, Manifest),
        geometry=_optional(root / layout.GEOMETRY, Geometry),
        registration=_optional(root / layout.REGISTRATION, Registration),
        costs=_costs(root),
        figures={path.stem: _figure(path) for path in figures},
    )


def _check_whole(selection: Json, test: Json, sweeps: Mapping[str, Json]) -> None:
    """Refuse documents that lack a task, or a model that others name."""
    tasks, methods = {*selection["tasks"]}, selection["methods"]
    names = {row["name"] for row in test["rows"]}
    of_tasks = {
        layout.SELECTION: [selection["individual"], *(each["validation"]["accuracy"] for each in methods.values())]
    }
    of_tasks[layout.TEST] = [test["examples"], *(row["accuracy"] for row in test["rows"])]
    of_tasks |= {
        layout.sweep(name): [each["accuracy"] for each in sweep["candidates"]] for name, sweep in sweeps.items()
    }
    faults = [path for path, parts in of_tasks.items() if not all(tasks <= part.keys() for part in parts)]
    faults += [layout.TEST] * (not names >= {"individual", *methods} or not names & {"zero_shot", "base"})
    faults += [layout.SELECTION] * (not tasks or selection["winner"] not in methods)
    for name, sweep in sweeps.items():
        arguments = [each["args"].keys() for each in sweep["candidates"]]
        faults += [layout.sweep(name)] * (not arguments or any(keys != arguments[0] for keys in arguments))
    if faults:
        raise MergeflowError(
            f"{faults[0]} lacks a task or a model of this run: remove it, and `mergeflow run` makes it again."
        )


def _params(root: Path) -> dict[str, Any]:
    params = read_yaml(root / "params.yaml")
    if not isinstance(params, dict) or not all(isinstance(params.get(key, {}), dict) for key in ("model", "tasks")):
        raise MergeflowError("params.yaml is no mapping of sections: `mergeflow check` says what is wrong.")
    return params


def _figure(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        ElementTree.fromstring(text)
    except (ValueError, ElementTree.ParseError) as error:
        raise MergeflowError(
            f"{path.name} is not what its stage wrote ({error}): remove it, and `mergeflow run` makes it again."
        ) from None
    return text


def _check_one_run(selection: Json, test: Json) -> None:
    """Refuse choices that are newer than the look at test: `evaluate` has not run since, or was stopped."""
    chosen = {name: choice["args"] for name, choice in selection["methods"].items()}
    judged = {row["name"]: row["args"] for row in test["rows"] if row["name"] in chosen}
    if (selection["winner"], selection["tasks"], chosen) != (test["winner"], test["tasks"], judged):
        raise MergeflowError(
            f"{layout.SELECTION} and {layout.TEST} are of two runs, whose methods, arguments or tasks differ: "
            "bring the second up to date with `mergeflow run`."
        )


def _of_run(test: Json, experts: Mapping[str, Json]) -> dict[str, Any]:
    """Return the run's record of model, tasks and seed; nothing of a run of older code, which wrote none."""
    about = {key: test[name] for key, name in (("model", "model"), ("tasks", "sources")) if name in test}
    seeds = sorted({expert["seed"] for expert in experts.values() if "seed" in expert})
    return about | ({"seed": ", ".join(map(str, seeds))} if seeds else {})


def _costs(root: Path) -> list[Json]:
    """Return the stages' cost records; records of stages that the graph no longer has are of another run."""
    stages = {stage.folder_name for stage in load_graph(root).values()} if (root / "dvc.yaml").exists() else None
    paths = [path for path in (root / STATE / "records").glob("*.json") if stages is None or path.stem in stages]
    records = (_optional(path, StageCost) for path in paths)
    return sorted((record for record in records if record), key=lambda record: record["started"])


def _each(root: Path, place: Callable[[str], str], names: Any, kind: type[Document]) -> dict[str, Document]:
    records = {name: _optional(root / place(name), kind) for name in names}
    return {name: record for name, record in records.items() if record is not None}


def _required(root: Path, path: str, kind: type[Document]) -> Document:
    record = _optional(root / path, kind)
    if record is None:
        raise MergeflowError(f"nothing to report, {path} is missing: run the pipeline first with `mergeflow run`.")
    return record


def _optional(path: Path, kind: type[Document]) -> Document | None:
    return read_document(path, kind) if path.exists() else None
