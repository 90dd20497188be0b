"""Stage `register`: prove that the winner's recipe makes it, register it, evaluate the champion, ask the gates."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from mlflow.entities.model_registry import ModelVersion

from mergeflow import layout
from mergeflow.analysis.provable.criteria import Criterion
from mergeflow.checkpoints import matches, open_checkpoint
from mergeflow.checkpoints.fingerprint import short
from mergeflow.data import digest_of_split, load_manifest
from mergeflow.documents import Registration, write_document
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import example_scores
from mergeflow.evaluation.accuracy import read_scores
from mergeflow.merging import Merged, make_recipe, merge
from mergeflow.modalities.serving import read_model
from mergeflow.training.arithmetic import arithmetic
from registry.artifacts import ModelFiles, read_evidence
from registry.gates import Decision, Evidence
from registry.lineage import (
    PROVENANCE,
    child_records,
    dataset_records,
    describe_origin,
    expert_record,
    lineage,
    method_record,
    pipeline_record,
    read_json,
)
from registry.logging import ChildRecord, PipelineRecord, log_pipeline
from registry.promotion import Candidate, Promotion, promote, register
from registry.store import Store, connect
from registry.versions import METHOD, REMOVED, RegisteredVersion, download_model, find_stored
from tasks.models import expert_head_path
from tasks.project.parameters import EvaluationSection
from tasks.project.stage import StageIO

PASSING = ("run", "id", "created", "host", "git_commit")  # in MLflow; `registry lineage` prints them


def run(io: StageIO) -> None:
    """Write `outputs/registration.json`: the version, its aliases, its lineage and the gates' decision."""
    model, selection = io.section("registry").model, read_json(io, layout.SELECTION)
    store, origin = connect(project_root=io.root), describe_origin(io, selection)
    records = pipeline_record(io, selection, origin), list(child_records(io, selection))
    version, promotion = _register(store, model, io, selection, origin, records)
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


def _plain(decision: Any) -> Any:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(decision)))
    return {**plain, "reasons": decision.reasons}


def _lasting(tree: Any) -> Any:
    """Return a lineage without what differs from run to run: DVC's outputs are the same for the same inputs."""
    if isinstance(tree, dict):
        return {key: _lasting(value) for key, value in tree.items() if key not in PASSING}
    return [_lasting(value) for value in tree] if isinstance(tree, list) else tree


def replay(recipe: Mapping[str, Any], root: Path, out: Path) -> tuple[Merged, tuple[str, ...]]:
    """Merge by a recorded recipe, piece by piece, from inputs below `root`.

    The engine differs from that of the stage `select` (streaming against in memory), so equal bytes say more than that
    a computation was repeated.

    Args:
        recipe: `method`, `args`, `weights` where they are not all 1, `code` of methods from outside the package, `base`
            and `experts` (paths below `root`), `fingerprints` of the experts and `base_fingerprint`, as the stage
            `select` records them.

    Returns:
        The merge, and the inputs ("base" or a task) whose fingerprint is not the recorded one, sorted.
    """
    experts = {task: str(root / path) for task, path in recipe["experts"].items()}
    same = {key: recipe[key] for key in ("method", "args", "weights", "code") if key in recipe}
    again = make_recipe({**same, "base": str(root / recipe["base"]), "experts": experts}, "the version's recipe")
    recorded = {**recipe["fingerprints"], "base": recipe["base_fingerprint"]}
    made = merge(again, out)
    return made, tuple(sorted(name for name, fingerprint in made.inputs.items() if recorded[name] != fingerprint))


def make_candidate(
    io: StageIO,
    selection: Mapping[str, Any],
    origin: Mapping[str, Any],
    run_id: str | None,
    tags: Mapping[str, str] | None = None,
) -> Candidate:
    """Build the candidate to register; the winner is merged once more by its recipe, which costs about one merge."""
    tasks = selection["tasks"]
    manifests = {task: load_manifest(io.dep(layout.manifest_folder(task))) for task in tasks}
    winner = selection["methods"][selection["winner"]]
    with open_checkpoint(io.dep(layout.BASE_MODEL)) as base:
        record = base.metadata
    weights, scores = io.dep(layout.merge(selection["winner"])), read_scores(io.dep(layout.WINNER_SCORES))
    _check_weights(weights, winner["fingerprint"])
    return Candidate(
        files=ModelFiles(
            weights=weights,
            heads={task: expert_head_path(io, task) for task in tasks},
            model=io.section("model").model_dump(mode="json"),
            decoding=manifests[tasks[0]]["decoding"],
            class_names={task: manifest["class_names"] for task, manifest in manifests.items()},
            record=record,
            transforms={task: manifest["transforms"] for task, manifest in manifests.items()},
            documents={"recipe": winner["recipe"], PROVENANCE: dict(origin)},
        ),
        evidence=Evidence(
            accuracy=winner["validation"]["accuracy"],
            expert_accuracy=selection["individual"],
            scores={task: scores[task].astype(np.float32) for task in tasks},
            digests={task: digest_of_split(manifests[task]["splits"]["validation"]) for task in tasks},
            reproducible=_replays(io, winner),
            criteria=[Criterion(**criterion) for criterion in winner.get("criteria", ())],
        ),
        fingerprint=winner["fingerprint"],
        metrics={f"validation/{key}": winner["validation"][key] for key in ("mean", "normalised")},
        run_id=run_id,
        description=f"{selection['winner']} of {', '.join(tasks)}",
        tags={METHOD: selection["winner"], **(tags or {})},
    )


def _check_weights(path: Path, chosen: str) -> None:
    with open_checkpoint(path) as state:
        if not matches(state, chosen):
            raise MergeflowError(
                f"the weights of {path} are not those that the stage select has chosen ({short(chosen)}), so they are "
                "not registered: remove the file, and `mergeflow run` makes it again."
            )


def _replays(io: StageIO, winner: Mapping[str, Any]) -> bool:
    """Say whether the recipe, replayed from the files at hand, makes the weights that are to be registered."""
    io.scratch.mkdir(parents=True, exist_ok=True)
    made, other_inputs = replay(winner["recipe"], io.root, io.scratch / "replayed.safetensors")
    made.path.unlink()
    return made.fingerprint == winner["fingerprint"] and not other_inputs


@arithmetic()
def evaluate_version(
    store: Store,
    version: ModelVersion,
    splits: Mapping[str, Path],
    candidate: Evidence,
    judging: EvaluationSection,
    device: str | torch.device = "cpu",
) -> Evidence:
    """Evaluate a version on prepared validation splits, to compare it with a candidate.

    A task that the candidate lacks keeps the figures it was registered with. A task whose classes are no longer those
    of the version's head is left out: there the version cannot be compared.

    Args:
        candidate: gives the experts' accuracies and the splits' digests of today.
        judging: as the candidate was scored.
    """
    device = torch.device(device)
    registered = read_evidence(store, version)
    others = sorted(set(registered.accuracy) - set(candidate.accuracy))
    with TemporaryDirectory(prefix="mergeflow-version-") as scratch:
        loaded = read_model(download_model(store, version, Path(scratch)), device)
    scores = {}
    for task in sorted(set(loaded.heads) & set(splits) & set(candidate.accuracy)):
        manifest, head = load_manifest(splits[task]), loaded.heads[task]
        if list(manifest["class_names"]) != list(loaded.class_names[task]):
            continue
        decoding = {key: manifest["decoding"].get(key) for key in loaded.decoding}
        if decoding != loaded.decoding:
            raise MergeflowError(
                f"version {version.version} of '{version.name}' takes examples of {_in_words(loaded.decoding)}, "
                f"task '{task}' is prepared with {_in_words(decoding)}: they cannot be compared. Register under "
                "another name, or force it."
            )
        examples = loaded.modality.open(task, splits[task], "validation", head and head.to(device), device)
        scores[task] = example_scores(loaded.model, examples, judging.batch_size, judging.precision)
    return Evidence(
        accuracy={task: registered.accuracy[task] for task in others}
        | {task: float(hits.mean(dtype=np.float64)) for task, hits in scores.items()},
        expert_accuracy={task: registered.expert_accuracy[task] for task in others}
        | {task: candidate.expert_accuracy[task] for task in scores},
        scores=scores,
        digests={task: candidate.digests[task] for task in scores if task in candidate.digests},
    )


def _register(
    store: Store,
    name: str,
    io: StageIO,
    selection: Mapping[str, Any],
    origin: dict[str, Any],
    records: tuple[PipelineRecord, list[ChildRecord]],
    tags: Mapping[str, str] | None = None,
    *,
    only_ask: bool = False,
) -> tuple[RegisteredVersion, Promotion]:
    """Log the run, register the chosen merge as candidate and ask the gates.

    The champion is evaluated where it has to be.

    Args:
        origin: the provenance document; the experts' runs are filled in.
        only_ask: log the gates' answer and leave the champion as it is.
    """
    logged = log_pipeline(store, *records)
    for (kind, task), run_id in logged.children.items():
        if kind == "expert":
            origin["experts"][task]["run"] = run_id
    candidate = make_candidate(io, selection, origin, logged.run_id, tags)
    version = register(store, name, candidate)
    splits = {task: io.dep(layout.split("validation", task)) for task in selection["tasks"]}
    promotion = promote(
        store,
        name,
        version.version,
        io.section("registry"),
        evidence=candidate.evidence,
        reevaluate=lambda champion: evaluate_version(store, champion, splits, candidate.evidence, io.params.evaluation),
        only_ask=only_ask,
    )
    return version, promotion


def _in_words(decoding: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in decoding.items())


@dataclass(frozen=True)
class Rebuilt:
    """The outcome of a rebuild.

    Attributes:
        normalised: mean normalised validation accuracy.
        decision: the gates' answer; None when the version was champion already.
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
        io: the register stage's view of the scratch project in which the merge was made.
        origin: the provenance document, with `kind` and `parent`.
    """
    selection, parent = read_json(io, layout.SELECTION), origin["parent"]
    records = _record(origin, selection), list(_children(io, selection, trained))
    removed = {*json.loads(find_stored(store, parent["model"], parent["version"]).tags.get(REMOVED, "[]"))}
    removed = (removed | {parent["task"]}) - set(selection["tasks"])  # an added one is there again
    tags = {REMOVED: json.dumps(sorted(removed))} if removed else {}
    version, judged = _register(store, name, io, selection, origin, records, tags, only_ask=not promote_it)
    winner = selection["methods"][selection["winner"]]
    return Rebuilt(
        model=name,
        version=version.version,
        new=version.new,
        method=selection["winner"],
        args=winner["args"],
        candidates=sum(chosen["candidates"] for chosen in selection["methods"].values()),
        normalised=winner["validation"]["normalised"],
        decision=judged.decision,
        champion=judged.champion,
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
        dvc={file["path"]: file["dvc"] for file in tracked if file["dvc"]},
        datasets=dataset_records(origin),
    )


def _children(io: StageIO, selection: Mapping[str, Any], trained: str | None) -> Iterator[ChildRecord]:
    if trained is not None:
        yield expert_record(io, trained, {})
    for method, chosen in selection["methods"].items():
        yield method_record(io, method, chosen, {})
