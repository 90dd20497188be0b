"""Servers under test end with a pytest that is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STARTS = {
    "guarded": """
        import subprocess, time
        from pathlib import Path
        from tests.guard import guarded

        def test_it():
            command = guarded(["sh", "-c", "setsid sleep 600 & sleep 601 & wait"])
            subprocess.Popen(command, cwd=FOLDER, start_new_session=True)
            time.sleep(600)
    """,
    "forked": """
        import os, time
        from pathlib import Path
        from tests.flows.forked import Forked

        def test_it():
            Forked(FOLDER, ["dask", "scheduler", "--port", "0", "--no-dashboard"], dict(os.environ))
            time.sleep(600)
    """,
}


def started_in(folder: Path) -> set[int]:
    """Return the living processes whose current folder this is."""
    pids = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cwd").readlink() == folder and "Z" not in (place / "stat").read_text().rpartition(")")[2][:3]:
                pids.add(int(place.name))
        except OSError:  # it ended just now, or is not ours
            continue
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_what_tests_have_started_ends_with_a_killed_pytest(start: str, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    code = "\n".join(line[8:] for line in STARTS[start].replace("FOLDER", f"Path({str(folder)!r})").splitlines())
    (tmp_path / "test_started.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "test_started.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    expected, end = {"guarded": 4, "forked": 1}[start], time.monotonic() + 60
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as run:
        while len(started_in(folder)) < expected and time.monotonic() < end:
            time.sleep(0.1)
        processes = started_in(folder)
        run.kill()
    assert len(processes) == expected
    while processes & started_in(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes & started_in(folder)


def test_a_guarded_command_keeps_its_status() -> None:
    from tests.guard import guarded

    assert subprocess.run(guarded(["sh", "-c", "exit 3"]), check=False).returncode == 3
