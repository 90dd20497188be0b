"""The order of the tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first: one that is left for the end keeps a single core busy while the others wait.

    With `--no-loadscope-reorder`; by itself pytest-xdist begins with the files of most tests, which are the fast ones.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
