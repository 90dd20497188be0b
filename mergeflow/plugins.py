"""Python files and packages of users: loaded under private names, with one message where that fails, and digested."""

import ast
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, EntryPoints
from importlib.metadata import entry_points as read_entry_points
from importlib.util import module_from_spec, resolve_name
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from mergeflow.application import find_project
from mergeflow.errors import MergeflowError


@dataclass(frozen=True)
class Origin:
    """Where a declared thing comes from.

    Attributes:
        place: A path in the project's folder, a file, or an installed package with its version.
        digest: SHA-256 of the source it is made of; None for the things of mergeflow itself, which its version names.
    """

    place: str
    digest: str | None = None


OWN = Origin("mergeflow")
PRIVATE = "_mergeflow_"  # how the names begin under which `load_file` loads modules


@cache
def entry_points(group: str) -> EntryPoints:
    """Return the installed entry points of a group, read once a process: to read them takes 35 ms.

    Args:
        group: for example `mergeflow.methods`.
    """
    return read_entry_points(group=group)


def project_folder() -> Path | None:
    """Return the project folder that the current folder lies in; None outside of any."""
    return _project_above(os.getcwd())


@lru_cache(maxsize=256)  # a merge asks thousands of times
def _project_above(start: str) -> Path | None:
    return find_project(Path(start))


def python_files(folder: Path) -> list[Path]:
    """Return what may declare things in a folder: its modules and packages, but for those whose name begins with _."""
    if not folder.is_dir():
        return []
    modules = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    packages = [path.parent for path in folder.glob("[!_.]*/__init__.py")]
    return sorted(modules + packages)


def load_file(path: Path) -> ModuleType:
    """Load a module, or a package by its folder, under a private name, so that it shadows nothing that is installed.

    Files beside it are imported relatively: `from .helpers import trim` in methods/mine.py reads methods/helpers.py.

    Raises:
        MergeflowError: It cannot be read or raises an exception; the message names the file and the line.
    """
    if path.is_file() and (path.suffix != ".py" or "." in path.stem):
        raise MergeflowError(f"'{path}' is not a Python module: name it like my_methods.py.")
    if not path.exists():
        raise MergeflowError(f"there is no file '{path}'. Check the path.")
    home = path.resolve().parent
    private = f"{PRIVATE}{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
    if private not in sys.modules:
        spec = ModuleSpec(private, None, is_package=True)
        spec.submodule_search_locations = [str(home)]
        sys.modules[private] = module_from_spec(spec)
    try:
        return import_module(f"{private}.{path.stem}")
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        raise _broken(f"'{path}'", home, error) from error


def load_part(package: str, part: str, what: str) -> ModuleType:
    """Load one module of a package.

    Args:
        package: The package's name, private where it lies in the project.
        part: The module's name in it.
        what: What an error message calls the package.

    Raises:
        MergeflowError: It is not there, or raises an exception; the message names the file and the line.
    """
    name = f"{package}.{part}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise MergeflowError(f"{what} has no module '{part}': add {part}.py to its package.") from None
        raise _broken(f"{part}.py of {what}", _home(package), error) from error
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        raise _broken(f"{part}.py of {what}", _home(package), error) from error


def loaded_from(module: ModuleType) -> str:
    """Return what a message calls a loaded module: its file."""
    return str(module.__file__ or module.__name__)


def _home(package: str) -> Path:
    return Path(sys.modules[package].__path__[0]).resolve() if package in sys.modules else Path()


def load_entry_point(point: EntryPoint) -> Any:
    """Return the module or object that an installed package's entry point names.

    Raises:
        MergeflowError: It cannot be imported; the message names the package.
    """
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise MergeflowError(
            f"the entry point '{point.name} = {point.value}' of {_distribution(point)} cannot be loaded: "
            f"{type(error).__name__}: {error}. Update that package or remove it."
        ) from error


def _broken(what: str, home: Path, error: BaseException) -> MergeflowError:
    """Return the error for a file that cannot be loaded, with the last of its lines that was reached."""
    place = last_place(error, lambda frame: home in Path(frame.f_code.co_filename).parents)
    if isinstance(error, SyntaxError) and error.filename:
        place = Place(Path(error.filename), error.lineno or 0, "")
    where = f", {place}" if place else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return MergeflowError(
        f"{what} cannot be loaded{where}: {type(error).__name__}: {text}. "
        "Correct it, or begin its name with an underscore to leave it out."
    )


@dataclass(frozen=True)
class Place:
    """A line of Python.

    Attributes:
        file: It is in this file.
        line: Its number, from 1.
        function: It belongs to this function.
    """

    file: Path
    line: int
    function: str

    def __str__(self) -> str:
        return f"line {self.line} of {self.file.name}"


def last_place(error: BaseException, belongs: Callable[[FrameType], bool]) -> Place | None:
    """Return the last line that an error came through in some files, such as a user's; None where it passed none.

    Args:
        error: It has a traceback.
        belongs: Whether a frame of it lies in those files.
    """
    walk = traceback.walk_tb(error.__traceback__)
    places = [Place(Path(at.f_code.co_filename), line, at.f_code.co_name) for at, line in walk if belongs(at)]
    return places[-1] if places else None


def origin_of(module: ModuleType, place: str) -> Origin:
    """Return where things of a module come from: the place, and a digest of its source.

    The digest is of the module's file and of those that it imports from its own package, however deep.
    """
    found: dict[str, bytes] = {}
    _add_sources(module, found)
    whole = hashlib.sha256()
    top = len(module.__name__.partition(".")[0])
    for name in sorted(found):
        # The private package's name says where the folder lies on this machine, which does not count.
        whole.update(f"{name[top:]}\0{hashlib.sha256(found[name]).hexdigest()}\0".encode())
    return Origin(place, whole.hexdigest())


def entry_point_origin(point: EntryPoint) -> Origin:
    """Return where things of an entry point come from, once it is loaded."""
    return origin_of(sys.modules[point.module], f"{_distribution(point)} ({point.value})")


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"


def _add_sources(module: ModuleType, found: dict[str, bytes]) -> None:
    if module.__name__ in found or not (module.__file__ or "").endswith(".py"):
        return
    source = found[module.__name__] = Path(str(module.__file__)).read_bytes()
    top = module.__name__.partition(".")[0]
    for name in _imported(ast.parse(source), module):
        if name.partition(".")[0] == top and name in sys.modules:
            _add_sources(sys.modules[name], found)


def _imported(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    """Yield the full names of modules that a source imports (and of objects in them, which are not modules)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.__spec__.parent if module.__spec__ else None
            whole = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield whole
            yield from (f"{whole}.{alias.name}" for alias in node.names)
