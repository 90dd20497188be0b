"""The formulas behind the studies, broken on purpose one at a time: a test fails for each."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.studies.faults import FAULTS, Broken, table
from tests.studies.small_lab import ROOT

COPIED = ("mergeflow", "tasks", "registry", "flows", "suites", "tests", "studies", "worlds", "inputs", "examples")
RECORDS = "docs/studies/results"
FILES = ("params.yaml", "dvc.yaml", "pyproject.toml")
# An assertion, or the refusal to open test where something is chosen.
FAILED = re.compile(r"^FAILED .* - (assert |AssertionError|.* where it must not)", re.MULTILINE)

# The systems of the three papers on merging, whose every claim must rest on a formula that is broken here.
SYSTEMS = {f"{paper}{number}" for paper, last in {"G": 9, "M": 7, "C": 9}.items() for number in range(1, last + 1)}


def test_every_fault_has_one_place_and_a_test() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault
        file, _, name = fault.caught_by.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), fault


def test_every_system_is_broken_once() -> None:
    assert {system for fault in FAULTS for system in fault.systems.split()} >= SYSTEMS


def test_the_page_has_every_fault() -> None:
    assert table() in (ROOT / "docs/study-evidence.md").read_text(), table()


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program and its tests, which pass there as they are."""
    root = tmp_path_factory.mktemp("broken") / "copy"
    for name in (*COPIED, RECORDS):
        shutil.copytree(ROOT / name, root / name)
    for name in FILES:
        shutil.copy2(ROOT / name, root / name)
    found = run(root, *sorted({one.caught_by for one in FAULTS}))
    assert found.returncode == 0, found.stdout + found.stderr
    return root


def run(root: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy; its process is not one of this run's, whose folders it must not share."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    (root.parent / "temporary").mkdir(exist_ok=True)
    own |= {"PYTHONPATH": str(root), "PYTEST_DEBUG_TEMPROOT": str(root.parent / "temporary"), "COLUMNS": "999"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=root, env=own, capture_output=True, text=True, check=False)


@contextmanager
def broken(root: Path, fault: Broken) -> Iterator[None]:
    path = root / fault.file
    whole = path.read_text()
    path.write_text(whole.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(whole)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.systems}: {fault.fault}")
def test_a_test_fails_for_every_fault(fault: Broken, copied: Path) -> None:
    with broken(copied, fault):
        found = run(copied, fault.caught_by)
    assert found.returncode == 1, found.stdout + found.stderr
    assert FAILED.search(found.stdout), found.stdout
