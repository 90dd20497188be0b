"""Stage `register`: log the pipeline's run, register the winner, ask the gates."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml

from registry.gates import Evidence, GateSettings
from registry.records import ChildRecord, DatasetRecord, PipelineRecord

REGISTRATION = "outputs/registration.json"


class StageFiles(Protocol):
    """What the stage is given: paths of declared inputs and outputs, sections of the parameters, cost records."""

    root: Path

    def dep(self, path: str) -> Path: ...
    def out(self, path: str) -> Path: ...
    def section(self, key: str) -> Any: ...
    def cost(self, address: str) -> dict[str, Any]: ...


def run(io: StageFiles) -> None:
    """Write `outputs/registration.json`: the version, its aliases and the gates' decision."""
    from registry.logging import log_pipeline
    from registry.lookup import current
    from registry.promotion import promote, register
    from registry.pyfunc_model import ModelFiles
    from registry.store import connect
    from registry.versions import Candidate

    settings, tasks = io.section("registry"), list(io.section("tasks"))
    selection = _read(io, "outputs/results/selection.json")
    winner = selection["methods"][selection["winner"]]
    record, children = _pipeline_record(io, selection), list(_children(io, selection))
    store = connect(project_root=io.root)
    logged = log_pipeline(store, record, children)
    model = io.section("model")
    candidate = Candidate(
        files=ModelFiles(
            encoder=io.dep(f"outputs/merged/{selection['winner']}.safetensors"),
            heads={task: io.dep(f"outputs/base/heads/{task}.safetensors") for task in tasks},
            architecture=model.architecture,
            pretrained=model.pretrained,
            image_size=_read(io, f"outputs/data/manifests/{tasks[0]}/manifest.json")["image_size"],
            documents={"recipe": winner["recipe"]},
        ),
        evidence=_evidence(io, selection),
        fingerprint=winner["fingerprint"],
        metrics={f"validation/{key}": winner["validation"][key] for key in ("mean", "normalised")},
        run_id=logged.run_id,
        description=f"{selection['winner']} of {', '.join(tasks)}",
    )
    version = register(store, settings.model, candidate)
    gates = GateSettings(**settings.model_dump(exclude={"model"}))
    promotion = promote(store, settings.model, version.version, gates)
    now = current(store, settings.model)
    found = {
        "model": settings.model,
        "version": version.version,
        "aliases": [alias for alias in ("candidate", "champion") if _holds(now, alias, version.version)],
        "champion": now.champion.version if now.champion else None,
        "method": selection["winner"],
        "fingerprint": winner["fingerprint"],
        "decision": None if promotion.decision is None else _plain(promotion.decision),
    }
    io.out(REGISTRATION).write_text(json.dumps(found, indent=1) + "\n")


def is_registered(root: Path) -> bool:
    """Whether the registry configured now holds the version that `outputs/registration.json` speaks of."""
    from registry.lookup import find_by_fingerprint
    from registry.store import connect

    found = json.loads((root / REGISTRATION).read_text())
    return find_by_fingerprint(connect(project_root=root), found["model"], found["fingerprint"]) is not None


def _holds(now: Any, alias: str, version: str) -> bool:
    holder = getattr(now, alias)
    return holder is not None and bool(holder.version == version)


def _plain(decision: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(decision)))
    return {**plain, "reasons": decision.reasons}


def _evidence(io: StageFiles, selection: dict[str, Any]) -> Evidence:
    answers = np.load(io.dep("outputs/results/winner_validation.npz"), allow_pickle=False)
    digests = {task: _split_digest(io, task, "validation") for task in selection["tasks"]}
    return Evidence(
        accuracy=selection["methods"][selection["winner"]]["validation"]["accuracy"],
        expert_accuracy=selection["individual"],
        correct={task: answers[task] for task in selection["tasks"]},
        digests=digests,
    )


def _pipeline_record(io: StageFiles, selection: dict[str, Any]) -> PipelineRecord:
    test = _read(io, "outputs/results/test.json")
    metrics = {f"test/{row['name']}/{key}": row[key] for row in test["rows"] for key in ("mean", "normalised")}
    fine_tuning = io.section("finetune").model_dump()
    params = {f"finetune.{key}": value for key, value in fine_tuning.items()}
    params |= {f"model.{key}": value for key, value in io.section("model").model_dump().items()}
    files = sorted(io.dep("outputs/results/figures").glob("*.svg"))
    return PipelineRecord(
        name="pipeline",
        fingerprint=hashlib.sha256(json.dumps([selection, test], sort_keys=True).encode()).hexdigest(),
        params={**params, "seed": io.section("seed"), "tasks": ",".join(selection["tasks"])},
        metrics=metrics,
        tags={"git_commit": _git_commit(io.root), "winner": selection["winner"]},
        dvc=_dvc_hashes(io.root),
        datasets=tuple(_datasets(io, selection["tasks"])),
        artifacts={
            "figures": tuple(map(str, files)),
            "results": tuple(str(io.dep(f"outputs/results/{name}.json")) for name in ("selection", "test", "geometry")),
        },
    )


def _datasets(io: StageFiles, tasks: list[str]) -> Iterator[DatasetRecord]:
    for task in tasks:
        splits = _read(io, f"outputs/data/manifests/{task}/manifest.json")["splits"]
        for split, facts in splits.items():
            yield DatasetRecord(
                task=task,
                split=split,
                digest=_split_digest(io, task, split),
                path=f"outputs/data/{split}/{task}",
                counts={"images": facts["count"]},
            )


def _split_digest(io: StageFiles, task: str, split: str) -> str:
    facts = _read(io, f"outputs/data/manifests/{task}/manifest.json")["splits"][split]
    return hashlib.sha256((facts["pixels_sha256"] + facts["labels_sha256"]).encode()).hexdigest()


def _children(io: StageFiles, selection: dict[str, Any]) -> Iterator[ChildRecord]:
    test = {row["name"]: row for row in _read(io, "outputs/results/test.json")["rows"]}
    for task in selection["tasks"]:
        summary = _read(io, f"outputs/experts/{task}/training.json")
        curves = ("loss", "gradient_norm", "distance", "validation_accuracy")
        yield ChildRecord(
            kind="expert",
            name=task,
            params={"task": task, "fingerprint": summary["fingerprint"], **summary["settings"]},
            metrics={"test/accuracy": test["individual"]["accuracy"][task], **_seconds(io, f"finetune@{task}")},
            steps=tuple((key, row["steps"], row[key]) for row in summary["epochs"] for key in curves),
        )
    for method, chosen in selection["methods"].items():
        sweep = _read(io, f"outputs/sweeps/{method}.json")
        metrics = {f"validation/{key}": chosen["validation"][key] for key in ("mean", "normalised")}
        metrics |= {f"test/{key}": test[method][key] for key in ("mean", "normalised")}
        metrics |= {f"test/accuracy/{task}": value for task, value in test[method]["accuracy"].items()}
        yield ChildRecord(
            kind="method",
            name=method,
            params={"fingerprint": chosen["fingerprint"], "candidates": chosen["candidates"], **chosen["args"]},
            metrics={**metrics, **_seconds(io, f"sweep@{method}")},
            steps=tuple(
                ("validation/candidate/normalised", number, row["normalised"])
                for number, row in enumerate(sweep["candidates"])
            ),
            artifacts={"sweep": (str(io.dep(f"outputs/sweeps/{method}.json")),)},
        )


def _seconds(io: StageFiles, address: str) -> dict[str, float]:
    cost = io.cost(address)
    return {"seconds": cost["seconds"]} if cost else {}


def _read(io: StageFiles, path: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(io.dep(path).read_text())
    return value


def _dvc_hashes(root: Path) -> dict[str, str]:
    """Return DVC's hash of every output that dvc.lock knows; the flow records them before this stage runs."""
    lock = root / "dvc.lock"
    stages = yaml.safe_load(lock.read_text())["stages"] if lock.exists() else {}
    return {out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", []) if "md5" in out}


def _git_commit(root: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
