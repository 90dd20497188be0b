"""Stage `register`: log the pipeline's run, register the winner, ask the gates."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.documents import Registration, read_registration, write_document
from tasks.project.stage import StageIO

PASSING = ("run", "id", "created", "git_commit")  # in MLflow; `registry lineage` prints them


def run(io: StageIO) -> None:
    """Write `outputs/registration.json`: the version, its aliases, its lineage and the gates' decision."""
    from registry.lineage import lineage
    from registry.logging import log_pipeline
    from registry.provenance import child_records, describe_origin, pipeline_record
    from registry.registration import register_merge
    from registry.store import connect

    model = io.section("registry").model
    selection = json.loads(io.dep(layout.SELECTION).read_text())
    store = connect(project_root=io.root)
    logged = log_pipeline(store, pipeline_record(io, selection), list(child_records(io, selection)))
    runs = {name: run_id for (kind, name), run_id in logged.children.items() if kind == "expert"}
    origin = describe_origin(io, selection, runs)
    version, promotion = register_merge(store, model, io, selection, origin, logged.run_id)
    tree = lineage(store, model, version.version)
    registration: Registration = {
        "model": model,
        "version": version.version,
        "aliases": [alias for alias in ("candidate", "champion") if alias in tree["aliases"]],
        "champion": promotion.champion,
        "method": selection["winner"],
        "fingerprint": version.fingerprint,
        "lineage": _lasting(tree),  # for the report, which asks no registry
        "decision": None if promotion.decision is None else _plain(promotion.decision),
    }
    write_document(io.out(layout.REGISTRATION), json.loads(json.dumps(registration, default=str)))


def is_registered(root: Path) -> bool:
    """Whether the registry configured now holds, files and all, what `outputs/registration.json` speaks of."""
    from registry.store import connect
    from registry.versions import find_registered

    noted = read_registration(root / layout.REGISTRATION)
    tasks = [expert["task"] for expert in noted["lineage"]["experts"]]
    return find_registered(connect(project_root=root), noted["model"], noted["fingerprint"], tasks) is not None


def _plain(decision: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(decision)))
    return {**plain, "reasons": decision.reasons}


def _lasting(tree: Any) -> Any:
    """Return a lineage without what differs from run to run: DVC's outputs are the same for the same inputs."""
    if isinstance(tree, dict):
        return {key: _lasting(value) for key, value in tree.items() if key not in PASSING}
    return [_lasting(value) for value in tree] if isinstance(tree, list) else tree
