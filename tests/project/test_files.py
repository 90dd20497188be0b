"""The one lock of a project: who waits for it is told for what, and it falls with its holder."""

import threading
import time
from pathlib import Path

import pytest
from filelock import Timeout

from tasks.project import files
from tasks.project.files import file_lock


@pytest.fixture
def held(tmp_path: Path):
    path, taken = tmp_path / "locks/stage.lock", threading.Event()

    def hold() -> None:
        with file_lock(path, "the stage"):
            taken.set()
            time.sleep(0.4)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    yield path
    holder.join()


def test_who_waits_is_told_for_what_and_gets_it(held: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    with file_lock(held, "the stage finetune@digits"):
        assert capsys.readouterr().err == "Waiting for the stage finetune@digits, which another process holds.\n"


def test_a_short_wait_is_not_spoken_of(held: Path, capsys) -> None:
    with file_lock(held, "the stage"):
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("patience", "timeout"), [(10.0, 0.05), (0.05, 0.1), (10.0, 0.0)])
def test_a_wait_may_have_an_end(held: Path, monkeypatch, patience: float, timeout: float) -> None:
    monkeypatch.setattr(files, "PATIENCE", patience)
    with pytest.raises(Timeout), file_lock(held, "the stage", timeout):
        pytest.fail("it was held")
