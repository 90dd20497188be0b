"""Register a merge made again from a version's ancestors: one task fewer or more, or one task unlearned."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mergeflow import layout
from registry.candidates import make_candidate
from registry.gates import Decision
from registry.logging import log_pipeline
from registry.pipeline_records import expert_record, method_record, read_json
from registry.promotion import promote, register
from registry.provenance import examples_of
from registry.records import ChildRecord, DatasetRecord, PipelineRecord
from registry.reevaluation import evaluate_version
from registry.store import Store
from registry.versions import REMOVED
from tasks.project.stage import StageIO


@dataclass(frozen=True)
class Rebuilt:
    """What came of it.

    Attributes:
        model: name of the registered model.
        version: number of the registered version.
        new: whether this call made it.
        method: of the merge.
        args: chosen on validation.
        candidates: how many were tried.
        normalised: mean normalised validation accuracy.
        decision: the gates' answer; None when the version was champion already.
        champion: number of the champion now.
    """

    model: str
    version: str
    new: bool
    method: str
    args: dict[str, Any]
    candidates: int
    normalised: float
    decision: Decision | None
    champion: str | None


def register_rebuilt(
    store: Store, name: str, io: StageIO, origin: dict[str, Any], *, promote_it: bool, trained: str | None = None
) -> Rebuilt:
    """Log the run, register the winner as candidate, ask the gates, and promote when told.

    Args:
        store: the open registry.
        name: of the registered model.
        io: the register stage's view of the scratch project in which the merge was made.
        origin: the provenance document, with `kind` and `parent`; the run of a newly trained expert is filled in.
        promote_it: make it champion if the gates let it; else their answer is only logged.
        trained: the task whose expert is new.
    """
    selection = read_json(io, layout.SELECTION)
    logged = log_pipeline(store, _record(origin, selection), list(_children(io, selection, trained)))
    if trained is not None:
        origin["experts"][trained]["run"] = logged.children["expert", trained]
    removed = [origin["parent"]["task"]] if origin["kind"] in ("unmerge", "unlearn") else []
    tags = {REMOVED: json.dumps(removed)} if removed else {}
    candidate = make_candidate(io, selection, origin, logged.run_id, tags)
    version = register(store, name, candidate)
    splits = {task: io.dep(layout.split("validation", task)) for task in selection["tasks"]}
    asked = promote(
        store,
        name,
        version.version,
        io.section("registry"),
        evidence=candidate.evidence,
        reevaluate=lambda number: evaluate_version(store, name, number, splits, candidate.evidence),
        only_ask=not promote_it,
    )
    winner = selection["methods"][selection["winner"]]
    return Rebuilt(
        model=name,
        version=version.version,
        new=version.new,
        method=selection["winner"],
        args=winner["args"],
        candidates=sum(chosen["candidates"] for chosen in selection["methods"].values()),
        normalised=winner["validation"]["normalised"],
        decision=asked.decision,
        champion=asked.champion,
    )


def _record(origin: Mapping[str, Any], selection: Mapping[str, Any]) -> PipelineRecord:
    parent = origin["parent"]
    facts = json.dumps([origin["kind"], parent, selection], sort_keys=True)
    tracked = [origin["base"], *origin["experts"].values()]
    return PipelineRecord(
        name=f"{origin['kind']} {parent['task']}",
        fingerprint=hashlib.sha256(facts.encode()).hexdigest(),
        params={
            "tasks": ",".join(selection["tasks"]),
            "task": parent["task"],
            "from_version": f"{parent['model']}/{parent['version']}",
        },
        metrics={
            f"validation/{method}/{key}": chosen["validation"][key]
            for method, chosen in selection["methods"].items()
            for key in ("mean", "normalised")
        },
        tags={"git_commit": origin["git_commit"], "winner": selection["winner"]},
        dvc={known["path"]: known["dvc"] for known in tracked if known["dvc"]},
        datasets=tuple(_datasets(origin)),
    )


def _datasets(origin: Mapping[str, Any]) -> Iterator[DatasetRecord]:
    for task, known in origin["experts"].items():
        for split, facts in known["splits"].items():
            yield DatasetRecord(
                task=task,
                split=split,
                digest=facts["sha256"],
                path=facts["path"],
                counts={"examples": examples_of(facts)},
            )


def _children(io: StageIO, selection: Mapping[str, Any], trained: str | None) -> Iterator[ChildRecord]:
    if trained is not None:
        yield expert_record(io, trained, {})
    for method, chosen in selection["methods"].items():
        yield method_record(io, method, chosen, {})
