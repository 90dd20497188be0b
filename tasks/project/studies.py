"""The studies that a project can have, found by name: those of the papers, and those of its own folder `studies`."""

import ast
import pkgutil
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from mergeflow.errors import MergeflowError
from mergeflow.plugins import load_file
from tasks.project.declaration import Declaration
from tasks.project.files import read_yaml
from tasks.project.stage import Stage

PAPERS = "tasks.studies.papers"
OWN = "studies/*/study.py"
EMBEDDED = "suite:"  # how the source of an embedded task begins


def find_study_modules(root: Path) -> dict[str, str]:
    """Return, by the study's name, its module: a dotted name, or the path of a file in the project.

    Raises:
        MergeflowError: a study of the project has the name of one of the papers'.
    """
    found = {one.name: f"{PAPERS}.{one.name}.study" for one in pkgutil.iter_modules(import_module(PAPERS).__path__)}
    for path in sorted(root.glob(OWN)):
        if path.parent.name in found:
            raise MergeflowError(
                f"the study '{path.parent.name}' in studies/{path.parent.name} has the name of a study of mergeflow: "
                "rename that folder."
            )
        found[path.parent.name] = path.relative_to(root).as_posix()
    return found


def load_module(root: Path, module: str) -> ModuleType:
    """Return the module of a stage, which dvc.yaml names by its dotted name or as a file of the project.

    Raises:
        MergeflowError: the file cannot be loaded; the message names the line.
    """
    return load_file(root / module) if module.endswith(".py") else import_module(module)


def module_file(root: Path, module: str) -> Path:
    """Return the file of such a module, which is not imported."""
    if module.endswith(".py"):
        return root / module
    found = find_spec(module)
    assert found, f"there is no module {module}"
    assert found.origin, f"the module {module} has no file"
    return Path(found.origin)


def study_text(root: Path, module: str) -> tuple[str, str]:
    """Return the title and the text of a study: its module's docstring, without importing it.

    Raises:
        MergeflowError: the module is not Python.
    """
    path = module_file(root, module)
    try:
        text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        told = error.msg if isinstance(error, SyntaxError) else error
        raise MergeflowError(f"{path}{line} is not Python: {told}.") from error
    title, _, rest = text.partition("\n")
    return title.rstrip("."), rest.strip()


def load_declaration(root: Path, module: str) -> Declaration:
    """Return what a study declares.

    Raises:
        MergeflowError: its module cannot be loaded, or lacks `DECLARED` or `run`.
    """
    loaded = load_module(root, module)
    declared = getattr(loaded, "DECLARED", None)
    if not isinstance(declared, Declaration) or not callable(getattr(loaded, "run", None)):
        raise MergeflowError(
            f"'{module}' is not a study: it must have `DECLARED = Declaration(Options, …)` of "
            "tasks.project.declaration, and a function `run(io)`. `mergeflow study new NAME` writes one to start from."
        )
    return declared


def is_embedded(root: Path) -> bool:
    """Return whether a project has tasks, and takes all of them from embedded suites."""
    path = root / "params.yaml"
    tasks = (read_yaml(path) or {}).get("tasks") or {} if path.exists() else {}
    return bool(tasks) and all(str(source).startswith(EMBEDDED) for source in tasks.values())


@dataclass(frozen=True)
class Study:
    """A study and the project that it reads.

    Attributes:
        root: that project's folder.
        stage: the study's stage in its graph.
    """

    root: Path
    stage: Stage

    @property
    def folder(self) -> Path:
        """Where the result is."""
        return self.root / self.stage.outs[0]

    @property
    def text(self) -> tuple[str, str]:
        """The title and the text of its module's docstring."""
        return study_text(self.root, self.stage.module)

    @property
    def is_embedded(self) -> bool:
        """Whether all tasks of its project are of an embedded suite."""
        return is_embedded(self.root)

    @property
    def question(self) -> str:
        """What it asks: the title, without the study's name before it."""
        title = self.text[0]
        return title.partition(": ")[2] or title
