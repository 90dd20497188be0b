"""Find a project's studies by name, and load their declarations."""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from mergeflow.errors import MergeflowError
from mergeflow.plugins import load_file
from tasks.project.files import read_yaml
from tasks.project.stage import CHOICES, Stage, StageIO

Choices = TypeVar("Choices", bound=BaseModel)


def _none(choices: BaseModel) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Declaration(Generic[Choices]):
    """What a study chooses and reads; a `studies.lab.Study` says besides what it measures, claims and shows.

    A study that reads runs or splits reads the base as well, and the sections `tasks`, `model` and `evaluation` of the
    parameters. One that reads neither depends on its choices alone.

    Attributes:
        runs: from these choices, the names of the training runs that the study reads.

    Example:
        >>> class Options(BaseModel):
        ...     rounds: list[int]
        >>> declared = Declaration(Options, lambda options: [f"mima_{n}" for n in options.rounds], ("test",))
        >>> declared.runs(Options(rounds=[1, 4]))
        ['mima_1', 'mima_4']
    """

    options: type[Choices]
    runs: Callable[[Choices], Iterable[str]] = _none
    splits: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()

    def chosen(self, io: StageIO) -> Choices:
        """Return the choices of the study that runs, from its section of studies/params.yaml."""
        return self.options.model_validate(io.section(f"{CHOICES}:studies.{io.stage.name}"))


PAPERS = "studies"
EMBEDDED = "suite:"  # how the source of an embedded task begins


def find_study_modules(root: Path) -> dict[str, str]:
    """Return, by the study's name, its module: a dotted name, or the path of a file in the project.

    A file holds the study of its own name, or those that it names in `STUDIES = {"name": …}`. No study is imported.
    """
    package = [Path(folder) for folder in import_module(PAPERS).__path__]
    files = {path: f"{PAPERS}.{path.stem}" for folder in package for path in _study_files(folder)}
    modules = {name: module for path, module in files.items() for name in _names_in(path)}
    packaged = {file.resolve() for file in files}
    for path in _study_files(root / "studies"):
        for name in _names_in(path) if path.resolve() not in packaged else ():
            if name in modules:
                raise MergeflowError(
                    f"the study '{name}' in {path.relative_to(root)} has the name of a study of mergeflow: rename it."
                )
            modules[name] = path.relative_to(root).as_posix()
    return modules


def _study_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]


def _names_in(path: Path) -> list[str]:
    """Return the studies of a file: the keys of its `STUDIES`, or its own name."""
    return [path.stem] if (names := _declared_names(path.read_bytes())) is None else list(names)


@cache
def _declared_names(code: bytes) -> tuple[str, ...] | None:
    """Return the keys of a module's `STUDIES`; None where it has none, or is not Python: loading it names the fault."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return None
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "STUDIES":
                return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return None


def load_module(root: Path, module: str) -> ModuleType:
    """Return the module of a stage, which dvc.yaml names by its dotted name or as a file of the project."""
    return load_file(root / module) if module.endswith(".py") else import_module(module)


def module_file(root: Path, module: str) -> Path:
    """Return the file of such a module, which is not imported."""
    if module.endswith(".py"):
        return root / module
    spec = find_spec(module)
    assert spec, f"there is no module {module}"
    assert spec.origin, f"the module {module} has no file"
    return Path(spec.origin)


def study_text(root: Path, module: str) -> tuple[str, str]:
    """Return the title and the text of a study: its module's docstring, without importing it."""
    path = module_file(root, module)
    try:
        text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise MergeflowError(f"{path}{line} is not Python: {reason}.") from error
    title, _, rest = text.partition("\n")
    return title.rstrip("."), rest.strip()


def load_declaration(root: Path, module: str, name: str) -> Declaration:
    study = declared_study(load_module(root, module), name)
    if not isinstance(study, Declaration):
        raise MergeflowError(
            f"'{module}' is not a study: it must have `STUDY = Study(…)` of studies.lab. "
            "`mergeflow study new NAME` writes one to start from."
        )
    return study


def declared_study(module: ModuleType, name: str) -> Any:
    """Return a module's study of this name; None where it has none."""
    several = getattr(module, "STUDIES", None)
    if isinstance(several, dict):
        return several.get(name)
    return getattr(module, "STUDY", None)


def is_embedded(root: Path) -> bool:
    """Return whether a project has tasks, and takes all of them from embedded suites."""
    path = root / "params.yaml"
    tasks = (read_yaml(path) or {}).get("tasks") or {} if path.exists() else {}
    return bool(tasks) and all(str(source).startswith(EMBEDDED) for source in tasks.values())


@dataclass(frozen=True)
class Study:
    """A study and the project that it reads."""

    root: Path
    stage: Stage

    @property
    def folder(self) -> Path:
        return self.root / self.stage.outs[0]

    @property
    def text(self) -> tuple[str, str]:
        """Its title, with this study's name where its file holds several, and the rest of its file's docstring."""
        systems = f" ({', '.join(self.stage.systems)})" if self.stage.systems else ""
        return f"Study `{self.stage.name}`{systems}: {self.question}", study_text(self.root, self.stage.module)[1]

    @property
    def is_embedded(self) -> bool:
        return is_embedded(self.root)

    @property
    def question(self) -> str:
        """What it asks: the title, without the study's name before it."""
        title = study_text(self.root, self.stage.module)[0]
        return title.partition(": ")[2] or title
