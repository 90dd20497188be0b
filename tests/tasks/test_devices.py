"""GPU slots: one holder per device over processes, free again when the holder dies."""

import multiprocessing
import time
from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from tasks.project import devices
from tasks.project.devices import device_names, device_slot

NAMES = ("cuda:0", "cuda:1")


def hold(locks: Path, names: tuple[str, ...], told: Path, seconds: float) -> None:
    """Hold a slot in a process of its own, and leave its name in a file."""
    with device_slot(names, locks) as name:
        told.write_text(name)
        time.sleep(seconds)


@pytest.fixture
def holder(tmp_path: Path):
    started = []

    def start(*names: str, seconds: float = 60.0):
        told = tmp_path / f"told_{len(started)}"
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=hold, args=(tmp_path / "locks", names, told, seconds), daemon=True)
        process.start()
        started.append(process)
        until = time.monotonic() + 60
        while not (told.exists() and told.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        return process, told.read_text()

    yield start
    for process in started:
        process.kill()
        process.join()


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
