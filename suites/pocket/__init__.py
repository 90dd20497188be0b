"""The embedded suites: image-classification tasks that need no download."""

from mergeflow.data import SPLITS
from mergeflow.errors import unknown_name
from suites.pocket.core import TEMPLATES, Suite, SuiteTask
from suites.pocket.suites import DIGITS, POCKETS

__all__ = ["SPLITS", "TEMPLATES", "Suite", "SuiteTask", "get_suite", "suite_names"]

_SUITES = {suite.name: suite for suite in (*POCKETS, DIGITS)}


def suite_names() -> list[str]:
    """Return the names of the embedded suites.

    Example:
        >>> suite_names()
        ['pocket8', 'pocket14', 'pocket20', 'pocket-digits']
    """
    return list(_SUITES)


def get_suite(name: str) -> Suite:
    """Return an embedded suite by name.

    Example:
        >>> list(get_suite("pocket8").tasks)
        ['digits', 'street', 'signs', 'textures', 'land', 'aerial', 'scenes', 'vehicles']
    """
    if name not in _SUITES:
        raise unknown_name("suite", name, _SUITES)
    return _SUITES[name]
