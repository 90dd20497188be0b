"""Logs a pipeline's run and its children in MLflow, completely and once."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID, MLFLOW_SOURCE_NAME

from mergeflow.errors import MergeflowError
from registry.records import ChildRecord, DatasetRecord, PipelineRecord, Point, Scalar
from registry.store import Store

FINGERPRINT = "mergeflow.fingerprint"
KIND = "mergeflow.kind"
NAME = "mergeflow.name"
# MLflow's limits for one request, and for the digest of a data set.

_METRICS, _PARAMS, _DIGEST, _PARAM_LENGTH = 1000, 100, 36, 6000

T = TypeVar("T")


@dataclass(frozen=True)
class LoggedPipeline:
    """Where a pipeline's run is in MLflow.

    Args:
        run_id: the parent run.
        children: (kind, name) to the child's run.
        created: False when an earlier call had logged it already.
    """

    run_id: str
    children: dict[tuple[str, str], str]
    created: bool


def log_pipeline(store: Store, record: PipelineRecord, children: Sequence[ChildRecord] = ()) -> LoggedPipeline:
    """Log the pipeline's run with a nested run per child, unless the same fingerprint is there already.

    The parent ends FINISHED only after everything below it: a parent in another state is what a killed attempt left,
    and is marked FAILED and deleted with its children before it is logged anew.

    Args:
        store: the open registry.
        record: the pipeline's run; `record.fingerprint` decides whether it is known.
        children: experts and methods, their (kind, name) unique.

    Returns:
        The runs' ids.

    Raises:
        MergeflowError: two children share kind and name, or MLflow refuses a value.
    """
    seen = [(child.kind, child.name) for child in children]
    if len(set(seen)) != len(seen):
        twice = next(key for key in seen if seen.count(key) > 1)
        raise MergeflowError(f"two child runs are {twice[0]} '{twice[1]}': every (kind, name) is logged once.")
    with store.lock(f"log {store.experiment_id}"):
        runs = search_runs(store, FINGERPRINT, record.fingerprint)
        for run in runs:
            if run.info.status == "FINISHED":
                below = search_runs(store, MLFLOW_PARENT_RUN_ID, run.info.run_id)
                ids = {(child.data.tags[KIND], child.data.tags[NAME]): child.info.run_id for child in below}
                return LoggedPipeline(run.info.run_id, ids, created=False)
        for run in runs:
            _discard(store, run.info.run_id)
        try:
            return _log(store, record, children)
        except MlflowException as error:
            raise MergeflowError(f"MLflow refused the run '{record.name}': {error.message}") from error


def _log(store: Store, record: PipelineRecord, children: Sequence[ChildRecord]) -> LoggedPipeline:
    tags = {**record.tags, FINGERPRINT: record.fingerprint, KIND: "pipeline", NAME: record.name}
    parent = _start(store, record.name, tags)
    hashes = {f"dvc/{path}": digest for path, digest in record.dvc.items()}
    _log_values(store, parent, {**record.params, **hashes}, record.metrics, record.steps)
    if record.dvc:
        store.client.log_dict(parent, record.dvc, "dvc.json")
    if record.datasets:
        store.client.log_inputs(parent, [_dataset(dataset) for dataset in record.datasets])
    _log_files(store, parent, record.artifacts)
    ids: dict[tuple[str, str], str] = {}
    for child in children:
        ids[child.kind, child.name] = _log_child(store, parent, child)
    store.client.set_terminated(parent, status="FINISHED")  # last: this is what makes the whole count
    return LoggedPipeline(parent, ids, created=True)


def _log_child(store: Store, parent: str, child: ChildRecord) -> str:
    tags = {**child.tags, KIND: child.kind, NAME: child.name, MLFLOW_PARENT_RUN_ID: parent}
    run_id = _start(store, f"{child.kind}-{child.name}", tags)
    _log_values(store, run_id, child.params, child.metrics, child.steps)
    _log_files(store, run_id, child.artifacts)
    store.client.set_terminated(run_id, status="FINISHED")
    return run_id


def _start(store: Store, name: str, tags: Mapping[str, str]) -> str:
    tags = {MLFLOW_SOURCE_NAME: "mergeflow", **{_key(name): value for name, value in tags.items()}}
    return str(store.client.create_run(store.experiment_id, tags=tags, run_name=name).info.run_id)


def _log_values(
    store: Store,
    run_id: str,
    params: Mapping[str, Scalar],
    metrics: Mapping[str, float],
    steps: Sequence[Point],
) -> None:
    now = int(time.time() * 1000)
    points = [Metric(_key(name), float(value), now, 0) for name, value in metrics.items()]
    points += [Metric(_key(name), float(value), now, step) for name, step, value in steps]
    for part in _parts(points, _METRICS):
        store.client.log_batch(run_id, metrics=part)
    texts = [Param(_key(name), str(value)[:_PARAM_LENGTH]) for name, value in params.items()]
    for group in _parts(texts, _PARAMS):
        store.client.log_batch(run_id, params=group)


def _log_files(store: Store, run_id: str, artifacts: Mapping[str, Sequence[str]]) -> None:
    for folder, files in artifacts.items():
        for file in files:
            try:
                store.client.log_artifact(run_id, file, folder or None)
            except FileNotFoundError:
                raise MergeflowError(
                    f"the file {file} to be logged under '{folder}' is missing: run the stage that makes it again."
                ) from None


def log_file(store: Store, run_id: str, path: Path, folder: str | None = None) -> None:
    """Put a file among a run's files; it replaces one of the same name.

    Args:
        store: the registry.
        run_id: MLflow's; a run that is gone takes nothing.
        path: the file.
        folder: among the run's files; None: at their top.

    Raises:
        MergeflowError: MLflow refuses it.
    """
    try:
        store.client.log_artifact(run_id, str(path), folder)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise MergeflowError(f"MLflow refused the file {path.name}: {error.message}") from error


def _dataset(record: DatasetRecord) -> DatasetInput:
    source = json.dumps({"uri": record.path})
    profile = json.dumps({"split": record.split, "sha256": record.digest, "counts": record.counts})
    dataset = Dataset(record.task, record.digest[:_DIGEST], "local", source, profile=profile)
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, record.split)])


def search_runs(store: Store, tag: str, value: str) -> list[Run]:
    """Return the experiment's living runs that carry the tag with this value.

    Args:
        store: the registry, whose experiment is searched.
        tag: the tag's name.
        value: its value, without a quotation mark.
    """
    found: list[Run] = []
    token: str | None = None
    while True:
        page = store.client.search_runs(
            [store.experiment_id], f"tags.`{tag}` = '{value}'", max_results=1000, page_token=token
        )
        found += page
        token = page.token
        if not token:
            return found


def _discard(store: Store, run_id: str) -> None:
    for run in [*search_runs(store, MLFLOW_PARENT_RUN_ID, run_id), store.client.get_run(run_id)]:
        if run.info.status != "FINISHED":
            store.client.set_terminated(run.info.run_id, status="FAILED")
        store.client.delete_run(run.info.run_id)


def _key(name: str) -> str:
    """Return the name with the characters that MLflow refuses replaced."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
