"""What a night's team is told: a failed stage at once, the run's outcome in a file, a worker of other code."""

import json
import time
from io import StringIO
from pathlib import Path

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from flows.pipeline import stage
from flows.status import outcome, reported
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.running.progress import progress_bars
from tasks.running.runner import check_worker, failure_note, run_stage, running_code
from tests.toy_project import make_toy_project


def write_registration(root: Path, promote: bool | None) -> None:
    path = root / "outputs/registration.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    decision = None if promote is None else {"promote": promote, "reasons": ["because"], "numbers": {}}
    record = {"model": "merged", "version": "3", "champion": "3", "decision": decision, "aliases": []}
    record |= {"method": "ties", "fingerprint": "f", "lineage": {"experts": []}}
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("ran", "promote", "word"),
    [
        ([], True, "Nothing to do"),
        (["vectors"], True, "Done"),
        (["register"], True, "New champion"),
        (["register"], False, "Refused"),
        (["register"], None, "Done"),
    ],
)
def test_the_outcome_in_a_word_and_in_a_file(tmp_path: Path, ran: list[str], promote: bool | None, word: str) -> None:
    write_registration(tmp_path, promote)
    assert outcome(tmp_path, ran) == word
    with reported(tmp_path, tmp_path / "report.json") as stages:
        stages += ran
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["outcome"], report["stages"], report["version"], report["champion"]) == (word, ran, "3", "3")
    assert (report["error"], report["failed"]) == (None, {})
    assert report["seconds"] >= 0


@pytest.mark.parametrize("error", [MergeflowError("no data\nat all"), typer.Exit(1), KeyboardInterrupt()])
def test_a_run_that_fails_is_in_the_file_too(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), reported(tmp_path, tmp_path / "report.json"):
        raise error
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["outcome"] == "Failed"
    assert report["error"] in ("no data", "exit status 1", "KeyboardInterrupt")


def samples(file: Path) -> dict[tuple[str, ...], float]:
    """Return the samples of a file for Prometheus by their name and the values of their labels but the project's."""
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "project")): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }


def fail_in(root: Path, stage: str) -> None:
    note = failure_note(root, stage)
    note.parent.mkdir()
    note.write_text(json.dumps({"seconds": 1.0, "error": "no room"}))
    raise MergeflowError("no room")


def test_a_run_that_fails_leaves_metrics_for_prometheus(tmp_path: Path) -> None:
    write_registration(tmp_path, True)
    record = tmp_path / ".mergeflow/records/finetune@left.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"stage": "finetune@left", "seconds": 12.5}))
    file, before = tmp_path / "node/mergeflow.prom", time.time()
    with reported(tmp_path, None, file) as stages:
        stages += ["register"]
    assert samples(file)["mergeflow_run_outcome", "New champion"] == 1
    with pytest.raises(MergeflowError), reported(tmp_path, None, file):
        fail_in(tmp_path, "sweep@ties")
    metrics = samples(file)
    assert {name[1]: value for name, value in metrics.items() if name[0] == "mergeflow_run_outcome"} == {
        "New champion": 0,
        "Refused": 0,
        "Nothing to do": 0,
        "Done": 0,
        "Failed": 1,
    }
    assert metrics["mergeflow_champion_version", "merged"] == 3
    assert metrics["mergeflow_run_failed_stages",] == 1
    assert metrics["mergeflow_stage_duration_seconds", "finetune@left"] == 12.5
    assert before <= metrics["mergeflow_run_start_timestamp_seconds",] <= time.time()
    assert 0 <= metrics["mergeflow_run_duration_seconds",] < 60
    assert [path.name for path in file.parent.iterdir()] == ["mergeflow.prom"]


def test_a_failed_stage_is_told_at_once(tmp_path: Path) -> None:
    project = make_toy_project(tmp_path / "toy")
    stages = load_graph(project)
    printed = StringIO()
    with progress_bars(project, ["vectors", "prepare@left"], Console(file=printed, width=200)):
        with pytest.raises(MergeflowError):
            run_stage(project, stages["vectors"])  # its inputs are missing
        end = time.monotonic() + 10
        while "✗" not in printed.getvalue() and time.monotonic() < end:
            time.sleep(0.05)
        line = printed.getvalue()
    assert "✗ vectors" in line
    assert "s  stage vectors needs outputs/base/model.safetensors, which is missing" in line
    assert "\n" not in line.strip()
    assert run_stage(project, stages["prepare@left"])
    assert failure_note(project, "vectors").exists()
    assert not failure_note(project, "prepare@left").exists()


def test_a_worker_of_other_code_refuses_and_names_both(tmp_path: Path) -> None:
    check_worker(running_code(), "finetune@left")
    check_worker({}, "finetune@left")
    driver = {**running_code(), "host": "driver", "code of mergeflow": "0123456789ab", "torch": "9.9"}
    words = (
        f"code of mergeflow {running_code()['code of mergeflow']} here and 0123456789ab there, torch .* and 9.9 there"
    )
    with pytest.raises(MergeflowError, match=f"finetune@left was sent to .*than driver.*{words}"):
        check_worker(driver, "finetune@left")
    with pytest.raises(MergeflowError, match="finetune@left was sent to"):
        stage.fn(str(tmp_path), "finetune@left", driver=driver)
