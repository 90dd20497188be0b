"""Docstrings of the rooms that are finished: `Args` from three parameters on, and shapes of arrays."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of the other rooms (merging, checkpoints, suites, the studies, registry, flows) not every function has them yet.
ROOMS = [
    *("mergeflow/errors.py", "mergeflow/schema.py", "mergeflow/shelf.py", "mergeflow/parts.py", "mergeflow/plugins.py"),
    *("mergeflow/modality.py", "mergeflow/modalities", "mergeflow/data", "mergeflow/training", "mergeflow/evaluation"),
    *("mergeflow/estimates", "mergeflow/analysis", "mergeflow/documents.py", "tasks/*.py", "tasks/project"),
]
ARRAY = re.compile(r"(torch\.)?Tensor|(np\.)?ndarray")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield the public functions and methods of a module; a protocol's methods are documented in the protocol."""
    waiting: list[tuple[str, ast.stmt]] = [("", one) for one in tree.body]
    while waiting:
        prefix, node = waiting.pop()
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            waiting += [(f"{node.name}.", one) for one in node.body]
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield prefix + node.name, node


def faults(path: Path, promised: set[str]) -> Iterator[str]:
    """Yield what the docstrings of one file lack."""
    for name, node in functions(ast.parse(path.read_text())):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        given = [one for one in given if one.arg not in ("self", "cls")]
        types = [ast.unparse(one.annotation) for one in given if one.annotation]
        if types and all("typer." in text for text in types):  # a command: each parameter has its help
            continue
        if "." in name and node.name in promised and not ast.get_docstring(node):
            continue
        text, where = ast.get_docstring(node) or "", f"{path.relative_to(ROOT)}: {name}"
        if len(given) >= 3 and "Args:" not in text and not ("." in name and node.name in promised):
            yield f"{where} has {len(given)} parameters and no Args"
        arrays = [text for text in [*types, ast.unparse(node.returns) if node.returns else ""] if ARRAY.fullmatch(text)]
        if arrays and not re.search(r"\[[^\]]*\]", text):
            yield f"{where} takes or returns an array and gives no shape"


def promises() -> set[str]:
    """Return the names of all methods that a protocol declares."""
    found = set()
    for path in (ROOT / "mergeflow").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                found |= {one.name for one in node.body if isinstance(one, Function)}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_function_says_what_it_takes(room: str) -> None:
    paths = sorted(ROOT.glob(room))
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    assert files
    promised = promises()
    assert [fault for file in files for fault in faults(file, promised)] == []
