"""What trains and measures depends on neither a drawing nor a reader: a change of one re-trains nothing."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("mergeflow", "tasks", "registry", "flows", "suites", "studies")


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@cache
def named(file: Path) -> list[str]:
    """Every module of ours that a file imports, or has in a text as its full name."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value)
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] in OURS]


def reached(start: str) -> set[str]:
    """Every module of ours that an import in `start`, or in what it reaches, names, with the packages around it."""
    closure: set[str] = set()
    todo = [start]
    while todo:
        parts = todo.pop().split(".")
        for module in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            file = file_of(module)
            if module in closure or file is None:
                continue
            closure.add(module)
            todo += named(file)
    return closure


def readers(modules: set[str]) -> list[str]:
    others = ("suites", "mergeflow.modalities.vision.sources", "mergeflow.data.prepare")
    return sorted(module for module in modules if module.startswith(others))


@pytest.mark.parametrize(
    "start",
    ["mergeflow.data", "mergeflow.training", "mergeflow.evaluation"]
    + [
        f"tasks.{stage}"
        for stage in ("base", "finetune", "multitask", "vectors", "sweep", "select", "evaluate", "figures")
    ],
)
def test_what_reads_a_split_reaches_no_reader(start: str) -> None:
    modules = reached(start)
    assert len(modules) > 3
    assert readers(modules) == []


@pytest.mark.slow
def test_what_prepares_reaches_every_reader_and_drawing() -> None:
    # `prepare` finds the modality's package by name; that its digest counts it is tested with the digests.
    lines = readers(reached("tasks.prepare") | reached("mergeflow.modalities.vision.preparation"))
    drawings = [f"suites.pocket.drawn.{path.stem}" for path in (ROOT / "suites/pocket/drawn").glob("[a-z]*.py")]
    assert len(drawings) >= 20
    assert {*drawings, "mergeflow.modalities.vision.sources.files"} <= set(lines)


@pytest.mark.slow
def test_data_and_suites_form_no_circle() -> None:
    assert not any(
        module.startswith(("suites", "mergeflow.modalities")) for module in reached("mergeflow.data.prepare")
    )
    assert not any(module.startswith("mergeflow.modalities") for module in reached("suites.pocket.source"))
