"""The order of the tests, the environment of each, and the processor threads of each of their processes."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch. Several processes run tests side by side: threads of one that wait for a processor that
# another one holds would spin, and the same tests take several times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Importing torch and transformers makes 10^6 objects. To search them for garbage again and again took a seventh of the
# tests' time.
gc.set_threshold(20_000, 20, 50)

# Files that take most time are begun first: one that is left for the end keeps a single core busy. The first ones wait
# for servers and schedules most of theirs.
LONGEST = [
    *("deployments", "store", "operations", "dvc", "night", "crash", "cart", "kills", "code", "pipeline", "linearity"),
    *("mlflow_server", "toy_lifecycle", "lifecycle", "wheel", "contract"),
]

# For the same reason no example has a deadline.
settings.register_profile("shared processor", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared processor")


@pytest.fixture(autouse=True)
def _environment_of_before() -> Iterator[None]:
    """Restore the environment: a login that a test left in it would be masked in the messages of the next ones."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ |= before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then those with slow tests, and examples of docstrings last; folders take turns.

    Files of one folder share what is made once for all processes of a run (tests/once.py): were they begun together,
    each would wait for it. With `--no-loadscope-reorder`; by itself pytest-xdist begins with the files of most tests,
    which are the fast ones.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    folders: dict[Path, dict[Path, int]] = {}
    for item in items:
        numbers = folders.setdefault(item.path.parent, {})
        numbers.setdefault(item.path, len(numbers))

    def place(item: pytest.Item) -> tuple[int, bool, bool, int]:
        name, example = item.path.stem.removeprefix("test_"), not item.path.name.startswith("test_")
        rank = LONGEST.index(name) if name in LONGEST and not example else len(LONGEST)
        return rank, item.path not in slow, example, folders[item.path.parent][item.path]

    items.sort(key=place)
