"""The source kind `suite:`: tasks that a program draws. Its packages lie beside the library, which imports none."""

from importlib import import_module
from pathlib import Path

from mergeflow.application import make_importable
from mergeflow.data.address import Opener
from mergeflow.data.task import RawTask


def drawn_by(module: str) -> Opener:
    """Return the opener of a kind `suite:`, whose module is imported when a task of it is first opened.

    Args:
        module: The full name of a module that has a function `open_suite`.
    """

    def open_drawn(task: str, place: str, seed: int, root: Path) -> RawTask:
        make_importable()
        raw: RawTask = import_module(module).open_suite(task, place, seed, root)
        return raw

    return open_drawn
