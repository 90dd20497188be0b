"""Unmerge: a registered version rebuilt without one of its tasks."""

from collections.abc import Callable
from pathlib import Path

from flows.rebuild.remerge import choose, lay_out, register_view
from mergeflow.errors import MergeflowError, unknown_name
from registry.environment import environment
from registry.lookup import find_version
from registry.pipeline_records import git_commit
from registry.provenance import read_documents
from registry.rebuilt import Rebuilt, register_rebuilt
from registry.store import Store
from tasks.project.beside import project_beside
from tasks.project.parameters import load_params


def unmerge(
    root: Path,
    store: Store,
    name: str,
    which: str | int,
    task: str,
    *,
    promote: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Rebuilt:
    """Merge the version's other experts again, choosing among all candidates of params.yaml, and register the result.

    Args:
        root: the project folder.
        store: the open registry.
        name: of the registered model.
        which: version number or alias.
        task: the task to leave out.
        promote: make the result champion if the gates let it, judged on the remaining tasks.
        report: told what is being done.

    Raises:
        MergeflowError: no such model, version or task; the only task; a version that this project did not make;
            ancestors that are nowhere.
    """
    _, origin = read_documents(store, name, which)
    version = find_version(store, name, which).version
    if task not in origin["experts"]:
        raise unknown_name(f"task of '{name}' version {version}", task, origin["experts"])
    if len(origin["experts"]) == 1:
        raise MergeflowError(
            f"'{task}' is the only task of '{name}' version {version}: without it nothing is left to merge. "
            "Roll back, or serve another version."
        )
    del origin["experts"][task]
    origin.pop("unlearned", None)
    origin |= {"kind": "unmerge", "parent": {"model": name, "version": version, "task": task}}
    origin |= {"git_commit": git_commit(root), "environment": environment()}
    with project_beside(root, "unmerge") as scratch:
        report("looking for its ancestors")
        lay_out(root, store, name, version, origin, scratch)
        params = load_params(root / "params.yaml")
        choose(root, scratch, origin, params.sweep, report)
        return register_rebuilt(store, name, register_view(scratch), origin, promote_it=promote)
