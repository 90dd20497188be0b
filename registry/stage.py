"""Stage `register`: log the pipeline's run, register the winner, ask the gates."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from registry.gates import Evidence, GateSettings
from registry.pipeline_records import StageFiles, child_records, pipeline_record, read_json, split_digest

REGISTRATION = "outputs/registration.json"


def run(io: StageFiles) -> None:
    """Write `outputs/registration.json`: the version, its aliases and the gates' decision."""
    from registry.logging import log_pipeline
    from registry.lookup import current
    from registry.promotion import promote, register
    from registry.reevaluation import evaluate_version
    from registry.store import connect

    settings = io.section("registry")
    selection = read_json(io, "outputs/results/selection.json")
    store = connect(project_root=io.root)
    logged = log_pipeline(store, pipeline_record(io, selection), list(child_records(io, selection)))
    candidate = _candidate(io, selection, logged.run_id)
    version = register(store, settings.model, candidate)
    splits = {task: io.dep(f"outputs/data/validation/{task}") for task in selection["tasks"]}
    promotion = promote(
        store,
        settings.model,
        version.version,
        GateSettings(**settings.model_dump(exclude={"model"})),
        reevaluate=lambda number: evaluate_version(store, settings.model, number, splits, candidate.evidence),
    )
    now = current(store, settings.model)
    found = {
        "model": settings.model,
        "version": version.version,
        "aliases": [alias for alias in ("candidate", "champion") if _holds(now, alias, version.version)],
        "champion": now.champion.version if now.champion else None,
        "method": selection["winner"],
        "fingerprint": candidate.fingerprint,
        "decision": None if promotion.decision is None else _plain(promotion.decision),
    }
    io.out(REGISTRATION).write_text(json.dumps(found, indent=1) + "\n")


def _candidate(io: StageFiles, selection: dict[str, Any], run_id: str) -> Any:
    from registry.pyfunc_model import ModelFiles
    from registry.versions import Candidate

    tasks, model = selection["tasks"], io.section("model")
    winner = selection["methods"][selection["winner"]]
    return Candidate(
        files=ModelFiles(
            encoder=io.dep(f"outputs/merged/{selection['winner']}.safetensors"),
            heads={task: io.dep(f"outputs/base/heads/{task}.safetensors") for task in tasks},
            architecture=model.architecture,
            pretrained=model.pretrained,
            image_size=read_json(io, f"outputs/data/manifests/{tasks[0]}/manifest.json")["image_size"],
            documents={"recipe": winner["recipe"]},
        ),
        evidence=_evidence(io, selection),
        fingerprint=winner["fingerprint"],
        metrics={f"validation/{key}": winner["validation"][key] for key in ("mean", "normalised")},
        run_id=run_id,
        description=f"{selection['winner']} of {', '.join(tasks)}",
    )


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
    digests = {task: split_digest(io, task, "validation") for task in selection["tasks"]}
    return Evidence(
        accuracy=selection["methods"][selection["winner"]]["validation"]["accuracy"],
        expert_accuracy=selection["individual"],
        correct={task: answers[task] for task in selection["tasks"]},
        digests=digests,
    )
