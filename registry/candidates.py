"""The candidate that the outputs of `select` amount to: files, evidence, and the proof that its recipe makes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mergeflow import layout
from mergeflow.analysis.provable.criteria import Criterion
from mergeflow.checkpoints import matches, open_checkpoint
from mergeflow.checkpoints.fingerprint import short
from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.accuracy import read_scores
from registry.gates import Evidence
from registry.pipeline_records import split_digest
from registry.provenance import NAME
from registry.pyfunc_model import ModelFiles
from registry.replay import replay
from registry.versions import METHOD, Candidate
from tasks.project.stage import StageIO


def make_candidate(
    io: StageIO,
    selection: Mapping[str, Any],
    origin: Mapping[str, Any],
    run_id: str | None,
    tags: Mapping[str, str] | None = None,
) -> Candidate:
    """Return what is to be registered; the winner is merged once more by its recipe, which costs about one merge.

    Args:
        io: files below `outputs/`: base and heads, experts, manifests, merged, results.
        selection: what `select` wrote.
        origin: the provenance document.
        run_id: MLflow's run that it belongs to.
        tags: text by name, kept with the version.

    Raises:
        MergeflowError: the winner's file does not hold the weights that were chosen.
    """
    tasks = selection["tasks"]
    manifests = {task: load_manifest(io.dep(layout.manifest_folder(task))) for task in tasks}
    winner = selection["methods"][selection["winner"]]
    with open_checkpoint(io.dep(layout.BASE_MODEL)) as base:
        record = base.metadata
    weights = io.dep(layout.merge(selection["winner"]))
    _check_weights(weights, winner["fingerprint"])
    return Candidate(
        files=ModelFiles(
            weights=weights,
            heads={task: _head(io, task) for task in tasks},
            model=io.section("model").model_dump(mode="json"),
            decoding=manifests[tasks[0]]["decoding"],
            class_names={task: manifest["class_names"] for task, manifest in manifests.items()},
            record=record,
            transforms={task: manifest["transforms"] for task, manifest in manifests.items()},
            documents={"recipe": winner["recipe"], NAME: dict(origin)},
        ),
        evidence=_evidence(io, selection, _replays(io, winner)),
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
    made = replay(winner["recipe"], io.root, io.scratch / "replayed.safetensors")
    made.path.unlink()
    return made.fingerprint == winner["fingerprint"] and not made.other_inputs


def _evidence(io: StageIO, selection: Mapping[str, Any], reproducible: bool) -> Evidence:
    scores = read_scores(io.dep(layout.WINNER_SCORES))
    return Evidence(
        accuracy=selection["methods"][selection["winner"]]["validation"]["accuracy"],
        expert_accuracy=selection["individual"],
        scores={task: scores[task].astype(np.float32) for task in selection["tasks"]},
        digests={task: split_digest(io, task, "validation") for task in selection["tasks"]},
        reproducible=reproducible,
        criteria=[Criterion(**one) for one in selection["methods"][selection["winner"]].get("criteria", ())],
    )


def _head(io: StageIO, task: str) -> Path:
    """Return the head that came out of an expert's training; experts of former days have the base's."""
    path = io.dep(layout.expert_head(task))
    return path if path.exists() else io.dep(layout.head(task))
