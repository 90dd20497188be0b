"""The stage `code`: one digest of code for each stage, in a file that dvc.yaml names as a source of parameters."""

from pathlib import Path

import yaml

from mergeflow.errors import MergeflowError
from mergeflow.layout import CODE
from tasks.project.code import code_of
from tasks.project.graph import load_graph
from tasks.project.stage import Stage
from tasks.project.writing import write_atomically

CODE_STAGE = "code"
_ROUNDS = ("tasks.rounds", "tasks.studies.rounds")  # imported by the regime `iterative` alone, where it begins
_HEAD = "# By `mergeflow stage digests`: what the code means that each stage depends on.\n"


def code_digest(root: Path, stage: Stage) -> str:
    """Return the digest of the code that a stage depends on with the project's choices.

    Only training in rounds merges. In every other regime a new merge method, or a change of one, trains nothing again.
    """
    return code_of(root).digest(stage.module, stage.outs, () if stage.regime == "iterative" else _ROUNDS)


def stage_digests(root: Path) -> dict[str, str | dict[str, str]]:
    """Return the digest of the code behind each stage of the project, by the stage's name.

    Where the items of a stage have regimes of their own, which are the studies' training runs, each has its digest.

    Raises:
        MergeflowError: two stages have one name, or a module is not Python.
    """
    found: dict[str, str | dict[str, str]] = {}
    homes: dict[str, str] = {}
    for stage in load_graph(root, studies=True).values():
        if homes.setdefault(stage.name, stage.file) != stage.file:
            raise MergeflowError(
                f"two stages are named '{stage.name}', in {homes[stage.name]} and {stage.file}: rename one."
            )
        if stage.digest_by_item:
            items = found.setdefault(stage.name, {})
            assert isinstance(items, dict)
            items[str(stage.item)] = code_digest(root, stage)
        elif stage.name not in found:
            found[stage.name] = code_digest(root, stage)
    return dict(sorted(found.items()))


def write_digests(root: Path) -> None:
    """Write `outputs/code.yaml`; a file that says the same already is not touched."""
    text = _HEAD + yaml.safe_dump(stage_digests(root))
    path = root / CODE
    if not path.exists() or path.read_text("utf-8") != text:
        write_atomically(path, text)
