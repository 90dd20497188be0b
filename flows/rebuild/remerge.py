"""Merge a version's experts again in a scratch project, with other tasks or candidates, chosen on validation."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flows.rebuild.ancestors import base_of, expert_of, gather, link_files, split_of
from mergeflow import layout
from registry.lookup import download, head_files
from registry.store import Store
from tasks.project.beside import write_params
from tasks.project.files import read_yaml
from tasks.project.graph import find_stage, load_graph
from tasks.project.parameters import load_params
from tasks.project.runner import open_stage, run_stage
from tasks.project.stage import STATE, Stage, StageIO, covers
from tasks.sweep import sweep_near

Grids = Mapping[str, Mapping[str, list[Any]]]


def lay_out(root: Path, store: Store, name: str, version: str, origin: dict[str, Any], scratch: Path) -> None:
    """Put a version's base, heads, experts and validation splits into the scratch project, each proven by its digest.

    Args:
        root: the project folder.
        store: the open registry.
        name: of the registered model.
        version: whose heads are taken.
        origin: the provenance document; its `experts` say which tasks.
        scratch: the scratch project.

    Raises:
        MergeflowError: naming every ancestor that is nowhere.
    """
    tasks = origin["experts"]
    wanted = [base_of(origin)]
    wanted += [one for task in tasks for one in (expert_of(origin, task), split_of(origin, task, "validation"))]
    gather(root, wanted, scratch)
    heads = head_files(download(store, name, version, scratch / "registered"))
    for task, known in tasks.items():
        link_files(heads[task].parent, scratch / known["path"], {heads[task].name: layout.HEAD_FILE})
        link_manifest(scratch / layout.split("validation", task), scratch, task)
        summary = {key: known[key] for key in ("fingerprint", "settings", "validation_accuracy")}
        (scratch / known["path"] / "training.json").write_text(json.dumps({"task": task, **summary}))


def link_manifest(folder: Path, scratch: Path, task: str) -> None:
    """Put the manifest that lies with a split where the stages look for manifests.

    Args:
        folder: the split's folder, with its manifest.
        scratch: the project folder in which the merge is made again.
        task: the task's name.
    """
    link_files(folder, scratch / layout.manifest_folder(task), {"manifest.json": "manifest.json"})


def choose(
    root: Path,
    scratch: Path,
    origin: Mapping[str, Any],
    sweep: Grids,
    report: Callable[[str], None],
    near: Mapping[str, Any] | None = None,
) -> None:
    """Score candidates on validation and write the chosen merges, by the pipeline's own stages.

    Args:
        root: the project folder, whose params.yaml holds all but the tasks, the model and the sweep.
        scratch: the scratch project, laid out.
        origin: the provenance document.
        sweep: method to argument to values.
        report: told what is being done.
        near: a recipe; then only its method is tried, by a climb from its arguments.
    """
    values = read_yaml(root / "params.yaml")
    sources = {task: known["source"] for task, known in origin["experts"].items()}
    grids = {name: dict(grid) for name, grid in sweep.items() if near is None or name == near["method"]}
    write_params(scratch, {**values, "tasks": sources, "model": origin["params"]["model"], "sweep": grids})
    stages = load_graph(scratch)
    for method in grids:
        report(f"scoring candidates of {method}")
        stage = find_stage(stages, "sweep", method)
        if near is None:
            run_stage(scratch, stage)
        else:
            sweep_near(open_stage(scratch, stage)[0], near["args"])
    report("choosing")
    run_stage(scratch, find_stage(stages, "select", None))


def register_view(scratch: Path) -> StageIO:
    """Return what the stage `register` would be given in the scratch project."""
    params = load_params(scratch / "params.yaml")
    stage = find_stage(load_graph(scratch), "register", None)
    return StageIO(stage, scratch, scratch / STATE / "scratch" / "register", params)


def stage_making(path: str, stages: Mapping[str, Stage]) -> Stage:
    """Return the stage whose output `path` is, or lies in."""
    return next(stage for stage in stages.values() if any(covers(out, path) for out in stage.outs))
