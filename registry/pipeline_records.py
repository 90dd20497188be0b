"""The records of a pipeline's run, filled from its outputs."""

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.data import digest_of_split, load_manifest
from registry.records import ChildRecord, DatasetRecord, PipelineRecord
from tasks.project.dvc_lock import locked_stages
from tasks.project.stage import StageIO

_CODE = ("mergeflow", "tasks", "registry", "flows", "suites", "params.yaml", "dvc.yaml")


def pipeline_record(io: StageIO, selection: dict[str, Any]) -> PipelineRecord:
    """Return the pipeline's run: parameters, test figures, data sets, DVC's hashes, figures and results."""
    test = read_json(io, layout.TEST)
    metrics = {f"test/{row['name']}/{key}": row[key] for row in test["rows"] for key in ("mean", "normalised")}
    fine_tuning = io.section("finetune").model_dump()
    params = {f"finetune.{key}": value for key, value in fine_tuning.items()}
    params |= {f"model.{key}": value for key, value in io.section("model").model_dump().items()}
    files = sorted(io.dep(layout.FIGURES).glob("*.svg"))
    return PipelineRecord(
        name="pipeline",
        fingerprint=hashlib.sha256(json.dumps([selection, test], sort_keys=True).encode()).hexdigest(),
        params={**params, "seed": io.section("seed"), "tasks": ",".join(selection["tasks"])},
        metrics=metrics,
        tags={"git_commit": git_commit(io.root), "winner": selection["winner"]},
        dvc=dvc_hashes(io.root),
        datasets=tuple(_datasets(io, selection["tasks"])),
        artifacts={
            "figures": tuple(map(str, files)),
            "series": tuple(str(path) for path in sorted(io.dep(layout.SERIES).glob("*.json"))),
            "results": tuple(str(io.dep(path)) for path in (layout.SELECTION, layout.TEST, layout.GEOMETRY)),
        },
    )


def _datasets(io: StageIO, tasks: list[str]) -> Iterator[DatasetRecord]:
    for task in tasks:
        splits = read_json(io, layout.manifest(task))["splits"]
        for split, facts in splits.items():
            yield DatasetRecord(
                task=task,
                split=split,
                digest=split_digest(io, task, split),
                path=layout.split(split, task),
                counts={"examples": facts["count"]},
            )


def split_digest(io: StageIO, task: str, split: str) -> str:
    """Return one SHA-256 for the arrays of a split.

    Args:
        io: the stage's files.
        task: the task's name.
        split: train, validation or test.
    """
    return digest_of_split(load_manifest(io.dep(layout.manifest_folder(task)))["splits"][split])


def child_records(io: StageIO, selection: dict[str, Any]) -> Iterator[ChildRecord]:
    """Yield the run of each expert and of each method."""
    test = {row["name"]: row for row in read_json(io, layout.TEST)["rows"]}
    for task in selection["tasks"]:
        yield expert_record(io, task, {"test/accuracy": test["individual"]["accuracy"][task]})
    for method, chosen in selection["methods"].items():
        figures = {f"test/{key}": test[method][key] for key in ("mean", "normalised")}
        figures |= {f"test/accuracy/{task}": value for task, value in test[method]["accuracy"].items()}
        yield method_record(io, method, chosen, figures)


def expert_record(io: StageIO, task: str, metrics: Mapping[str, float]) -> ChildRecord:
    """Return the run of one expert: its settings, its curves and the metrics given.

    Args:
        io: the stage's files.
        task: the task's name.
        metrics: figures of the expert that stand elsewhere, such as its test accuracy.
    """
    summary = read_json(io, layout.expert_training(task))
    curves = ("loss", "gradient_norm", "distance", "validation_accuracy")
    return ChildRecord(
        kind="expert",
        name=task,
        params={"task": task, "fingerprint": summary["fingerprint"], **summary["settings"]},
        metrics={**metrics, **_seconds(io, f"finetune@{task}")},
        steps=tuple((key, row["steps"], row[key]) for row in summary["epochs"] for key in curves if key in row),
    )


def method_record(io: StageIO, method: str, chosen: Mapping[str, Any], metrics: Mapping[str, float]) -> ChildRecord:
    """Return the run of one method's sweep: the choice, every candidate's score and the metrics given.

    Args:
        io: the stage's files.
        method: the method's name.
        chosen: what was chosen of it on validation: a line of `methods` of the selection.
        metrics: figures of the chosen merge that stand elsewhere, such as its test accuracy.
    """
    sweep = read_json(io, layout.sweep(method))
    own = {f"validation/{key}": chosen["validation"][key] for key in ("mean", "normalised")}
    return ChildRecord(
        kind="method",
        name=method,
        params={"fingerprint": chosen["fingerprint"], "candidates": chosen["candidates"], **chosen["args"]},
        metrics={**own, **metrics, **_seconds(io, f"sweep@{method}")},
        steps=tuple(
            ("validation/candidate/normalised", number, row["normalised"])
            for number, row in enumerate(sweep["candidates"])
        ),
        artifacts={"sweep": (str(io.dep(layout.sweep(method))),)},
    )


def _seconds(io: StageIO, address: str) -> dict[str, float]:
    cost = io.cost(address)
    return {"seconds": cost["seconds"]} if cost else {}


def read_json(io: StageIO, path: str) -> dict[str, Any]:
    """Return the content of a declared JSON file."""
    value: dict[str, Any] = json.loads(io.dep(path).read_text())
    return value


def dvc_hashes(root: Path) -> dict[str, str]:
    """Return DVC's hash of every output that dvc.lock knows; the flow records them before this stage runs."""
    outs = (out for stage in locked_stages(root).values() for out in stage.get("outs", []))
    return {out["path"]: out["md5"] for out in outs if "md5" in out}


def git_commit(root: Path) -> str:
    """Return the commit that is checked out, and say when the project's code or parameters differ from it."""
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD").strip()
    if not commit:
        return "unknown"
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return f"{commit} with local changes" if changes.strip() else commit


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout
