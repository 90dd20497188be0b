"""Things that are found by name: declared in a package of ours, in installed ones, or in the project's folder."""

import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Generic, Protocol, TypeVar

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.plugins import (
    OWN,
    Origin,
    entry_point_origin,
    entry_points,
    load_entry_point,
    load_file,
    origin_of,
    project_folder,
    python_files,
)


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
        kind: What people call such a thing: "method".
        declared: The type of the things.
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
        """Return all names in alphabetical order.

        Raises:
            MergeflowError: Two things have one name, or a file cannot be loaded or declares nothing.
        """
        return sorted({*self._own_names(), *self._outside()})

    def all(self) -> dict[str, T]:
        """Return all things by name, in alphabetical order.

        Raises:
            MergeflowError: As `names`.
        """
        return {name: self.get(name) for name in self.names()}

    def get(self, name: str) -> T:
        """Return one thing.

        Raises:
            MergeflowError: There is none of this name (the message names the nearest one), or as `names`.
        """
        outside = self._outside()
        if isinstance(name, str) and name in outside:
            return outside[name][0]
        if not isinstance(name, str) or name not in self._own_names():
            raise unknown_name(self.kind, str(name), self.names())
        return self._own_things[name]

    def origin(self, name: str) -> Origin:
        """Return where a thing comes from.

        Raises:
            MergeflowError: As `get`.
        """
        self.get(name)
        outside = self._outside()
        return outside[name][1] if name in outside else OWN

    def add_file(self, path: str | Path) -> list[str]:
        """Add the things that a Python file declares, for this process; returns their names.

        Raises:
            MergeflowError: As `names`; then nothing is added.
        """
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

    def _own_names(self) -> Iterable[str]:
        if self.package is None:
            return ()
        with self._lock:
            if not self._own_things:
                found: dict[str, T] = {}
                for module in pkgutil.iter_modules(import_module(self.package).__path__):
                    for name, thing in self._things_of(import_module(f"{self.package}.{module.name}")).items():
                        assert found.setdefault(name, thing) is thing, f"two of our {self.kind}s are named {name}"
                self._own_things = found
        return self._own_things

    def _outside(self) -> Found[T]:
        """Return the things that are not ours, by name; they are loaded once per project and list of files."""
        key = (project_folder(), self._files)
        found = self._outside_things.get(key)
        if found is not None:
            return found
        with self._lock:
            if self._loading:  # a file asks for things of ours while it is being loaded
                return {}
            if key in self._outside_things:  # another thread was first
                return self._outside_things[key]
            self._loading = True
            try:
                found = self._outside_things[key] = self._load(*key)
            finally:
                self._loading = False
        return found

    def _load(self, project: Path | None, files: tuple[Path, ...]) -> Found[T]:
        found: dict[str, tuple[T, Origin]] = {}
        for point in entry_points(group=f"mergeflow.{self.folder}"):
            loaded = load_entry_point(point)
            if isinstance(loaded, ModuleType):  # it may name what other modules of its package declare
                things = self._things_of(loaded, loaded.__name__.partition(".")[0])
            else:
                things = {loaded.name: loaded} if isinstance(loaded, self.declared) else {}
            self._add(found, things, entry_point_origin(point))
        own = python_files(project / self.folder) if project is not None else []
        for path in (*own, *(file for file in files if file not in own)):
            module = load_file(path)
            place = str(path.relative_to(project)) if project is not None and path in own else str(path)
            self._add(found, self._things_of(module), origin_of(module, place))
        return found

    def _add(self, found: dict[str, tuple[T, Origin]], things: Mapping[str, T], origin: Origin) -> None:
        if not things:
            raise MergeflowError(
                f"'{origin.place}' declares no {self.kind}: declare one with {self.how}. "
                "The name of a file that only helps others begins with an underscore."
            )
        own = self._own_names()
        for name, thing in things.items():
            other = OWN.place if name in own else found[name][1].place if name in found else None
            if other is not None and not (name in found and found[name][0] is thing):
                raise MergeflowError(
                    f"two {self.kind}s are named '{name}': one of '{other}' and one of '{origin.place}'. Rename yours."
                )
            found[name] = (thing, origin)

    def _things_of(self, module: ModuleType, within: str | None = None) -> dict[str, T]:
        """Return what a module holds that was declared in it, or anywhere `within` a package."""
        found: dict[str, T] = {}
        package = within or module.__name__
        for value in vars(module).values():
            if not isinstance(value, self.declared):
                continue
            if not f"{getattr(value, 'home', package)}.".startswith(f"{package}."):
                continue
            if found.setdefault(value.name, value) is not value:
                raise MergeflowError(f"'{module.__file__}' declares two {self.kind}s named '{value.name}': rename one.")
        return found
