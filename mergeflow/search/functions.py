"""Score with a function of the user's, found by `module:function` or `file.py:function`."""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.search.score_file import FunctionScore, name_of
from mergeflow.search.scorer import Candidate, CandidateModel, CheckedScorer


def function_scorer(part: FunctionScore) -> tuple[CheckedScorer, str]:
    """Return the scorer, and a digest of the function's file.

    Raises:
        MergeflowError: There is no such module or function, or its module cannot be imported.
    """
    place, _, name = part.function.rpartition(":")
    module = _module(place)
    function: Callable[[Any, Candidate], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise unknown_name(
            f"function of {place}", name, [key for key, value in vars(module).items() if callable(value)]
        )

    def score(model: CandidateModel, candidate: Candidate) -> Any:
        assert function is not None
        if part.model == "state":
            return function(dict(model.state), candidate)
        with model.folder() as folder:
            return function(folder, candidate)

    return CheckedScorer(score, name_of(part)), _digest(module)


def _module(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _from_file(Path(place))
        with _importable(os.getcwd()):  # as `python -m` does it; the command `mergeflow` lies elsewhere
            return importlib.import_module(place)
    except MergeflowError:
        raise
    except Exception as error:  # whatever the module does when it is imported
        raise MergeflowError(f"score: cannot import '{place}': {type(error).__name__}: {error}.") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise MergeflowError(f"score: there is no file '{path}': give `file.py:function` or `module:function`.")
    home = path.resolve().parent
    # A name of its own, so that the file shadows nothing that is installed.
    name = f"_scorer_{hashlib.sha256(str(home).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        with _importable(str(home)):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Find the modules of a folder first inside the block."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the code that was imported may have changed the list
            sys.path.remove(folder)


def _digest(module: ModuleType) -> str:
    place = getattr(module, "__file__", None)
    return hashlib.sha256(Path(place).read_bytes()).hexdigest() if place else ""
