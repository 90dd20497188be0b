"""Plug-ins: files and packages of users, loaded and digested; the shelves on which things are found by name."""

import ast
import hashlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, EntryPoints
from importlib.metadata import entry_points as read_entry_points
from importlib.util import find_spec, module_from_spec, resolve_name
from pathlib import Path
from pkgutil import iter_modules
from threading import RLock
from types import FrameType, ModuleType
from typing import Any, Generic, Protocol, TypeVar

from mergeflow.application import find_project
from mergeflow.errors import MergeflowError, unknown_name


@dataclass(frozen=True)
class Origin:
    """Where a declared thing comes from.

    Attributes:
        digest: SHA-256 of the source it is made of; None for the things of mergeflow itself, which its version names.
    """

    place: str
    digest: str | None = None


OWN = Origin("mergeflow")
PRIVATE = "_mergeflow_"  # how the names begin under which `load_file` loads modules


@cache
def entry_points(group: str) -> EntryPoints:
    """Return the installed entry points of a group, read once a process: to read them takes 35 ms."""
    return read_entry_points(group=group)


def project_folder() -> Path | None:
    """Return the project folder that the current folder lies in; None outside of any."""
    return _project_above(os.getcwd())


@lru_cache(maxsize=256)  # a merge asks thousands of times
def _project_above(start: str) -> Path | None:
    return find_project(Path(start))


def python_files(folder: Path) -> list[Path]:
    """List the modules and packages in a folder whose names do not begin with _."""
    if not folder.is_dir():
        return []
    modules = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    packages = [path.parent for path in folder.glob("[!_.]*/__init__.py")]
    return sorted(modules + packages)


def load_file(path: Path) -> ModuleType:
    """Load a module, or a package by its folder, under a private name, so that it shadows nothing that is installed.

    Files beside it are imported relatively: `from .helpers import trim` in methods/mine.py reads methods/helpers.py.
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
    name = f"{package}.{part}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise MergeflowError(f"{what} has no module '{part}': add {part}.py to its package.") from None
        raise _broken(f"{part}.py of {what}", _home(package), error) from error
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        raise _broken(f"{part}.py of {what}", _home(package), error) from error


def _home(package: str) -> Path:
    return Path(sys.modules[package].__path__[0]).resolve() if package in sys.modules else Path()


def load_entry_point(point: EntryPoint) -> Any:
    """Return the module or object that an installed package's entry point names."""
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
    file: Path
    line: int
    function: str

    def __str__(self) -> str:
        return f"line {self.line} of {self.file.name}"


def last_place(error: BaseException, belongs: Callable[[FrameType], bool]) -> Place | None:
    """Return the last line that an error came through in some files, such as a user's; None where it passed none."""
    walk = traceback.walk_tb(error.__traceback__)
    places = [Place(Path(at.f_code.co_filename), line, at.f_code.co_name) for at, line in walk if belongs(at)]
    return places[-1] if places else None


def origin_of(module: ModuleType, place: str) -> Origin:
    """Return where things of a module come from: the place, and a digest of its source.

    The digest is of the module's file and of those that it imports from its own package, however deep.
    """
    sources: dict[str, bytes] = {}
    _add_sources(module, sources)
    whole = hashlib.sha256()
    top = len(module.__name__.partition(".")[0])
    for name in sorted(sources):
        # The private package's name says where the folder lies on this machine, which does not count.
        whole.update(f"{name[top:]}\0{hashlib.sha256(sources[name]).hexdigest()}\0".encode())
    return Origin(place, whole.hexdigest())


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"


def _add_sources(module: ModuleType, sources: dict[str, bytes]) -> None:
    if module.__name__ in sources or not (module.__file__ or "").endswith(".py"):
        return
    source = sources[module.__name__] = Path(str(module.__file__)).read_bytes()
    top = module.__name__.partition(".")[0]
    for name in _imported(ast.parse(source), module):
        if name.partition(".")[0] == top and name in sys.modules:
            _add_sources(sys.modules[name], sources)


def texts_of(module: str) -> dict[str, str]:
    """Return a loaded file of a user's and those that it imports from its folder: their texts, by place below that."""
    sources: dict[str, bytes] = {}
    _add_sources(sys.modules[module], sources)
    home = _home(module.partition(".")[0])
    files = {name: Path(str(sys.modules[name].__file__)).resolve() for name in sources}
    return {files[name].relative_to(home).as_posix(): source.decode() for name, source in sources.items()}


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


# Things that are found by name: declared in a package of ours, in installed ones, or in the project's folder.


class Named(Protocol):
    """A declared thing; one with an attribute `home` says in which module it was declared."""

    @property
    def name(self) -> str:
        """What recipes, parameters and commands call it."""
        ...


T = TypeVar("T", bound=Named)
Found = Mapping[str, tuple[T, Origin]]


@dataclass
class Shelf(Generic[T]):
    """All declared things of one kind, by name.

    A thing is an instance of `declared` at the top level of a module. It is looked for in three places:

    1. the modules of `package`;
    2. entry points of the group `mergeflow.FOLDER` of installed packages; each names a module or one thing;
    3. modules and packages in the folder `FOLDER` of the project that the current folder lies in, and files given to
       `add_file`. Names that begin with an underscore are left out.

    Attributes:
        package: The package of ours that declares some; None where only others do.
        folder: Name of the project's folder and, after "mergeflow.", of the group of entry points.
        how: How one is declared, for messages: "`@method(…)` of mergeflow.merging.method".

    Example:
        >>> from mergeflow.merging.catalog import METHODS
        >>> METHODS.get("ties").name, METHODS.origin("ties").place
        ('ties', 'mergeflow')
    """

    kind: str
    declared: type[T]
    package: str | None
    folder: str
    how: str
    _files: tuple[Path, ...] = ()
    _own_things: dict[str, T] = field(default_factory=dict)
    _outside_things: dict[tuple[Path | None, tuple[Path, ...]], Found[T]] = field(default_factory=dict)
    _lock: RLock = field(default_factory=RLock)
    _loading: bool = False

    def names(self) -> list[str]:
        """Return all names in alphabetical order."""
        return sorted({*self._own_names(), *self._outside()})

    def all(self) -> dict[str, T]:
        """Return all things by name, in alphabetical order."""
        return {name: self.get(name) for name in self.names()}

    def get(self, name: str) -> T:
        outside = self._outside()
        if isinstance(name, str) and name in outside:
            return outside[name][0]
        if not isinstance(name, str) or name not in self._own_names():
            raise unknown_name(self.kind, str(name), self.names())
        return self._own_things[name]

    def origin(self, name: str) -> Origin:
        self.get(name)
        outside = self._outside()
        return outside[name][1] if name in outside else OWN

    def add_file(self, path: str | Path) -> list[str]:
        """Add the things that a Python file declares, for this process; returns their names."""
        place = Path(path).absolute()
        with self._lock:
            before = self._files
            self._files = (*before, *({place} - set(before)))
            try:
                self._outside()
            except MergeflowError:
                self._files = before
                raise
            return sorted(self._things_of(load_file(place)))

    @contextmanager
    def with_files(self, files: Iterable[Path]) -> Iterator[None]:
        """Take the things that some Python files declare, and of no other files, while the block runs."""
        before, self._files = self._files, tuple(files)
        try:
            yield
        finally:
            self._files = before

    def _own_names(self) -> Iterable[str]:
        if self.package is None:
            return ()
        with self._lock:
            if not self._own_things:
                things: dict[str, T] = {}
                for module in pkgutil.iter_modules(import_module(self.package).__path__):
                    for name, thing in self._things_of(import_module(f"{self.package}.{module.name}")).items():
                        assert things.setdefault(name, thing) is thing, f"two of our {self.kind}s are named {name}"
                self._own_things = things
        return self._own_things

    def _outside(self) -> Found[T]:
        """Return the things that are not ours, by name; they are loaded once per project and list of files."""
        key = (project_folder(), self._files)
        loaded = self._outside_things.get(key)
        if loaded is not None:
            return loaded
        with self._lock:
            if self._loading:  # a file asks for things of ours while it is being loaded
                return {}
            if key in self._outside_things:  # another thread was first
                return self._outside_things[key]
            self._loading = True
            try:
                loaded = self._outside_things[key] = self._load(*key)
            finally:
                self._loading = False
        return loaded

    def _load(self, project: Path | None, files: tuple[Path, ...]) -> Found[T]:
        things_loaded: dict[str, tuple[T, Origin]] = {}
        for point in entry_points(group=f"mergeflow.{self.folder}"):
            loaded = load_entry_point(point)
            if isinstance(loaded, ModuleType):  # it may name what other modules of its package declare
                things = self._things_of(loaded, loaded.__name__.partition(".")[0])
            else:
                things = {loaded.name: loaded} if isinstance(loaded, self.declared) else {}
            origin = origin_of(sys.modules[point.module], f"{_distribution(point)} ({point.value})")
            self._add(things_loaded, things, origin)
        in_project = python_files(project / self.folder) if project is not None else []
        for path in (*in_project, *(file for file in files if file not in in_project)):
            module = load_file(path)
            place = str(path.relative_to(project)) if project is not None and path in in_project else str(path)
            self._add(things_loaded, self._things_of(module), origin_of(module, place))
        return things_loaded

    def _add(self, loaded: dict[str, tuple[T, Origin]], things: Mapping[str, T], origin: Origin) -> None:
        if not things:
            raise MergeflowError(
                f"'{origin.place}' declares no {self.kind}: declare one with {self.how}. "
                "The name of a file that only helps others begins with an underscore."
            )
        our_names = self._own_names()
        for name, thing in things.items():
            other = OWN.place if name in our_names else loaded[name][1].place if name in loaded else None
            if other is not None and not (name in loaded and loaded[name][0] is thing):
                raise MergeflowError(
                    f"two {self.kind}s are named '{name}': one of '{other}' and one of '{origin.place}'. Rename yours."
                )
            loaded[name] = (thing, origin)

    def _things_of(self, module: ModuleType, within: str | None = None) -> dict[str, T]:
        """Return the objects that a module, or any module `within` a package, declares."""
        named: dict[str, T] = {}
        package = within or module.__name__
        for value in vars(module).values():
            if not isinstance(value, self.declared):
                continue
            if not f"{getattr(value, 'home', package)}.".startswith(f"{package}."):
                continue
            if named.setdefault(value.name, value) is not value:
                raise MergeflowError(f"'{module.__file__}' declares two {self.kind}s named '{value.name}': rename one.")
        return named


# Packages found by name, each with the same few parts: ours, installed ones, and those in the project's folder.

P = TypeVar("P")


@dataclass(frozen=True)
class Parts(Generic[P]):
    """One part of every package of one kind, by the package's name.

    A package NAME is looked for in three places: `package.NAME`; an entry point NAME of the group `mergeflow.FOLDER`,
    which names an installed package; and FOLDER/NAME of the project that the current folder lies in. Its module PART
    holds one instance of `declared`. To find a part imports no other part, so what needs one part depends on it alone.

    Example:
        >>> from mergeflow.modalities.catalog import MODALITIES
        >>> MODALITIES.names(), MODALITIES.get("vision").name
        (['causal', 'text', 'toy', 'vision'], 'vision')
    """

    kind: str
    declared: type[P]
    package: str
    folder: str
    part: str

    def names(self) -> list[str]:
        """Return the names of all packages of the kind, in alphabetical order; none is imported."""
        return sorted(self._places())

    def get(self, name: str) -> P:
        places = self._places()
        if name not in places:
            raise unknown_name(self.kind, name, places)
        place = places[name]
        home = load_file(place).__name__ if isinstance(place, Path) else place
        module = load_part(home, self.part, f"{self.kind} '{name}'")
        declared = [value for value in vars(module).values() if isinstance(value, self.declared)]
        if len(declared) != 1:
            raise MergeflowError(
                f"{module.__file__ or module.__name__} must hold one {self.declared.__name__} of the {self.kind} "
                f"'{name}', found {len(declared)}."
            )
        return declared[0]

    def folders(self) -> dict[str, Path]:
        return {
            name: place if isinstance(place, Path) else _folder(place, name, self.kind)
            for name, place in sorted(self._places().items())
        }

    def _places(self) -> dict[str, str | Path]:
        """Return where each package is: its dotted name, or its folder in the project."""
        places: dict[str, str | Path] = {}
        for name, place in self._candidates():
            if places.setdefault(name, place) != place:
                raise MergeflowError(f"two of the {self.folder} are named '{name}': {places[name]} and {place}.")
        return places

    def _candidates(self) -> Iterator[tuple[str, str | Path]]:
        modules = iter_modules(import_module(self.package).__path__)
        yield from ((module.name, f"{self.package}.{module.name}") for module in modules if module.ispkg)
        yield from ((point.name, point.value) for point in entry_points(group=f"mergeflow.{self.folder}"))
        if (project := project_folder()) is not None:
            yield from ((path.name, path) for path in python_files(project / self.folder) if path.is_dir())


def _folder(package: str, name: str, kind: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MergeflowError(f"the {kind} '{name}' is the package '{package}' by its entry point, which is not there.")
    return Path(spec.origin).parent


# What a user is told where code of their own fails: a merge method, modality, scorer or study of a project.


def failed_in_own_code(error: BaseException) -> MergeflowError | None:
    """Return the message for an error that was raised in a file that the shelf loaded, or below it; else None."""
    place = last_place(error, lambda frame: str(frame.f_globals.get("__name__", "")).startswith(PRIVATE))
    if place is None:
        return None
    return MergeflowError(
        f"line {place.line} of '{_shown(place.file)}', in {place.function}, raised {type(error).__name__}: {error}. "
        "Correct it and call the command again; `mergeflow methods NAME --check` tries one of your own merge methods."
    )


def _shown(file: Path) -> Path:
    root = project_folder()
    return file.relative_to(root) if root and file.is_relative_to(root) else file
