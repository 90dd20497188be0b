"""The code that a stage depends on: every module that its imports reach, as one digest of what that code means.

A module counts by its syntax tree without comments, docstrings, layout and the texts of errors and log lines, so that
a better comment or message makes nothing stale. A file beside it that is not Python (an architecture, a vocabulary, a
page's template) counts by its bytes where the module has its name, or the name of its folder, as a string. A package's
`__init__` that only passes names on is a front door: what counts is the module behind each name that is used. What is
not ours (torch, the standard library) does not count: its versions are recorded with the results.
"""

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mergeflow.application import HOME
from mergeflow.errors import MergeflowError
from mergeflow.plugins import entry_points
from tasks.project import syntax
from tasks.project.files import read_yaml
from tasks.project.stage import STATE
from tasks.project.syntax import Source, read_source
from tasks.project.writing import write_atomically

ALWAYS = "tasks.project.bits"  # decides the bits of every stage, although no stage imports it
RULES = "2"  # which rules made a digest; part of each
LENGTH = 16
MOST = 3000  # files that are remembered, some 700 bytes each


class Code:
    """The modules of a project as they are when they are first asked for: what a process runs does not change later.

    Args:
        root: the project folder. It may hold modules of its own; below it is kept what files have said.
        chosen: by the folder of packages found by name, the one that counts, as {"modalities": "vision"}; of a folder
            that is not named all count.
        methods: the merge methods that count, with those that they name; None: all of them.
    """

    def __init__(
        self, root: Path, chosen: Mapping[str, str] | None = None, methods: Collection[str] | None = None
    ) -> None:
        self._root = root
        self._chosen = dict(chosen or {})
        self._methods = methods
        self._ours = {"mergeflow"}
        self._next: dict[str, list[str]] = {}
        self._paths: dict[str, Path | None] = {}
        self._sources: dict[str, Source] = {}
        self._others: dict[Path, dict[Path, set[str]]] = {}
        self._memory = _memory(root / STATE / "code.json")

    def digest(self, module: str, made: Iterable[str] = (), unused: Collection[str] = ()) -> str:
        """Return the digest of the code that `module` depends on.

        Args:
            module: its dotted name, or the path of a file of the project.
            made: paths relative to the project that are not code, even where they lie beside it: the stage's outputs.
            unused: modules that do not count, nor what they alone reach: imported inside functions that are not called.
        """
        reached, outputs = self.closure(module, unused), {(self._root / out).resolve() for out in made}
        files = {(name, path) for name, at in reached.items() for path in self.data_files(name, at)}
        lines = [f"{name} {self._source(name).meaning}" for name in reached]
        lines += [f"{name} {path.name} {_digest_of(path)}" for name, path in files if path.resolve() not in outputs]
        self._memory.write()
        return hashlib.sha256("\n".join([RULES, *sorted(lines)]).encode()).hexdigest()[:LENGTH]

    def closure(self, module: str, unused: Collection[str] = ()) -> dict[str, Path]:
        """Return the file of every module that counts for `module`, by its dotted name, in alphabetical order.

        Raises:
            MergeflowError: the module is missing, as a stage's is that an upgrade has taken out.
        """
        found: dict[str, Path] = {}
        # With a file of the project's own counts the rest of its folder, which it may import relatively.
        own = [*self._files(str(Path(module).parent))] if module.endswith(".py") else []
        seen, queue = set(unused), [module, *own, ALWAYS]
        if module.endswith(".py") and module not in own:
            raise MergeflowError(f"{module} is missing, which a stage runs. Bring it back, or remove that stage.")
        if not self._path(module):
            raise MergeflowError(
                f"a stage of this project's dvc.yaml runs {module}, which this version of mergeflow does not have: "
                "take that stage out, or compare with the dvc.yaml that `mergeflow new` writes into an empty folder."
            )
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                path = self._path(name)
                if path and self._source(name).exports is None:
                    found[name] = path
                    queue += self._reached(name)
        return dict(sorted(found.items()))

    def data_files(self, name: str, path: Path) -> Iterator[Path]:
        """Yield the files beside a module, down to the next package, whose name or folder is one of its strings."""
        strings = set(self._source(name).strings)
        folder = path.parent
        if folder not in self._others and folder != self._root:
            self._others[folder] = {file: {*file.relative_to(folder).parts} for file in _other_files(folder)}
        yield from (file for file, names in self._others.get(folder, {}).items() if strings & names)

    def _reached(self, name: str) -> list[str]:
        """Return the modules that one module's imports, and what it finds by name, lead to."""
        if name not in self._next:
            source = self._source(name)
            found = {module for target in source.names for module in self._behind(target)}
            ours = {module for target in source.whole for module in self._below(target)}
            outside = {module for folder in source.shelves for module in self._outside(folder)}
            found |= self._counting(ours, outside) if "methods" in source.shelves else ours | outside
            found |= {module for parts in source.parts for module in self._parts(*parts)}
            beside = (text[:-3] for text in source.strings if text.endswith(".py"))  # code that is read as a file
            found |= {one for stem in beside if self._path(one := f"{name.rpartition('.')[0]}.{stem}")}
            self._next[name] = sorted(found)
        return self._next[name]

    def _counting(self, ours: Collection[str], outside: Collection[str]) -> set[str]:
        """Return the modules of a shelf that declare the merge methods that count, and those that such modules name.

        Helpers that declare none are reached by imports. What lies outside our package counts whole or not at all.

        Args:
            ours: the modules of our package.
            outside: those of the project's folder and of installed packages.
        """
        if self._methods is None:
            return {*ours, *outside}
        homes = {method: module for module in ours for method in self._source(module).methods}
        declared = {method for module in outside for method in self._source(module).methods}
        names, found = set(self._methods), set[str]()
        if names & declared or not names & homes.keys():
            found = set(outside)
            names |= {text for module in outside for text in self._source(module).strings}
        while more := {homes[name] for name in names & homes.keys()} - found:
            found |= more
            names = {text for module in more for text in self._source(module).strings}
        return found

    def _behind(self, name: str) -> Iterator[str]:
        """Yield the modules that `module` or `module:name.name` leads through."""
        module, _, attributes = name.partition(":")
        if self._is_ours(module.partition(".")[0]):
            parts = module.split(".")
            yield from (one for end in range(len(parts)) if self._path(one := ".".join(parts[: end + 1])))
            yield from self._behind_attributes(module, attributes) if self._path(module) else ()

    def _behind_attributes(self, module: str, attributes: str) -> Iterator[str]:
        """Yield the modules behind `module.name.name`, in Python's order: a package's own name, then its file."""
        for name in filter(None, attributes.split(".")):
            target = (self._source(module).exports or {}).get(name)
            if target is not None:
                yield from self._behind(target)
                return
            module = f"{module}.{name}"
            if not self._path(module):
                return
            yield module

    def _below(self, name: str) -> Iterator[str]:
        """Yield every module of a package of ours, at any depth; nothing if the name is not a package's."""
        package = name.replace(":", ".")
        path = self._path(package) if self._is_ours(package.partition(".")[0]) and "." in package else None
        if path and path.name == "__init__.py":
            for file in sorted(path.parent.rglob("*.py")):
                parts = file.relative_to(path.parent).with_suffix("").parts
                module = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
                if self._path(module) == file:
                    yield module

    def _outside(self, folder: str) -> Iterator[str]:
        """Yield what a shelf finds outside its package: files in the project's folder, installed packages."""
        yield from self._files(folder)
        for point in entry_points(f"mergeflow.{folder}"):
            self._ours.add(point.module.partition(".")[0])
            yield from self._behind(point.module)

    def _parts(self, package: str, folder: str, part: str) -> Iterator[str]:
        """Yield the module `part` of each package found by name: of ours, installed, in the project's folder."""
        home, own = self._path(package), self._root / folder
        assert home, f"there is no package {package}"
        homes = [(path.parent.name, f"{package}.{path.parent.name}") for path in home.parent.glob("*/__init__.py")]
        for point in entry_points(f"mergeflow.{folder}"):
            self._ours.add(point.value.partition(".")[0])
            homes.append((point.name, point.value))
        for path in sorted(own.glob("[!_.]*/__init__.py")):
            homes.append((path.parent.name, f"{folder}.{path.parent.name}"))
            self._ours.add(folder)
            # Names as if the project's folder were a package: so relative imports inside it are followed.
            for file in path.parent.rglob("*.py"):
                parts = file.relative_to(self._root).with_suffix("").parts
                self._paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        counting = [one for name, one in homes if self._chosen.get(folder, name) == name]
        yield from (module for one in counting for module in self._behind(f"{one}.{part}"))

    def _files(self, folder: str) -> Iterator[str]:
        """Yield every Python file in a folder of the project and below it."""
        for path in sorted((self._root / folder).rglob("*.py")):
            name = path.relative_to(self._root).as_posix()
            self._paths[name] = path
            yield name

    def _is_ours(self, package: str) -> bool:
        """Whether code of this package counts: ours, the project's own, or one whose entry points we load."""
        if package not in self._ours and package not in sys.stdlib_module_names:
            path = self._path(package)
            if path is not None and {self._root, HOME} & {path.parent, path.parent.parent}:
                self._ours.add(package)
        return package in self._ours

    def _path(self, name: str) -> Path | None:
        """Return the file of a module; None if there is none or it is not Python."""
        if name not in self._paths:
            package, _, last = name.rpartition(".")
            self._paths[name] = self._path_in(self._path(package), last) if package else _top(name)
        return self._paths[name]

    @staticmethod
    def _path_in(package: Path | None, last: str) -> Path | None:
        if package is None or package.name != "__init__.py":
            return None
        candidates = (package.parent / last / "__init__.py", package.parent / f"{last}.py")
        return next((path for path in candidates if path.is_file()), None)

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            path = self._path(name)
            assert path, f"there is no module {name}"
            self._sources[name] = self._memory.source(path, name)
        return self._sources[name]


@cache
def code_of(root: Path, methods: frozenset[str] | None = None) -> Code:
    """Return the code of a project as this process has it; of the modalities the one of its params.yaml counts.

    Args:
        root: the project folder.
        methods: the merge methods that count; None: all of them.
    """
    choices = root / "params.yaml"
    modality = (read_yaml(choices).get("model") or {}).get("modality") if choices.exists() else None
    return Code(root, {"modalities": modality} if modality else {}, methods)


class _Memory:
    """What files have said, by their content: to read the syntax of all takes seconds, to look it up a hundredth."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Source] | None = None
        self._used: dict[str, Source] = {}
        self._is_new = False

    def source(self, path: Path, name: str) -> Source:
        is_package, text = path.name == "__init__.py", path.read_bytes()
        package = name if is_package else name.rpartition(".")[0]
        key = hashlib.sha256(f"{_digest_of(Path(syntax.__file__))} {package} {is_package} ".encode() + text).hexdigest()
        if self._known is None:
            self._known = _read_memory(self._path)
        if key not in self._known:
            self._is_new = True
            try:
                self._known[key] = read_source(text, package, is_package)
            except (SyntaxError, ValueError) as error:
                raise MergeflowError(f"{path} is not Python: {error}.") from error
        self._used[key] = self._known[key]
        return self._used[key]

    def write(self) -> None:
        """Keep what is known, if some of it is new; of very much only what this process has used."""
        if self._is_new and self._known is not None:
            self._is_new = False
            kept = self._known if len(self._known) < MOST else self._used
            write_atomically(self._path, json.dumps({key: asdict(source) for key, source in kept.items()}))


@cache
def _memory(path: Path) -> _Memory:
    return _Memory(path)


def _read_memory(path: Path) -> dict[str, Source]:
    try:
        return {key: Source(**source) for key, source in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError):  # none yet, or of another version: read the files again
        return {}


def _top(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except ValueError:  # `__main__`
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@cache
def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _other_files(folder: Path) -> Iterator[Path]:
    """Yield what is not Python in a package's folder and below it, down to the next package."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")) or path.suffix in (".py", ".pyc"):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not (path / "__init__.py").exists():
            yield from _other_files(path)
