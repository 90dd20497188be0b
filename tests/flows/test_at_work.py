"""What `mergeflow status` says during a run: the stages at work, and nothing of a run that was killed."""

import json
from pathlib import Path

from flows.status import at_work
from tasks.project.stage import STATE
from tasks.running.runner import progress_file


def test_a_stage_at_work_is_named_with_its_progress_until_it_ends(tmp_path: Path) -> None:
    with progress_file(tmp_path / STATE, "finetune@digits"), progress_file(tmp_path / STATE, "multitask signs"):
        expected = [f"{name} · starting (0 of 1)" for name in ("finetune@digits", "multitask signs")]
        assert list(at_work(tmp_path)) == expected
    assert list(at_work(tmp_path)) == []


def test_what_a_killed_run_has_left_is_not_at_work(tmp_path: Path) -> None:
    left = tmp_path / STATE / "progress/finetune@digits.json"
    left.parent.mkdir(parents=True)
    left.write_text(json.dumps({"what": "training", "done": 3, "total": 9}))
    assert list(at_work(tmp_path)) == []
    with progress_file(tmp_path / STATE, "finetune@digits"):  # the next run goes on with it
        assert len(list(at_work(tmp_path))) == 1
