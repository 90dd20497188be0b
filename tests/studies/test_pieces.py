"""Pieces of a study: measured once, by one process or several, and kept over a kill that leaves no process behind."""

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from mergeflow.plugins import load_file
from studies.lab.inputs import Lazy, cached, cached_all
from tasks.project.stage import StageIO
from tests.flows.prefect_server import wait_for
from tests.studies.small_lab import ROOT, study_io

KILLED = """if True:
    import time
    from functools import partial
    from pathlib import Path
    from studies.lab.inputs import cached_all
    from tests.studies.test_pieces import two_workers

    if __name__ == "__main__":
        measures = {"quick": partial(dict, number=1), "slow": partial(time.sleep, 600)}
        cached_all(two_workers(Path("SCRATCH")), measures)
"""


def two_workers(scratch: Path) -> StageIO:
    return study_io(ROOT, "laboratory", scratch, workers=2)


def test_a_kept_piece_is_measured_once(tmp_path: Path) -> None:
    io, calls = study_io(ROOT, "laboratory", tmp_path), iter((1, 2))
    assert [cached(io, "piece", lambda: {"call": next(calls)}) for _ in range(2)] == [{"call": 1}] * 2


def test_pieces_are_measured_by_other_processes_and_come_in_order(tmp_path: Path) -> None:
    io = two_workers(tmp_path)
    cached(io, "b", partial(dict, number=5))
    measures = {name: partial(dict, number=number) for number, name in enumerate("abc")}
    assert cached_all(io, measures) == [{"number": 0}, {"number": 5}, {"number": 2}]
    elsewhere = cached_all(io, {"first": os.getpid, "second": os.getpid})  # type: ignore[dict-item]
    assert os.getpid() not in elsewhere
    assert cached_all(study_io(ROOT, "laboratory", tmp_path), {"here": os.getpid}) == [os.getpid()]  # type: ignore[dict-item, comparison-overlap]


def test_files_of_a_stage_go_to_another_process_without_what_they_hold(tmp_path: Path) -> None:
    io = replace(two_workers(tmp_path), withheld=("outputs/data/test",), costs={"spent": 1})
    there = pickle.loads(pickle.dumps(io))
    assert (there.stage, there.root, there.scratch) == (io.stage, io.root, io.scratch)
    assert there.params.model_dump() == io.params.model_dump()
    assert there.studies == io.studies
    assert there.withheld == ("outputs/data/test",)
    assert there.costs == {}


def test_code_of_the_projects_own_folder_is_measured_here(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\n\ndef measure(number):\n    return os.getpid()\n")
    module = load_file(tmp_path / "own.py")
    measures = {str(number): partial(module.measure, number) for number in range(2)}
    assert cached_all(two_workers(tmp_path), measures) == [os.getpid()] * 2


def test_what_pieces_share_is_made_once_for_all_processes() -> None:
    made: list[int] = []
    shared = Lazy(lambda: made.append(1) or [*made])
    there = pickle.loads(pickle.dumps(shared))
    assert shared() == there() == [1]
    assert there() is there()


def test_a_piece_that_fails_ends_the_rest(tmp_path: Path) -> None:
    io = two_workers(tmp_path)
    measures = {"good": partial(dict, number=1), "bad": partial(int, "x"), **dict.fromkeys("abcdefgh", dict)}
    with pytest.raises(ValueError, match="invalid literal"):
        cached_all(io, measures)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_killed_study_keeps_its_pieces_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(KILLED.replace("SCRATCH", str(tmp_path)))
    study = subprocess.Popen([sys.executable, script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    quick = tmp_path / "pieces/quick.json"
    wait_for(quick.exists, 120, every=0.05)
    workers = psutil.Process(study.pid).children(recursive=True)
    study.send_signal(signal.SIGKILL)
    study.wait()
    assert len(workers) >= 2
    wait_for(
        lambda: not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers), 120
    )
    assert json.loads(quick.read_text()) == {"number": 1}
    measures = {"quick": partial(dict, number=2), "slow": partial(dict, number=3)}
    assert cached_all(two_workers(tmp_path), measures) == [{"number": 1}, {"number": 3}]
