"""Faults of our own in a stage: only the stage's traceback is shown, whichever process it ran in."""

import traceback

from mergeflow.errors import MergeflowError


def keep_traceback(error: BaseException) -> None:
    """Attach the traceback as a note to an error that bad input did not cause: notes survive between processes."""
    if not isinstance(error, MergeflowError):
        error.add_note("".join(traceback.format_exception(error)))


def own_traceback(error: BaseException) -> str | None:
    """Return what `keep_traceback` attached to an error; None if it did not come through it."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes[-1] if notes else None
