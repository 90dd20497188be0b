"""`benchmarks.device` from one end to the other with tiny shapes, and what a stopped or failed section leaves."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import device
from benchmarks.merging.shapes import make_checkpoints
from benchmarks.on_device import judging, merging, pipeline, training
from tests.card import card

PAGE = "# On a card\n\n## Measured\n\n### A card\n\nold\n\n### Another\n\nstays\n"
ABOUT = {"device": "A card", "torch": "2"}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def called(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["device", *map(str, words)])
    device.main()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers and PEFT
def test_a_rehearsal_of_three_pieces_fills_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in device.PIECES:
        called(monkeypatch, "--all", "--piece", piece, "--rehearse", "--out", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    called(monkeypatch, "--page", page, "--out", tmp_path)
    text, (_, results) = page.read_text(), device.read_pieces(tmp_path)
    for name in (name for piece in device.PIECES.values() for name in piece):
        assert results[name]["rows"], name
        assert not results[name]["fault"]
        assert f"| `{name}`" in text
    assert "a rehearsal" in text
    assert results["pipeline"]["rows"][-1]["same order"] is True
    assert results["adamerging"]["rows"][-1]["of that of T = 2"] == 1.0
    assert [row["largest difference"] for row in results["statistics"]["rows"]] == [0.0, 0.0]
    assert all(row["foretold GiB"] > 0 for row in results["finetune"]["rows"])
    assert {row["precision"] for row in results["finetune"]["rows"]} == {"float32", "bfloat16"}


@pytest.mark.slow
def test_judging_merging_and_candidates_rehearsed() -> None:
    results = {
        name: device.rehearsed(piece[name][1])
        for piece in device.PIECES.values()
        for name in piece
        if name in ("judging", "candidates") or name.startswith("merging")
    }
    assert not any(result["fault"] for result in results.values())
    judged = results["judging"]["rows"]
    assert [row["precision"] for row in judged[:3]] == ["float32", "tf32", "bfloat16"]
    assert [row["points from float32"] for row in judged[:2]] == [0, 0]  # the processor knows no TF32
    assert [row["same scores"] for row in judged[3:5]] == [1, 1]
    assert [row["method"] for row in results["candidates"]["rows"]] == ["task_arithmetic", "ties"]
    assert all(row["ratio"] > 0 for row in results["merging_1_2b"]["rows"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers and PEFT
def test_sections_follow_the_rules_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that start processes, where there is no simulated card."""
    for module in (judging, merging, pipeline, training):
        monkeypatch.setattr(module, "place", lambda rehearse: torch.device("cuda:0"))
    monkeypatch.setattr(merging, "make_checkpoints", lambda *args: make_checkpoints(*args[:3]))  # no generator there
    with card():
        for piece in device.PIECES.values():
            for name in piece.keys() - {"finetune", "pipeline", "tests"}:
                result = device.rehearsed(piece[name][1])
                assert (result["fault"], bool(result["rows"])) == ("", True), name


def test_a_section_that_fails_does_not_end_a_rehearsal_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def broken(rehearse: bool):
        runs.append("broken")
        yield {"a": 1}
        raise ZeroDivisionError("of nothing")

    def whole(rehearse: bool):
        runs.append("whole")
        yield {"b": 2}

    monkeypatch.setattr(device, "PIECES", {1: {"broken": (1, broken), "whole": (1, whole)}})
    for _ in range(2):
        with pytest.raises(SystemExit, match="broken failed: see above"):
            called(monkeypatch, "--all", "--rehearse", "--out", tmp_path)
    results = json.loads((tmp_path / "piece-1.json").read_text())
    assert (results["broken"]["rows"], results["broken"]["fault"]) == ([{"a": 1}], "ZeroDivisionError: of nothing")
    assert results["whole"]["rows"] == [{"b": 2}]
    assert runs == ["broken", "whole", "broken"]


def test_a_section_whose_time_was_over_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PIECES", {1: {"slow": (1, None)}})
    results = {"machine": {}, "slow": {"rows": [{"a": 1}], "seconds": 1, "fault": "stopped after 1 s"}}
    (tmp_path / "piece-1.json").write_text(json.dumps(results))
    assert device.run(tmp_path, 1, ["slow"], rehearse=True) == results


def test_every_piece_ends_within_ten_minutes() -> None:
    assert len(device.PIECES) == 3
    assert all(sum(limit for limit, _ in piece.values()) <= 570 for piece in device.PIECES.values())


def test_a_cards_table_replaces_its_older_one_and_leaves_the_rest() -> None:
    rows: list[dict[str, Any]] = [
        {"model": "L/14", "batch": 64, "images/s": 2000.0, "same": True},
        {"model": "a|b", "images/s": 1},
    ]
    results = {"judging": {"rows": rows, "fault": "stopped after 2 s"}}
    once = device.with_table(PAGE, ABOUT, results)
    assert once == device.with_table(once, ABOUT, results)
    assert once.startswith("# On a card\n\n## Measured\n\n### A card\n\ntorch 2.\n")
    assert once.endswith("\n\n### Another\n\nstays\n")
    assert "old" not in once
    assert "| L/14, 64 | images/s 2000, same True |\n|  | a/b | images/s 1 |\n|  |  | **stopped after 2 s** |" in once
    assert device.with_table("# On a card\n", ABOUT, results).startswith("# On a card\n\n### A card\n")


def test_pieces_of_two_machines_make_no_table(tmp_path: Path) -> None:
    for number, name in enumerate(("A card", "Another"), start=1):
        (tmp_path / f"piece-{number}.json").write_text(json.dumps({"machine": {"device": name, "torch": "2"}}))
    with pytest.raises(SystemExit, match=r"those of A card \(torch 2\), Another"):
        device.read_pieces(tmp_path)


def test_the_machine_is_described_where_there_is_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(name="a card", total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: shown)
    asked = SimpleNamespace(stdout="570.1\n")
    monkeypatch.setattr("benchmarks.device.subprocess.run", lambda *args, **kwargs: asked)
    machine = device.machine(rehearse=False)
    assert (machine["device"], machine["memory"], machine["driver"]) == ("a card", "80 GiB", "570.1")


@pytest.mark.slow
def test_a_section_that_is_stopped_or_fails_keeps_its_rows(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    code = f"import time; print('ROW {{\"a\": 1}}', flush=True); assert 'ROW' in open({str(log)!r}).read(); "
    slow = device.section([sys.executable, "-c", code + "time.sleep(60)"], "slow", 2, log)
    assert (slow["rows"], slow["fault"]) == ([{"a": 1}], "stopped after 2 s")
    failed = device.section([sys.executable, "-c", code + "1 / 0"], "failed", 60, log)
    assert failed["rows"] == [{"a": 1}]
    assert "status 1" in failed["fault"]
    assert "ZeroDivisionError" in log.read_text()


@pytest.mark.slow
def test_a_test_that_fails_on_the_card_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_card.py").write_text("def test_a_real_one():\n    assert False\n")
    monkeypatch.setattr(pipeline, "TESTS", (str(tmp_path / "test_card.py"),))
    result = device.rehearsed(pipeline.tests)
    assert "1 failed" in result["rows"][0]["result"]
    assert "a test failed: 1 failed" in result["fault"]
