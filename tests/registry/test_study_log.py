"""A study's run in MLflow: its rows as metrics, what it was measured from, once."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from registry.logging import log_study
from registry.store import Store
from studies.lab.claims import Finding

ROWS = [
    {"part": "phase", "seed": 0, "alpha": -0.5, "scale": 0.2, "hinge": 0.1234567890123, "promised": None},
    {"part": "phase", "seed": 1, "alpha": -0.5, "scale": -1.0, "hinge": 3e-9, "promised": None},
    {"part": "targets", "seed": 1, "alpha": None, "scale": None, "hinge": 0.5, "promised": True},
]
LOCKED = {
    "params": {
        "outputs/code.yaml": {"lab": "36d826d1a08701f1"},
        "studies/params.yaml": {"seeds": [0, 1], "studies.lab": {"c": 0.2, "alphas": [-0.5]}},
    },
    "deps": [{"path": "outputs/base", "hash": "md5", "md5": "1a.dir"}, {"path": "outputs/unknown"}],
    "outs": [{"path": "outputs/studies/lab", "hash": "md5", "md5": "2b.dir"}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "lab"
    made.mkdir()
    (made / "result.json").write_text(json.dumps({"findings": 2}))
    return made


def result(rows: list[dict[str, object]] = ROWS) -> SimpleNamespace:
    findings = [Finding("P9", "It grows.", "slope 1.0", True), Finding("P11", "It ends.", "never", None)]
    return SimpleNamespace(findings=findings, rows=rows)


def test_the_rows_come_back_from_the_metrics(store: Store, folder: Path) -> None:
    run = log_study(store, "lab", result(), folder, LOCKED)
    numbers = {key for row in ROWS for key, value in row.items() if isinstance(value, int | float)}
    logged = {key for key in store.client.get_run(run).data.metrics if key.startswith("rows/")}
    assert logged == {f"rows/{key}" for key in numbers}
    for key in numbers:
        history = store.client.get_metric_history(run, f"rows/{key}")
        points = [(number, row[key]) for number, row in enumerate(ROWS) if row[key] is not None]
        assert sorted((point.step, point.value) for point in history) == points


def test_it_says_what_it_was_measured_from(store: Store, folder: Path) -> None:
    data = store.client.get_run(log_study(store, "lab", result(), folder, LOCKED)).data
    assert data.params == {
        "lab": "36d826d1a08701f1",
        "seeds": "0, 1",
        "studies.lab.c": "0.2",
        "studies.lab.alphas": "-0.5",
        "dvc/outputs/base": "1a.dir",
        "dvc/outputs/studies/lab": "2b.dir",
        "finding 1 P9": "It grows.",
        "verdict 1": "holds",
        "finding 2 P11": "It ends.",
        "verdict 2": "undecided",
    }
    assert data.metrics["verdicts/holds"] == data.metrics["verdicts/undecided"] == 1


def test_the_same_is_logged_once_and_other_code_again(store: Store, folder: Path) -> None:
    first = log_study(store, "lab", result(), folder, LOCKED)
    assert log_study(store, "lab", result(), folder, LOCKED) == first
    other = LOCKED | {"params": {"outputs/code.yaml": {"lab": "another"}}}
    assert log_study(store, "lab", result(), folder, other) != first
    assert log_study(store, "lab", result(), folder, {}) != first  # a project without DVC
