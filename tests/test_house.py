"""The house: imports go downhill, and MLflow, Prefect and DVC each have one home."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mergeflow", "tasks", "registry", "flows", "suites", "studies")

# package: what of this project it may import, besides itself
FILES = {
    *("mergeflow.errors", "mergeflow.yaml_text", "mergeflow.schema", "mergeflow.plugins", "mergeflow.late"),
    *("mergeflow.application", "mergeflow.version", "mergeflow.checkpoints"),
    "mergeflow.documents",
}
DATA = {"mergeflow.modality", "mergeflow.modalities", "mergeflow.data"}
LEARNING = {*FILES, *DATA, "mergeflow.merging"}
ALLOWED = {
    "mergeflow.errors": set(),
    "mergeflow.layout": set(),
    "mergeflow.version": set(),
    "mergeflow.documents": {"mergeflow.errors"},
    "mergeflow.deployments": {"mergeflow.application"},
    "mergeflow.commands": {"mergeflow"},
    "mergeflow.cli": {"mergeflow"},
    "mergeflow.late": set(),
    "mergeflow.yaml_text": {"mergeflow.errors"},
    "mergeflow.schema": {"mergeflow.errors"},
    "mergeflow.application": set(),
    "mergeflow.processes": set(),
    "mergeflow.plugins": {"mergeflow.application", "mergeflow.errors"},
    "mergeflow.checkpoints": {"mergeflow.errors", "mergeflow.late"},
    "mergeflow.merging": FILES,
    "mergeflow.modality": {"mergeflow.errors"},
    "mergeflow.modalities": {*FILES, *DATA, "mergeflow.processes"},
    "mergeflow.data": {"mergeflow.errors", "mergeflow.application"},
    "mergeflow.training": LEARNING,
    "mergeflow.memory": {*LEARNING, "mergeflow.training"},
    "mergeflow.evaluation": {*LEARNING, "mergeflow.memory", "mergeflow.training"},
    "mergeflow.search": {*LEARNING, "mergeflow.evaluation", "mergeflow.memory", "mergeflow.training"},
    "mergeflow.analysis": {*LEARNING, "mergeflow.training"},
    "mergeflow.linearity": LEARNING,
    "suites": {"mergeflow"},
    "tasks": {"mergeflow"},
    "registry": {"mergeflow", "tasks"},
    "flows": {"mergeflow", "tasks", "registry"},
    "studies": {"mergeflow", "suites", "tasks", "registry", "flows"},
}
OWNERS = {"prefect": "flows", "prefect_dask": "flows", "prefect_ray": "flows", "mlflow": "registry"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> dict[str, list[str]]:
    """Return the modules that a file imports, inside functions and for types alone too, with the names it takes."""
    imported: dict[str, list[str]] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            imported |= {alias.name: [] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.setdefault(node.module, []).extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import")
    return imported


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_downhill(package: str) -> None:
    folder = ROOT / package.replace(".", "/")
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert files
    for path in files:
        for module in imports(path):
            if module.split(".")[0] in PACKAGES:
                allowed = ALLOWED[package] | {package}
                assert any(within(module, room) for room in allowed), f"{path.relative_to(ROOT)} imports {module}"


def test_every_part_of_the_library_has_its_row() -> None:
    inside = [path for path in (ROOT / "mergeflow").iterdir() if path.stem != "__init__"]
    there = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {f"mergeflow.{name}" for name in there} == {name for name in ALLOWED if name.startswith("mergeflow.")}


@cache
def files() -> dict[str, Path]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def reached(path: Path) -> set[str]:
    taken = ((module, f"{module}.{name}") for module, names in imports(path).items() for name in names or [""])
    return {name if name in files() else module for module, name in taken}


def test_no_files_import_each_other() -> None:
    TopologicalSorter(
        {name: reached(path) for name, path in files().items()}
    ).prepare()  # a CycleError names the circle


def test_no_rooms_import_each_other() -> None:
    """A room is a folder; it and the folder around it may use each other, and a front door only passes names on."""
    rooms = {name: name.rpartition(".")[0] for name, path in files().items() if path.name != "__init__.py"}
    arrows: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, room in rooms.items():
        others = {rooms[module] for module in reached(files()[name]) if module in rooms}
        arrows[room] |= {other for other in others if not (within(other, room) or within(room, other))}
    TopologicalSorter(arrows).prepare()


@pytest.mark.parametrize("tool", OWNERS)
def test_each_tool_has_one_home(tool: str) -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if package != OWNERS[tool]:
                assert not any(within(module, tool) for module in imports(path)), f"{path.relative_to(ROOT)}: {tool}"


LIBRARY = "checkpoints cli data evaluation merging search.sweep training"
VALIDATE = (
    "from pathlib import Path; from tasks.project.validate_params import validate_params as check; check(Path({!r}))"
)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import mergeflow, mergeflow.cli", "torch"),
        (f"import mergeflow.{LIBRARY.replace(' ', ', mergeflow.')}", "prefect mlflow dvc matplotlib sklearn datasets"),
        (
            "import mergeflow.data; mergeflow.data.load_split",
            "pyarrow PIL fsspec torch mergeflow.modality mergeflow.modalities",
        ),
        *((VALIDATE.format(str(ROOT / folder)), "torch scipy") for folder in (".", "worlds/sentences8")),
    ],
)
def test_what_needs_no_library_imports_none(code: str, absent: str) -> None:
    command = [sys.executable, "-c", f"import sys; {code}; print({{*{absent.split()}}} & {{*sys.modules}})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "set()"


def test_front_doors_name_what_they_have() -> None:
    """`from mergeflow.memory import *` failed at a name that had gone."""
    lost = {}
    for path in (package_path for package in PACKAGES for package_path in (ROOT / package).rglob("__init__.py")):
        module = tree_of(path)
        listed = [
            statement.value
            for statement in module.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets) == "__all__"
        ]
        bound = {name for statement in ast.walk(module) for name in _bound(statement)}
        if listed and "__getattr__" not in bound and (names := set(ast.literal_eval(listed[0])) - bound):
            lost[str(path.relative_to(ROOT))] = names
    assert not lost


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


# Longer than 40 lines when the rule was made: they may shrink, and none may join them.
LONG_FUNCTIONS = {
    "studies/commands/study.py:add_commands": 41,
    "tasks/commands/linearity.py:add_commands": 68,
    "tasks/commands/linearity.py:linearity": 42,
    "registry/commands.py:_add_questions": 50,
    "mergeflow/commands/language.py:perplexity": 58,
}


def function_lengths() -> dict[str, int]:
    """Return the lines of each function's body, from behind its docstring, by `path:name`."""
    lengths: dict[str, int] = {}
    for path in files().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "claims":  # a table of data
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                key = f"{path.relative_to(ROOT)}:{node.name}"
                lengths[key] = max(lines, lengths.get(key, 0))
    return lengths


def test_functions_have_at_most_40_lines() -> None:
    long = {name: lines for name, lines in function_lengths().items() if lines > LONG_FUNCTIONS.get(name, 40)}
    assert not long, "split them"
