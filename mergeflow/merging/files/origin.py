"""Where a task vector was taken from: a difference means nothing on another base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mergeflow.checkpoints.fingerprint import fingerprint, matches, short
from mergeflow.checkpoints.reader import KIND
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from torch import Tensor

BASE = "mergeflow.base"  # metadata of a task vector: the fingerprint of its base


def another_base(name: str, taken: str, found: str) -> MergeflowError:
    """Return the error for a task vector of another base.

    Args:
        name: The task vector's name or path.
        taken: Fingerprint of the base it was taken from.
        found: Fingerprint of the base it met.
    """
    return MergeflowError(
        f"task vector '{name}' was taken from the base {short(taken)}…, but this base is {short(found)}…: "
        "a difference means nothing on another base. Extract it again from this one."
    )


def no_task_vector(path: object) -> MergeflowError:
    """Return the error for a file that does not say that it holds differences."""
    return MergeflowError(
        f"'{path}' is not a task vector: whole models go under `experts`; make a task vector with `mergeflow vector "
        f"extract BASE EXPERT`. Differences of other tools are known by the file's metadata `{KIND}: task_vector`."
    )


def check_origin(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that task vectors were taken from this base; the base is read only where one of them says from which.

    Raises:
        MergeflowError: Naming the first that was taken from another.
    """
    taken = {
        name: getattr(state, "metadata", {}).get(BASE)
        for name, state in experts.items()
        if getattr(state, "is_task_vector", False)
    }
    if any(taken.values()):
        found = fingerprint(base)
        for name, source in taken.items():
            if source and not matches(base, source, found):
                raise another_base(name, source, found)
