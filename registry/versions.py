"""Registered versions: each is made once per fingerprint, holds weights and evidence, and is read as plain values."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException

from mergeflow.checkpoints import matches, open_checkpoint
from mergeflow.checkpoints.fingerprint import scheme_of
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.served import WEIGHTS_FILES
from registry.championship import Snapshot, read_snapshot
from registry.evidence import load_evidence, read_evidence, write_evidence
from registry.files import DIGESTS, EVIDENCE, MODEL, UNREADABLE, check_model, digests_of, fetched
from registry.gates import Evidence
from registry.logging import FINGERPRINT
from registry.pyfunc_model import ModelFiles, check_pyfunc, save_pyfunc
from registry.quiet import mlflow
from registry.store import Store

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
METRICS, DECISION, LOGGED_MODEL = "mergeflow.metrics", "mergeflow.decision", "mergeflow.logged_model"
REMOVED = "mergeflow.removed"  # tasks that the version lacks on purpose
TASKS, METHOD = "mergeflow.tasks", "mergeflow.method"
_MODEL = "mergeflow.model"


@dataclass(frozen=True)
class RegisteredVersion:
    """One version as it stands.

    Args:
        name: of the registered model.
        version: its number, as MLflow writes it.
        aliases: what points at it.
        fingerprint: digest of all that decides its weights; None for one that mergeflow did not register.
        run_id: the pipeline's run it came from, if any.
        metrics: its figures by name.
        created: milliseconds since 1970.
        new: whether this call made it.
        method: of its recipe; None where that is not noted.
        tasks: that it serves, sorted; empty where they are not noted.
    """

    name: str
    version: str
    aliases: tuple[str, ...]
    fingerprint: str | None
    run_id: str | None
    metrics: dict[str, float] = field(default_factory=dict)
    created: int = 0
    new: bool = False
    method: str | None = None
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """What is registered: files, evidence and where they came from.

    Args:
        files: weights, heads, documents.
        evidence: validation figures, kept with the version for every later comparison.
        fingerprint: digest of all that decides the weights.
        metrics: figures to show, by name.
        run_id: the pipeline's run; None: none.
        description: one line for the registry's page.
        tags: further text by name.
    """

    files: ModelFiles
    evidence: Evidence
    fingerprint: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    run_id: str | None = None
    description: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def find_model(store: Store, name: str) -> RegisteredModel | None:
    """Return MLflow's registered model, or None when there is none of that name."""
    try:
        return store.client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def require_model(store: Store, name: str) -> RegisteredModel:
    """Return MLflow's registered model.

    Raises:
        MergeflowError: no model has this name; the message names the nearest one.
    """
    model = find_model(store, name)
    if model is None:
        known = [one.name for one in store.client.search_registered_models()]
        if not known:
            raise MergeflowError(
                f"nothing is registered yet, so there is no '{name}': run the pipeline with `mergeflow run`."
            )
        raise unknown_name("registered model", name, known)
    return model


def all_versions(store: Store, name: str) -> dict[str, ModelVersion]:
    """Return every version of the model by number, oldest first."""
    found: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = store.client.search_model_versions(f"name='{name}'", max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return {str(one.version): one for one in sorted(found, key=lambda one: int(one.version))}


def snapshot(store: Store, name: str, model: RegisteredModel | None = None) -> Snapshot:
    """Return what the registry says of the model now: aliases, versions, events.

    Args:
        store: the registry.
        name: the registered model.
        model: MLflow's answer, where it was just read; its aliases have to be older than the versions listed here.

    Raises:
        MergeflowError: no such model.
    """
    model = model or require_model(store, name)  # first: its aliases are then of versions listed below
    aliases = {alias: str(number) for alias, number in model.aliases.items()}
    return read_snapshot(aliases, set(all_versions(store, name)), model.tags)


def describe(version: ModelVersion, aliases: Mapping[str, Any], *, new: bool = False) -> RegisteredVersion:
    """Return MLflow's version as a plain value.

    Args:
        version: MLflow's version.
        aliases: of its model: alias to number.
        new: whether this call made it.
    """
    own = sorted(alias for alias, number in aliases.items() if str(number) == str(version.version))
    return RegisteredVersion(
        name=str(version.name),
        version=str(version.version),
        aliases=tuple(own),
        fingerprint=version.tags.get(FINGERPRINT),
        run_id=version.run_id or None,
        metrics=json.loads(version.tags.get(METRICS, "{}")),
        created=int(version.creation_timestamp),
        new=new,
        method=version.tags.get(METHOD),
        tasks=tuple(json.loads(version.tags.get(TASKS, "[]"))),
    )


def same_model(store: Store, version: ModelVersion, fingerprint: str | None, tasks: Collection[str]) -> bool:
    """Say whether the version has these weights, serves exactly these tasks, and its files are still there.

    That the files are there is looked at; that their bytes are those that were registered is not.

    Args:
        store: the registry.
        version: MLflow's version.
        fingerprint: of the weights; None is the same as no version's.
        tasks: exactly those that the version has to serve.
    """
    if fingerprint is None or version.tags.get(FINGERPRINT) != fingerprint:
        return False
    return _serves(store, str(version.source), tasks)


def _serves(store: Store, source: str, tasks: Collection[str]) -> bool:
    try:
        with store.active():
            inside = mlflow.artifacts.list_artifacts(artifact_uri=f"{source}/{MODEL}")
        with fetched(store, source, EVIDENCE) as folder:
            kept = load_evidence(folder)
    except UNREADABLE:
        return False
    return set(kept.accuracy) == set(tasks) and any(file.path.endswith(WEIGHTS_FILES) for file in inside)


def _is_whole(store: Store, version: ModelVersion) -> bool:
    try:
        check_model(store, version)
        read_evidence(store, version)
    except MergeflowError:
        return False
    return True


def ensure_version(store: Store, name: str, candidate: Candidate) -> tuple[str, bool]:
    """Return the number of the version with the candidate's weights and tasks, made when missing, and whether it was.

    The caller holds the model's lock. The version's row is written last, so that a version that exists is complete;
    what a killed attempt left is used when whole and deleted when not. A version whose files were lost or damaged since
    does not count: another one is made.

    Args:
        store: the registry.
        name: the registered model, made where it does not exist.
        candidate: what is registered.
    """
    tasks = sorted(candidate.evidence.accuracy)
    versions = all_versions(store, name)
    for number, version in versions.items():
        recorded = version.tags.get(FINGERPRINT)
        if (
            recorded
            and _is_of(candidate, recorded)
            and same_model(store, version, recorded, tasks)
            and _is_whole(store, version)
        ):
            return number, False
    taken = {version.tags.get(LOGGED_MODEL) for version in versions.values()}
    logged = _finished_upload(store, name, candidate, taken) or _upload(store, name, candidate)
    if find_model(store, name) is None:
        store.client.create_registered_model(name)
    tags = {**candidate.tags, FINGERPRINT: candidate.fingerprint, METRICS: json.dumps(dict(candidate.metrics))}
    tags |= {TASKS: json.dumps(tasks), LOGGED_MODEL: logged.model_id}  # MLflow's own field does not come back
    tags |= {key: text for key, text in logged.tags.items() if key == DIGESTS}
    with store.active():
        version = store.client.create_model_version(
            name,
            logged.artifact_location,
            run_id=candidate.run_id,
            tags=tags,
            description=candidate.description or None,
            model_id=logged.model_id,
        )
    return str(version.version), True


def _is_of(candidate: Candidate, recorded: str) -> bool:
    """Return whether a version's fingerprint, of whatever scheme, is that of a candidate's weights."""
    if scheme_of(recorded) == scheme_of(candidate.fingerprint):
        return recorded == candidate.fingerprint
    with open_checkpoint(candidate.files.weights) as state:
        return matches(state, recorded)


def _finished_upload(
    store: Store, name: str, candidate: Candidate, taken: Collection[str | None]
) -> LoggedModel | None:
    words = f"tags.`{FINGERPRINT}` = '{candidate.fingerprint}' AND tags.`{_MODEL}` = '{name}'"
    finished = None
    for logged in store.client.search_logged_models([store.experiment_id], filter_string=words):
        if logged.model_id in taken:
            continue
        if str(logged.status) == "READY" and _serves(store, logged.artifact_location, candidate.evidence.accuracy):
            finished = logged
        else:
            store.client.delete_logged_model(logged.model_id)
    return finished


def _upload(store: Store, name: str, candidate: Candidate) -> LoggedModel:
    with scratch_folder(store, name) as scratch:
        folder = scratch / "model"
        save_pyfunc(folder, candidate.files, {"fingerprint": candidate.fingerprint})
        check_pyfunc(folder, candidate.files.served)
        write_evidence(folder / "evidence", candidate.evidence)
        logged = store.client.create_logged_model(
            store.experiment_id,
            name=name,
            source_run_id=candidate.run_id,
            tags={FINGERPRINT: candidate.fingerprint, _MODEL: name, DIGESTS: digests_of(folder)},
            model_type=f"merged {candidate.files.model['modality']} model",
        )
        store.client.log_model_artifacts(logged.model_id, str(folder))
    if candidate.run_id is not None:
        now = logged.creation_timestamp
        points = [Metric(key, value, now, 0, model_id=logged.model_id) for key, value in candidate.metrics.items()]
        store.client.log_batch(candidate.run_id, metrics=points)
        store.client.log_outputs(candidate.run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return store.client.finalize_logged_model(logged.model_id, "READY")


@contextmanager
def scratch_folder(store: Store, name: str) -> Iterator[Path]:
    """Give the holder of the lock an empty folder on the project's disk; what a killed holder left goes first.

    Raises:
        MergeflowError: the disk is full or refuses.
    """
    folder = store.scratch / name
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        raise MergeflowError(
            f"the registry could not write for the model '{name}': {error}. Nothing was promoted; make room or give "
            "access there, and run again."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
