"""Packages found by name, each with the same few parts: ours, installed ones, and those in the project's folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Generic, TypeVar

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.plugins import entry_points, load_file, load_part, loaded_from, project_folder, python_files

T = TypeVar("T")


@dataclass(frozen=True)
class Parts(Generic[T]):
    """One part of every package of one kind, by the package's name.

    A package NAME is looked for in three places: `package.NAME`; an entry point NAME of the group `mergeflow.FOLDER`,
    which names an installed package; and FOLDER/NAME of the project that the current folder lies in. Its module PART
    holds one instance of `declared`. To find a part imports no other part, so what needs one part depends on it alone.

    Attributes:
        kind: What people call such a package: "modality".
        declared: The type of the part.
        package: The package of ours whose sub-packages are found.
        folder: Name of the project's folder and, after "mergeflow.", of the group of entry points.
        part: Name of the module that holds the part.

    Example:
        >>> from mergeflow.modalities.catalog import MODALITIES
        >>> MODALITIES.names(), MODALITIES.get("vision").tower
        (['causal', 'text', 'toy', 'vision'], 'visual')
    """

    kind: str
    declared: type[T]
    package: str
    folder: str
    part: str

    def names(self) -> list[str]:
        """Return the names of all packages of the kind, in alphabetical order; none is imported.

        Raises:
            MergeflowError: two of them have one name.
        """
        return sorted(self._places())

    def get(self, name: str) -> T:
        """Return the part of one package.

        Raises:
            MergeflowError: there is no such package (the message names the nearest one), it lacks the part, or it
                cannot be loaded.
        """
        places = self._places()
        if name not in places:
            raise unknown_name(self.kind, name, places)
        place = places[name]
        home = load_file(place).__name__ if isinstance(place, Path) else place
        module = load_part(home, self.part, f"{self.kind} '{name}'")
        found = [value for value in vars(module).values() if isinstance(value, self.declared)]
        if len(found) != 1:
            raise MergeflowError(
                f"{loaded_from(module)} must hold one {self.declared.__name__} of the {self.kind} '{name}', "
                f"found {len(found)}."
            )
        return found[0]

    def folders(self) -> dict[str, Path]:
        """Return the folder of each package by its name."""
        return {
            name: place if isinstance(place, Path) else _folder(place, name, self.kind)
            for name, place in sorted(self._places().items())
        }

    def _places(self) -> dict[str, str | Path]:
        """Return where each package is: its dotted name, or its folder in the project."""
        found: dict[str, str | Path] = {}
        for name, place in self._candidates():
            if found.setdefault(name, place) != place:
                raise MergeflowError(f"two of the {self.folder} are named '{name}': {found[name]} and {place}.")
        return found

    def _candidates(self) -> Iterator[tuple[str, str | Path]]:
        own = iter_modules(import_module(self.package).__path__)
        yield from ((module.name, f"{self.package}.{module.name}") for module in own if module.ispkg)
        yield from ((point.name, point.value) for point in entry_points(group=f"mergeflow.{self.folder}"))
        if (project := project_folder()) is not None:
            yield from ((path.name, path) for path in python_files(project / self.folder) if path.is_dir())


def _folder(package: str, name: str, kind: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MergeflowError(f"the {kind} '{name}' is the package '{package}' by its entry point, which is not there.")
    return Path(spec.origin).parent
