"""`benchmarks.device` from one end to the other with tiny shapes, and what a stopped or failed section leaves."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import device


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers and PEFT
def test_a_rehearsal_fills_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = device.run(tmp_path, list(device.SECTIONS), float("inf"), rehearse=True)
    text = (tmp_path / "tables.md").read_text()
    for name in device.SECTIONS:
        assert found[name]["rows"], name
        assert not found[name]["fault"]
        assert f"## {name}," in text
    assert "a rehearsal" in text
    assert found["pipeline"]["rows"][-1]["same order"] is True
    assert found["adamerging"]["rows"][-1]["of that of T = 2"] == 1.0
    assert [row["largest difference"] for row in found["statistics"]["rows"]] == [0.0, 0.0]
    assert all(row["foretold GiB"] > 0 for row in found["finetune"]["rows"])
    assert {row["precision"] for row in found["finetune"]["rows"]} == {"float32", "bfloat16"}


def test_a_section_that_fails_in_a_rehearsal_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rehearse: bool):
        yield {"a": 1}
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr(device, "SECTIONS", {"broken": (1, broken), "whole": (1, lambda rehearse: iter([{"b": 2}]))})
    command = ["device", "--all", "--rehearse", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="broken failed: see above"):
        device.main()
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["broken"]["rows"], found["broken"]["fault"]) == ([{"a": 1}], "ZeroDivisionError: of nothing")
    assert found["whole"]["rows"] == [{"b": 2}]


def test_three_commands_of_ten_minutes_have_room_for_every_section() -> None:
    commands = [0]
    for limit, _ in device.SECTIONS.values():
        commands = [*commands[:-1], commands[-1] + limit] if commands[-1] + limit <= 570 else [*commands, limit]
    assert len(commands) <= 3


def test_the_machine_is_described_where_there_is_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(name="a card", total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: shown)
    asked = SimpleNamespace(stdout="570.1\n")
    monkeypatch.setattr("benchmarks.device.subprocess.run", lambda *args, **kwargs: asked)
    found = device.machine(rehearse=False)
    assert (found["device"], found["memory"], found["driver"]) == ("a card", "80 GiB", "570.1")


def test_what_stands_is_not_measured_again_and_what_does_not_fit_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"machine": {}, "mima": {"rows": [], "seconds": 1, "fault": ""}}))
    assert device.run(tmp_path, ["mima", "causal"], 10, rehearse=True).keys() == {"machine", "mima"}
    assert "causal: not begun" in capsys.readouterr().out


@pytest.mark.slow
def test_a_section_that_is_stopped_or_fails_keeps_its_rows(tmp_path: Path) -> None:
    code = "import time; print('ROW {\"a\": 1}', flush=True); "
    slow = device.section([sys.executable, "-c", code + "time.sleep(60)"], "slow", 2, tmp_path / "log.txt")
    assert (slow["rows"], slow["fault"]) == ([{"a": 1}], "stopped after 2 s")
    failed = device.section([sys.executable, "-c", code + "1 / 0"], "failed", 60, tmp_path / "log.txt")
    assert failed["rows"] == [{"a": 1}]
    assert "status 1" in failed["fault"]
    assert "ZeroDivisionError" in (tmp_path / "log.txt").read_text()
    assert "**stopped after 2 s**" in device.table("slow", slow)
