"""The evidence kept inside a registered version: its figures as JSON, its scores example by example as safetensors."""

import json
from pathlib import Path

import numpy as np
from mlflow.entities.model_registry import ModelVersion
from safetensors.numpy import load_file, save_file

from mergeflow.analysis.provable.criteria import Criterion
from mergeflow.errors import MergeflowError
from registry.files import EVIDENCE, UNREADABLE, check_part, fetched
from registry.gates import Evidence
from registry.store import Store

_SCORES = "scores.safetensors"
_ANSWERS = "correct.safetensors"  # of former days: 1 where the model was right


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Write what is known of a model on validation into the folder that becomes a version's `evidence/`."""
    folder.mkdir()
    document = {
        "accuracy": dict(evidence.accuracy),
        "expert_accuracy": dict(evidence.expert_accuracy),
        "digests": dict(evidence.digests),
        "reproducible": evidence.reproducible,
    }
    if evidence.criteria:
        document["criteria"] = [vars(one) for one in evidence.criteria]
    (folder / "evidence.json").write_text(json.dumps(document, indent=2, sort_keys=True))
    save_file(
        {task: np.asarray(scores, dtype=np.float32) for task, scores in evidence.scores.items()}, folder / _SCORES
    )


def read_evidence(store: Store, version: ModelVersion) -> Evidence:
    """Return the evidence kept with a version; it is also the proof that the version's files are there.

    Raises:
        MergeflowError: the version was not registered by mergeflow, or its files are gone or damaged.
    """
    try:
        with fetched(store, str(version.source), EVIDENCE) as folder:
            check_part(version, EVIDENCE, folder)
            return load_evidence(folder)
    except MergeflowError:
        raise
    except UNREADABLE as error:
        raise MergeflowError(
            f"version {version.version} of '{version.name}' has no readable evidence at {version.source}: only "
            "versions that mergeflow registered, with their files in place, can be champion. Restore the files; or "
            "register the model again with `mergeflow run`, which makes a version of its own."
        ) from error


def load_evidence(folder: Path) -> Evidence:
    """Return the evidence in a folder; what fails raises one of `UNREADABLE`."""
    document = json.loads((folder / "evidence.json").read_text())
    kept = next((folder / name for name in (_SCORES, _ANSWERS) if (folder / name).exists()), folder / _SCORES)
    scores = {task: found.astype(np.float32) for task, found in load_file(kept).items()}
    criteria = [Criterion(**one) for one in document.pop("criteria", ())]
    for task, found in document.pop("forgotten", {}).items():  # of former days: the accuracy alone
        criteria.append(Criterion(task, False, "accuracy", found["accuracy"], found["at_most"]))
    return Evidence(scores=scores, criteria=criteria, **document)
