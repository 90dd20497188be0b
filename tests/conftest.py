"""The order of the tests."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, examples of docstrings last, and in between the files of all folders by turns.

    A slow file that is left for the end keeps a single core busy while the others wait. Files of one folder share
    what is made once for all processes of a run (tests/once.py): were they begun together, each would wait for it.
    With `--no-loadscope-reorder`; by itself pytest-xdist begins with the files of most tests, which are the fast ones.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    folders: dict[Path, dict[Path, int]] = {}
    for item in items:
        numbers = folders.setdefault(item.path.parent, {})
        numbers.setdefault(item.path, len(numbers))

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        example = not item.path.name.startswith("test_")
        return item.path not in slow, example, folders[item.path.parent][item.path]

    items.sort(key=place)
