"""What tasks and sweep methods leave behind when they are taken out of params.yaml."""

import shutil
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tasks.project.dvc_lock import digest_as_dvc, locked_stages
from tasks.project.graph import removed_items
from tasks.project.runner import has_run, remove_output
from tasks.project.stage import STATE


def remove_orphans(root: Path, report: Callable[[str], object]) -> None:
    """Take away the outputs of stage items that params.yaml no longer has.

    Stages that read the folder above would hash them into dvc.lock, and a clone that pulls does not have them. Those
    that DVC has recorded as they are stay in its cache. It has no others, as after a killed run, and these are moved.

    Args:
        root: the project folder.
        report: told once, a line for each of the two kinds, when there was anything.
    """
    locked = locked_stages(root)
    # Read before params.yaml: of a task that is being added, the line comes first and the outputs later.
    known = has_run(root) | set(locked)
    gone = removed_items(root, known)
    found = [(out, stage.address) for stage in gone for out in stage.outs if (root / out).exists()]
    cached = [out for out, address in found if _is_recorded(root, out, locked.get(address, {}))]
    others = [out for out, _ in found if out not in cached]
    said = []
    if cached:
        for out in cached:
            remove_output(root / out)
        said.append(
            f"Removed outputs of what params.yaml no longer has: {', '.join(cached)}. DVC's cache keeps them: where a "
            "name was mistyped, correct it and call `dvc checkout`."
        )
    if others:
        aside = next(folder for number in count(1) if not (folder := root / STATE / "removed" / str(number)).exists())
        for out in others:
            (aside / out).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / out, aside / out)
        said.append(
            f"Outputs of what params.yaml no longer has were moved to {aside.relative_to(root)}, because DVC has not "
            f"recorded them: {', '.join(others)}. Where a name was mistyped, correct it and move them back; else "
            "remove that folder."
        )
    if said:
        report("\n".join(said))


def _is_recorded(root: Path, out: str, entry: Mapping[str, Any]) -> bool:
    """Whether an output is, byte for byte, the one that DVC's lock has put into the cache."""
    recorded = [one.get("md5") for one in entry.get("outs", []) if one["path"] == out]
    return bool(recorded) and recorded == [digest_as_dvc(root / out)]
