"""What a user is told where code of their own fails: a merge method, modality, scorer or study of a project."""

from pathlib import Path

from mergeflow.errors import MergeflowError
from mergeflow.plugins import PRIVATE, last_place, project_folder


def failed_in_own_code(error: BaseException) -> MergeflowError | None:
    """Return the message for an error that was raised in a file that the shelf loaded, or below it; else None.

    Args:
        error: What nobody caught.
    """
    place = last_place(error, lambda frame: str(frame.f_globals.get("__name__", "")).startswith(PRIVATE))
    if place is None:
        return None
    return MergeflowError(
        f"line {place.line} of '{_shown(place.file)}', in {place.function}, raised {type(error).__name__}: {error}. "
        "Correct it; `mergeflow methods NAME --check` tries a merge method on awkward tensors."
    )


def _shown(file: Path) -> Path:
    root = project_folder()
    return file.relative_to(root) if root and file.is_relative_to(root) else file
