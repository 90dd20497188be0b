"""What a user is told where code of their own fails: a merge method, modality, scorer or study of a project."""

import traceback
from pathlib import Path

from mergeflow.errors import MergeflowError
from mergeflow.plugins import project_folder

PRIVATE = "_mergeflow_"  # how the names begin under which `load_file` loads modules


def failed_in_own_code(error: BaseException) -> MergeflowError | None:
    """Return the message for an error that was raised in a file that the shelf loaded, or below it; else None.

    Args:
        error: What nobody caught.
    """
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(PRIVATE)
    ]
    if not frames:
        return None
    file, line, function = frames[-1]
    return MergeflowError(
        f"line {line} of '{_place(Path(file))}', in {function}, raised {type(error).__name__}: {error}. Correct it; "
        "`mergeflow methods NAME --check` tries a merge method on awkward tensors."
    )


def _place(file: Path) -> Path:
    root = project_folder()
    return file.relative_to(root) if root and file.is_relative_to(root) else file
