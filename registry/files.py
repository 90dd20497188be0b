"""The files of a registered version, evidence among them, compared with what was registered; none is executed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mergeflow.analysis.provable.criteria import Criterion
from mergeflow.checkpoints import matches, open_checkpoint
from mergeflow.checkpoints.fingerprint import short
from mergeflow.errors import MergeflowError
from registry.gates import Evidence
from registry.logging import FINGERPRINT
from registry.store import Store, mlflow
from tasks.project.recorded import digest

DIGESTS = "mergeflow.files"
MODEL, EVIDENCE = "artifacts/model", "evidence"
UNREADABLE = (MlflowException, OSError, ValueError, SafetensorError)


def digests_of(folder: Path) -> str:
    """Return the text of a version's tag: the digest of each part of its folder."""
    return json.dumps({part: digest(folder / part) for part in (MODEL, EVIDENCE)})


@contextmanager
def fetched(store: Store, source: str, part: str, folder: Path | None = None) -> Iterator[Path]:
    """Give one part of a version's files; what lies on this machine is not copied unless `folder` asks for it.

    Args:
        source: the version's place.
        part: MODEL or EVIDENCE.
        folder: where to put it; None: it is gone after the block.
    """
    with TemporaryDirectory(prefix="mergeflow-version-") as scratch, store.active():
        local = folder is None and source.startswith("file:")
        place = None if local else str(folder or scratch)
        yield Path(mlflow.artifacts.download_artifacts(f"{source}/{part}", dst_path=place))


def check_model(store: Store, version: ModelVersion) -> None:
    """Compare a version's weights, heads and documents with what was registered; its evidence checks itself when read.

    Raises:
        MergeflowError: they are others, or cannot be read; the message names the version.
    """
    with reading(version), fetched(store, str(version.source), MODEL) as folder:
        check_part(version, MODEL, folder)


def check_part(version: ModelVersion, part: str, folder: Path) -> None:
    """Compare one part of a version's files with what was registered: by its digest, or by the weights' fingerprint.

    Args:
        part: MODEL or EVIDENCE.

    Raises:
        MergeflowError: the files are others; the message names the version.
    """
    recorded = json.loads(version.tags.get(DIGESTS, "{}")).get(part)
    weights = version.tags.get(FINGERPRINT)
    if recorded is not None:
        now = digest(folder)
        same = now == recorded
    elif part == MODEL and weights is not None:  # of the days when the weights alone were recorded
        from mergeflow.modalities.serving import weights_file  # it imports torch, which listing versions does without

        with open_checkpoint(weights_file(folder)) as state:
            same = matches(state, weights)
        now, recorded = "another one", short(weights)
    else:
        return
    if not same:
        raise MergeflowError(
            f"version {version.version} of '{version.name}' is damaged: its {part} at {version.source} has the digest "
            f"{now[:12]}, registered was {recorded[:12]}. Restore these files from a backup; or register the model "
            "again with `mergeflow stage run register --force`, which makes a version of its own."
        )


@contextmanager
def reading(version: ModelVersion) -> Iterator[None]:
    """Read a version's files inside the block.

    Raises:
        MergeflowError: they cannot be read; the message names the version.
    """
    try:
        yield
    except MergeflowError:
        raise
    except UNREADABLE as error:
        raise MergeflowError(
            f"the files of version {version.version} of '{version.name}' cannot be read at {version.source}: {error}. "
            "Restore them; or register the model again with `mergeflow run`, which makes a version of its own."
        ) from error


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
        document["criteria"] = [vars(criterion) for criterion in evidence.criteria]
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
    scores_file = next((folder / name for name in (_SCORES, _ANSWERS) if (folder / name).exists()), folder / _SCORES)
    scores = {task: values.astype(np.float32) for task, values in load_file(scores_file).items()}
    criteria = [Criterion(**criterion) for criterion in document.pop("criteria", ())]
    for task, former in document.pop("forgotten", {}).items():  # of former days: the accuracy alone
        criteria.append(Criterion(task, False, "accuracy", former["accuracy"], former["at_most"]))
    return Evidence(scores=scores, criteria=criteria, **document)
