"""The stage `code`: one digest of code for each stage, in a file that dvc.yaml names as a source of parameters."""

import os
from pathlib import Path

import yaml

from mergeflow.errors import MergeflowError
from mergeflow.layout import CODE
from tasks.project.code import code_of
from tasks.project.graph import load_graph

CODE_STAGE = "code"
_HEAD = "# By `mergeflow stage digests`: what the code means that each stage depends on.\n"


def stage_digests(root: Path) -> dict[str, str]:
    """Return the digest of the code behind each stage of the project, by the stage's name.

    Raises:
        MergeflowError: two stages have one name, or a module is not Python.
    """
    found: dict[str, str] = {}
    homes: dict[str, str] = {}
    for stage in load_graph(root, studies=True).values():
        if homes.setdefault(stage.name, stage.file) != stage.file:
            raise MergeflowError(
                f"two stages are named '{stage.name}', in {homes[stage.name]} and {stage.file}: rename one."
            )
        if stage.name not in found:
            found[stage.name] = code_of(root).digest(stage.module, stage.outs)
    return dict(sorted(found.items()))


def write_digests(root: Path) -> None:
    """Write `outputs/code.yaml`; a file that says the same already is not touched."""
    text = _HEAD + yaml.safe_dump(stage_digests(root))
    path = root / CODE
    if not path.exists() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
