"""Unmerge: a registered version rebuilt without one of its tasks."""

from collections.abc import Callable
from pathlib import Path

from flows.rebuild.scratch import choose, lay_out, note_rebuild, register_view
from mergeflow.errors import MergeflowError, unknown_name
from registry.stage import Rebuilt, register_rebuilt
from registry.store import Store
from registry.versions import find_stored, read_documents
from tasks.project.parameters import load_params
from tasks.running.scratch_project import scratch_project


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
    """Merge the version's other experts again, choose among all candidates of params.yaml, and register the result."""
    stored = find_stored(store, name, which)
    version = str(stored.version)
    _, origin = read_documents(store, stored)
    if task not in origin["experts"]:
        raise unknown_name(f"task of '{name}' version {version}", task, origin["experts"])
    if len(origin["experts"]) == 1:
        raise MergeflowError(
            f"'{task}' is the only task of '{name}' version {version}: without it nothing is left to merge. "
            "Roll back, or serve another version."
        )
    del origin["experts"][task]
    note_rebuild(root, origin, "unmerge", stored, task, report)
    with scratch_project(root, "unmerge") as scratch:
        report("looking for its ancestors")
        lay_out(root, store, stored, origin, scratch)
        params = load_params(root / "params.yaml")
        choose(root, scratch, origin, params.sweep, report)
        return register_rebuilt(store, name, register_view(scratch), origin, promote_it=promote)
