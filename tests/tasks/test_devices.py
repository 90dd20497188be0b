"""GPU slots: one holder per device over processes, free again when the holder dies."""

import multiprocessing
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from mergeflow.modality import Model, device_of
from mergeflow.training import fine_tune
from tasks.project.graph import load_graph
from tasks.running import devices
from tasks.running.devices import device_names, device_slot
from tasks.running.runner import run_stage
from tests.card import card
from tests.project_folder import change_params
from tests.toy_project import make_toy_project, run_pipeline

NAMES = ("cuda:0", "cuda:1")


def hold(locks: Path, names: tuple[str, ...], note: Path, seconds: float) -> None:
    with device_slot(names, locks) as name:
        note.write_text(name)
        time.sleep(seconds)


@pytest.fixture
def holder(tmp_path: Path):
    started = []

    def start(*names: str, seconds: float = 60.0):
        note = tmp_path / f"told_{len(started)}"
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=hold, args=(tmp_path / "locks", names, note, seconds), daemon=True)
        process.start()
        started.append(process)
        until = time.monotonic() + 60
        while not (note.exists() and note.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        return process, note.read_text()

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_two_processes_never_share_a_device_and_a_killed_holder_frees_it(tmp_path: Path, holder) -> None:
    locks = tmp_path / "locks"
    process, held = holder(*NAMES)
    assert held == "cuda:0"
    with device_slot(NAMES, locks) as second:  # takes the free one
        assert second == "cuda:1"
    process.kill()
    process.join()
    began = time.monotonic()
    with device_slot(["cuda:0"], locks) as name:
        assert name == "cuda:0"
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(("visible", "names"), [("1", ["cuda:0"]), ("0,1", ["cuda:1"])])
def test_workers_that_see_one_device_each_hold_different_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    with device_slot(["cuda:0"], tmp_path):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(devices.files.Wait, "pause", lambda *_: pytest.fail("it waits for another device"))
        with device_slot(names, tmp_path) as second:
            assert second == names[0]
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
            with pytest.raises(pytest.fail.Exception), device_slot(["cuda:0"], tmp_path):
                pass


def test_it_waits_while_all_are_held(tmp_path: Path) -> None:
    from threading import Thread

    locks, order = tmp_path / "locks", []

    def wait() -> None:
        with device_slot(["cuda:0"], locks) as name:
            order.append(name)

    with device_slot(["cuda:0"], locks):
        thread = Thread(target=wait)
        thread.start()
        time.sleep(2 * devices.POLL_SECONDS)
        assert order == []
    thread.join(timeout=10)
    assert order == ["cuda:0"]


def test_an_error_inside_frees_the_slot(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), device_slot(["cuda:0"], tmp_path):
        raise ZeroDivisionError
    with device_slot(["cuda:0"], tmp_path) as name:
        assert name == "cuda:0"


def test_the_cpu_needs_no_lock(tmp_path: Path) -> None:
    with device_slot(["cpu"], tmp_path) as first, device_slot(["cpu"], tmp_path) as second:
        assert first == second == "cpu"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wanted", "count", "expected"),
    [
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("cpu", 2, ["cpu"]),
        ("auto", 0, ["cpu"]),
    ],
)
def test_names(monkeypatch: pytest.MonkeyPatch, wanted: str, count: int, expected: list[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert device_names(wanted) == expected


@pytest.mark.parametrize(("wanted", "count"), [("cuda", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, wanted: str, count: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(MergeflowError, match=f"run.device is '{wanted}', but torch finds"):
        device_names(wanted)


@pytest.mark.slow
def test_a_runner_s_threads_take_the_cards_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts, three threads, two cards: two are trained at once, each on its own card, and the third waits."""
    folder = make_toy_project(tmp_path / "project", steps=2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # locks of this test alone
    change_params(folder, {"tasks": dict.fromkeys("abc", "toy:clouds"), "run.device": "cuda"})
    run_pipeline(folder, ("prepare", "base", "multitask"))
    used, busy, lock, both = list[str](), set[str](), Lock(), Barrier(2, timeout=60)

    def watched(model: Model, *args: Any, **kwargs: Any) -> Any:
        name = str(device_of(model))
        with lock:
            assert name not in busy
            busy.add(name)
            used.append(name)
            number = len(used)
        if number <= 2:
            both.wait()
        try:
            return fine_tune(model, *args, **kwargs)
        finally:
            busy.remove(name)

    monkeypatch.setattr("tasks.training.fine_tune", watched)
    stages = [stage for stage in load_graph(folder).values() if stage.name == "finetune"]
    with card(count=2), ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda stage: run_stage(folder, stage), stages))
    assert sorted(used[:2]) == ["cuda:0", "cuda:1"]
    assert len(used) == 3
