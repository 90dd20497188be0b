"""Log pipelines, sweeps and studies as runs of MLflow, completely and once."""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID, MLFLOW_SOURCE_NAME
from pydantic import BeforeValidator, Field

from mergeflow.errors import MergeflowError
from mergeflow.schema import Frozen
from registry.store import Store, every_page

Scalar = str | int | float | bool | None
Point = tuple[str, int, float]  # of a curve: metric, step, value


def flat(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Flatten nested values to dotted keys, and lists to text.

    Example:
        >>> flat({"steps": 5, "lora": {"rank": 8, "targets": ["out_proj", "c_fc"]}})
        {'steps': 5, 'lora.rank': 8, 'lora.targets': 'out_proj, c_fc'}
    """
    flattened: dict[str, Scalar] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flattened |= {f"{key}.{below}": leaf for below, leaf in flat(value).items()}
        else:
            flattened[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return flattened


Params = Annotated[dict[str, Scalar], BeforeValidator(flat)]


class DatasetRecord(Frozen):
    """One split of one task.

    Args:
        digest: SHA-256 of the split's file, hexadecimal.
        counts: examples in the split, by class or as {"examples": n}.
    """

    task: str
    split: str
    digest: str
    path: str
    counts: dict[str, int] = Field(default={})


class _RunRecord(Frozen, allow_inf_nan=True):  # half an interval of one repetition is infinite
    """What a run of MLflow shows.

    Args:
        params: what was chosen, flat ("train.steps": 500).
        steps: curves, as (metric, step, value).
        artifacts: folder inside the run ("" for its top) to the local files that go there: plots, the report.
    """

    name: str
    params: Params = Field(default={})
    metrics: dict[str, float] = Field(default={})
    steps: tuple[Point, ...] = ()
    tags: dict[str, str] = Field(default={})
    artifacts: dict[str, tuple[str, ...]] = Field(default={})


class ChildRecord(_RunRecord):
    """An expert, by its task, or a merge method of the pipeline, or a trial of a sweep: a run below the pipeline's."""

    kind: Literal["expert", "method", "trial"]


class PipelineRecord(_RunRecord):
    """One run of the pipeline.

    Args:
        fingerprint: digest of all that decides the results; the same one is logged once.
        dvc: tracked path to DVC's hash of it.
    """

    fingerprint: str
    dvc: dict[str, str] = Field(default={})
    datasets: tuple[DatasetRecord, ...] = ()


FINGERPRINT = "mergeflow.fingerprint"
KIND = "mergeflow.kind"
NAME = "mergeflow.name"
# MLflow's limits for one request, and for the digest of a data set.

_METRICS, _PARAMS, _DIGEST, _PARAM_LENGTH = 1000, 100, 36, 6000

T = TypeVar("T")


@dataclass(frozen=True)
class LoggedPipeline:
    """The place of a pipeline's run in MLflow.

    Args:
        created: False when an earlier call had logged it already.
    """

    run_id: str
    children: dict[tuple[str, str], str]
    created: bool


def log_pipeline(store: Store, record: PipelineRecord, children: Sequence[ChildRecord] = ()) -> LoggedPipeline:
    """Log the pipeline's run with a nested run per child, unless the same fingerprint is there already.

    The parent ends FINISHED only after everything below it: a parent in another state is what a killed attempt left,
    and is marked FAILED and deleted with its children before it is logged anew.
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
    hashes = {f"dvc/{path}": digest for path, digest in record.dvc.items()}
    parent = _log_run(store, record, record.name, {FINGERPRINT: record.fingerprint, KIND: "pipeline"}, hashes)
    if record.dvc:
        store.client.log_dict(parent, record.dvc, "dvc.json")
    if record.datasets:
        store.client.log_inputs(parent, [_dataset(dataset) for dataset in record.datasets])
    ids: dict[tuple[str, str], str] = {}
    for child in children:
        tags = {KIND: child.kind, MLFLOW_PARENT_RUN_ID: parent}
        run_id = ids[child.kind, child.name] = _log_run(store, child, f"{child.kind}-{child.name}", tags)
        store.client.set_terminated(run_id, status="FINISHED")
    store.client.set_terminated(parent, status="FINISHED")  # last: this is what makes the whole count
    return LoggedPipeline(parent, ids, created=True)


def _log_run(
    store: Store, record: _RunRecord, title: str, tags: Mapping[str, str], params: Mapping[str, str] | None = None
) -> str:
    """Log a run with its values and files, and leave it running; returns its id."""
    named = {**record.tags, **tags, NAME: record.name}
    shown = {MLFLOW_SOURCE_NAME: "mergeflow", **{_key(name): value for name, value in named.items()}}
    run_id = str(store.client.create_run(store.experiment_id, tags=shown, run_name=title).info.run_id)
    now = int(time.time() * 1000)
    points = [Metric(_key(name), value, now, 0) for name, value in record.metrics.items()]
    points += [Metric(_key(name), value, now, step) for name, step, value in record.steps]
    for part in _parts(points, _METRICS):
        store.client.log_batch(run_id, metrics=part)
    values = {**record.params, **(params or {})}
    texts = [Param(_key(name), str(value)[:_PARAM_LENGTH]) for name, value in values.items()]
    for group in _parts(texts, _PARAMS):
        store.client.log_batch(run_id, params=group)
    _log_files(store, run_id, record.artifacts)
    return run_id


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
        run_id: MLflow's; a run that is gone takes nothing.
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
    """Return the experiment's living runs that carry the tag with this value."""
    return every_page(partial(store.client.search_runs, [store.experiment_id], f"tags.`{tag}` = '{value}'"))


def _discard(store: Store, run_id: str) -> None:
    for run in [*search_runs(store, MLFLOW_PARENT_RUN_ID, run_id), store.client.get_run(run_id)]:
        if run.info.status != "FINISHED":
            store.client.set_terminated(run.info.run_id, status="FAILED")
        store.client.delete_run(run.info.run_id)


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def log_study(store: Store, name: str, result: Any, folder: Path, locked: Mapping[str, Any]) -> str:
    """Log a study's result, once: the same files from the same inputs again give the same run.

    A column `c` of numbers becomes the metric `rows/c`, whose step is the number of the row, counted from 0: all values
    of a row have one step, and the file rows.parquet, which is among the run's files, says what the row is of.

    Args:
        result: its `findings`, with `system`, `claim` and `verdict` each, and its `rows`.
        locked: the study's entry in DVC's lock file, empty where DVC has recorded none. Its parameters (seeds, choices,
            the digest of the code) become the run's, and so do the hashes of its inputs and outputs.
    """
    params: Params = flat({key: value for file in locked.get("params", {}).values() for key, value in file.items()})
    for number, finding in enumerate(result.findings, 1):
        params |= {f"finding {number} {finding.system}": finding.claim, f"verdict {number}": finding.verdict}
    hashes = {file["path"]: file["md5"] for key in ("deps", "outs") for file in locked.get(key, []) if "md5" in file}
    verdicts = Counter(finding.verdict for finding in result.findings)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    measured_from = json.dumps([params, hashes], sort_keys=True, default=str).encode()
    record = PipelineRecord(
        name=f"study {name}",
        fingerprint=hashlib.sha256(measured_from + b"".join(path.read_bytes() for path in files)).hexdigest(),
        params=params,
        metrics={f"verdicts/{word}": float(count) for word, count in verdicts.items()},
        steps=tuple(_points(result.rows)),
        dvc=hashes,
        artifacts={"": tuple(str(path) for path in files)},
    )
    return log_pipeline(store, record, []).run_id


def _points(rows: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    for number, row in enumerate(rows):
        for column, value in row.items():
            if isinstance(value, int | float):
                yield f"rows/{column}", number, float(value)


_FIGURES = ("objective", "mean", "normalised")


def log_sweep(store: Store, name: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Log the trials of a sweep, once.

    Args:
        rows: one mapping per trial: `trial` (its number), `method`, `args`, `accuracy` per task and figures by name.
    """
    plain = json.dumps(list(rows), sort_keys=True, default=str)
    best = max(rows, key=lambda row: row["objective"])
    record = PipelineRecord(
        name=f"sweep {name}",
        fingerprint=hashlib.sha256(plain.encode()).hexdigest(),
        params={"trials": len(rows), "winner": best["method"]},
        metrics={f"validation/{key}": float(best[key]) for key in _FIGURES if best.get(key) is not None},
        artifacts={"": tuple(str(folder / file) for file in ("trials.parquet", "winner.yaml"))},
    )
    return log_pipeline(store, record, [_trial(row) for row in rows]).run_id


def _trial(row: Mapping[str, Any]) -> ChildRecord:
    figures = {key: float(row[key]) for key in _FIGURES if row.get(key) is not None}
    figures |= {f"accuracy/{task}": float(value) for task, value in row["accuracy"].items()}
    return ChildRecord(
        kind="trial",
        name=f"{row['trial']:04d}",
        params={"method": row["method"], "args": json.dumps(row["args"], sort_keys=True, default=str)},
        metrics={f"validation/{key}": value for key, value in figures.items()},
    )
