"""The library imports with torch, open_clip and the few packages that merging needs: all others are blocked here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mergeflow
from mergeflow.errors import EXTRAS

HALVES = (
    "merging",
    "checkpoints",
    "training",
    "evaluation",
    "memory",
    "linearity",
)
WALK = """
import importlib, importlib.abc, json, pkgutil, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked, halves = map(json.loads, sys.argv[1:])
sys.meta_path.insert(0, Blocked())
import mergeflow
failed = {}

def bring(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name.partition(".")[0]

for name in halves:
    bring("mergeflow." + name)
tables = "pyarrow" in sys.modules
names = [one.name for one in pkgutil.walk_packages(mergeflow.__path__, "mergeflow.")]
for name in names:
    bring(name)
print(json.dumps([len(names), tables, failed]))
"""


@pytest.mark.slow
def test_every_module_imports_without_the_packages_of_other_extras() -> None:
    """What makes data and reads tables needs pyarrow, which the extra `vision` installs; the rest does not."""
    others = {module for module, extra in EXTRAS.items() if extra != "vision"}
    blocked = json.dumps([*others, "pandas", "filelock", "pytest", "hypothesis"])
    command = [sys.executable, "-c", WALK, blocked, json.dumps(HALVES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, tables, failed = json.loads(done.stdout.splitlines()[-1])
    files = [*Path(mergeflow.__path__[0]).rglob("*.py")]
    assert count == len(files) - 1  # the package itself is not among its modules
    assert not tables
    assert failed == {}
