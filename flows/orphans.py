"""What tasks and sweep methods leave behind when they are taken out of params.yaml."""

from collections.abc import Callable
from pathlib import Path

from flows.lockfile import locked_stages
from tasks.project.graph import removed_items
from tasks.project.runner import has_run, remove_outputs


def remove_orphans(root: Path, report: Callable[[str], object]) -> None:
    """Remove the outputs of stage items that params.yaml no longer has; what DVC has recorded stays in its cache.

    Stages that read the folder above would hash them into dvc.lock, and a clone that pulls does not have them.

    Args:
        root: the project folder.
        report: told in one line, when there was anything.
    """
    # Read before params.yaml: of a task that is being added, the line comes first and the outputs later.
    known = has_run(root) | set(locked_stages(root))
    gone = [out for stage in removed_items(root, known) for out in remove_outputs(root, stage)]
    if gone:
        report(
            f"Removed outputs of what params.yaml no longer has: {', '.join(gone)}. DVC's cache keeps them: where a "
            "name was mistyped, correct it and call `dvc checkout`."
        )
