"""Modules that are imported when something of them is first used.

torch takes two seconds to import; what only declares things (methods and their arguments, readers of files) is imported
without it, so that commands which list or explain answer at once.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any


class Late:
    """Stands for a module; its attributes are found, and kept, when they are first asked for.

    Example:
        >>> Late("math").floor(2.5)
        2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value


def late_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`: names that other modules hold, which are imported when one is first used.

    Example:
        >>> late_names("here", {"floor": "math"})("floor")(2.5)
        2
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        return getattr(import_module(homes[name]), name)

    return find


@contextmanager
def quiet(package: str, level: int = logging.WARNING) -> Iterator[None]:
    """Keep what a package logs below a level off the terminal; afterwards its level is as before."""
    logger = logging.getLogger(package)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np = Late("numpy")
    torch = Late("torch")

__all__ = ["late_names", "np", "quiet", "torch"]
