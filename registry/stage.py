"""Stage `register`: log the pipeline's run, register the winner, ask the gates."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.documents import Registration, read_registration, write_document
from registry.pipeline_records import child_records, pipeline_record, read_json
from tasks.project.stage import StageIO

PASSING = ("run", "id", "created", "git_commit")  # in MLflow; `registry lineage` prints them


def run(io: StageIO) -> None:
    """Write `outputs/registration.json`: the version, its aliases, its lineage and the gates' decision."""
    from registry.candidates import make_candidate
    from registry.lineage import lineage
    from registry.logging import log_pipeline
    from registry.lookup import current
    from registry.promotion import promote, register
    from registry.provenance import describe_origin
    from registry.reevaluation import evaluate_version
    from registry.store import connect

    settings = io.section("registry")
    selection = read_json(io, layout.SELECTION)
    store = connect(project_root=io.root)
    logged = log_pipeline(store, pipeline_record(io, selection), list(child_records(io, selection)))
    runs = {name: run_id for (kind, name), run_id in logged.children.items() if kind == "expert"}
    candidate = make_candidate(io, selection, describe_origin(io, selection, runs), logged.run_id)
    version = register(store, settings.model, candidate)
    splits = {task: io.dep(layout.split("validation", task)) for task in selection["tasks"]}
    promotion = promote(
        store,
        settings.model,
        version.version,
        settings,
        evidence=candidate.evidence,
        reevaluate=lambda number: evaluate_version(store, settings.model, number, splits, candidate.evidence),
    )
    now = current(store, settings.model)
    found: Registration = {
        "model": settings.model,
        "version": version.version,
        "aliases": [alias for alias in ("candidate", "champion") if _holds(now, alias, version.version)],
        "champion": now.champion.version if now.champion else None,
        "method": selection["winner"],
        "fingerprint": version.fingerprint,
        "lineage": _lasting(lineage(store, settings.model, version.version)),  # for the report, which asks no registry
        "decision": None if promotion.decision is None else _plain(promotion.decision),
    }
    write_document(io.out(layout.REGISTRATION), json.loads(json.dumps(found, default=str)))


def is_registered(root: Path) -> bool:
    """Whether the registry configured now holds, files and all, what `outputs/registration.json` speaks of."""
    from registry.lookup import find_registered
    from registry.store import connect

    found = read_registration(root / layout.REGISTRATION)
    tasks = [expert["task"] for expert in found["lineage"]["experts"]]
    return find_registered(connect(project_root=root), found["model"], found["fingerprint"], tasks) is not None


def _holds(now: Any, alias: str, version: str) -> bool:
    holder = getattr(now, alias)
    return holder is not None and bool(holder.version == version)


def _plain(decision: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(decision)))
    return {**plain, "reasons": decision.reasons}


def _lasting(tree: Any) -> Any:
    """Return a lineage without what differs from run to run: DVC's outputs are the same for the same inputs."""
    if isinstance(tree, dict):
        return {key: _lasting(value) for key, value in tree.items() if key not in PASSING}
    return [_lasting(value) for value in tree] if isinstance(tree, list) else tree
