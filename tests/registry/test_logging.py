"""The pipeline's run: parent, children, data sets, files, hashes; logged once, whole."""

import pytest
from mlflow.tracking import MlflowClient
from pydantic import ValidationError

from mergeflow.errors import MergeflowError
from registry.logging import ChildRecord, DatasetRecord, PipelineRecord, log_pipeline

from . import protocol


def a_record(tmp_path, **changes):
    plot = tmp_path / "curve.html"
    plot.write_text("<p>curve</p>")
    splits = [
        DatasetRecord(task="digits", split=split, digest=letter * 64, path=f"data/digits/{split}", counts={"images": 5})
        for split, letter in (("train", "a"), ("test", "b"))
    ]
    values = {
        "name": "nightly",
        "fingerprint": "f1",
        "params": {"train.steps": 500, "note": None},
        "metrics": {"individual/mean": 0.9},
        "tags": {"suite": "pocket8"},
        "dvc": {"experts/digits": "1a2b", "data/d+e": "3c4d"},
        "datasets": splits,
        "artifacts": {"plots": (str(plot),)},
    }
    return PipelineRecord(**{**values, **changes})


CHILDREN = [
    ChildRecord(
        kind="expert", name="digits", metrics={"validation": 0.9}, steps=[("loss", k, 1 / (k + 1)) for k in range(5)]
    ),
    ChildRecord(kind="method", name="ties", params={"scale": 0.3}, metrics={"validation": 0.8}),
]


def test_all_of_it_is_there(store, tmp_path):
    logged = log_pipeline(store, a_record(tmp_path), CHILDREN)
    client: MlflowClient = store.client
    run = client.get_run(logged.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "train.steps": "500",
        "note": "None",
        "dvc/experts/digits": "1a2b",
        "dvc/data/d_e": "3c4d",
    }
    assert run.data.metrics == {"individual/mean": 0.9}
    assert run.data.tags["suite"] == "pocket8"
    inputs = {
        (dataset_input.dataset.name, dataset_input.dataset.digest, dataset_input.tags[0].value)
        for dataset_input in run.inputs.dataset_inputs
    }
    assert inputs == {("digits", "a" * 36, "train"), ("digits", "b" * 36, "test")}
    assert {artifact.path for artifact in client.list_artifacts(logged.run_id)} == {"dvc.json", "plots"}
    assert set(logged.children) == {("expert", "digits"), ("method", "ties")}
    expert = logged.children["expert", "digits"]
    assert client.get_run(expert).data.tags["mlflow.parentRunId"] == logged.run_id
    history = client.get_metric_history(expert, "loss")
    assert [(point.step, point.value) for point in history] == [(k, 1 / (k + 1)) for k in range(5)]


def test_once_per_fingerprint(store, tmp_path):
    first = log_pipeline(store, a_record(tmp_path), CHILDREN)
    again = log_pipeline(store, a_record(tmp_path), CHILDREN)
    assert (first.created, again.created) == (True, False)
    assert (again.run_id, again.children) == (first.run_id, first.children)
    assert log_pipeline(store, a_record(tmp_path, fingerprint="f2"), CHILDREN).run_id != first.run_id
    assert len(store.client.search_runs([store.experiment_id])) == 6


def test_more_values_than_one_request_takes(store, tmp_path):
    params = {f"p{k}": k for k in range(250)}
    child = ChildRecord(kind="expert", name="long", steps=[("loss", k, 0.5) for k in range(2500)])
    logged = log_pipeline(store, a_record(tmp_path, params=params, dvc={}), [child])
    assert len(store.client.get_run(logged.run_id).data.params) == 250
    assert len(store.client.get_metric_history(logged.children["expert", "long"], "loss")) == 2500


@pytest.mark.slow
def test_kill_at_every_write(store, forker, tmp_path):
    step, dead = 0, True
    while dead:
        record = a_record(tmp_path, fingerprint=f"killed-{step}")

        def work(step=step, record=record):
            log_pipeline(protocol.mortal(store, step), record, CHILDREN)

        dead = protocol.died(forker.run(store, work))
        assert log_pipeline(store, record, CHILDREN).created is dead
        alive = store.client.search_runs([store.experiment_id], f"tags.`mergeflow.fingerprint` = 'killed-{step}'")
        assert [run.info.status for run in alive] == ["FINISHED"]
        step += 1
    assert step > 10
    runs = store.client.search_runs([store.experiment_id])
    assert len(runs) == 3 * step
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_bad_records_are_refused(store, tmp_path):
    with pytest.raises(ValidationError, match="extra"):
        PipelineRecord(name="a", fingerprint="b", colour="blue")
    with pytest.raises(MergeflowError, match=r"two child runs are method 'ties'"):
        log_pipeline(store, a_record(tmp_path), [CHILDREN[1], CHILDREN[1]])
    with pytest.raises(MergeflowError, match="missing"):
        log_pipeline(store, a_record(tmp_path, artifacts={"": ("nowhere.html",)}), [])
