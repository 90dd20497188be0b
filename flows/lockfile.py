"""DVC's lock files, which DVC rewrites in place: killed at that moment, it leaves a file that is cut off."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from tasks.project.files import parse_yaml
from tasks.project.stage import MAIN, STUDIES

RUNNING = ".dvc/tmp/rwlock"  # DVC's list of which process reads and writes which paths


def locked_stages(root: Path, file: str = MAIN) -> dict[str, Any]:
    """Return what DVC's lock has recorded by stage; nothing where it is missing or cut off.

    Args:
        root: the project folder.
        file: the dvc.yaml that the lock belongs to.
    """
    path = root / file.replace(".yaml", ".lock")
    return (_stages(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def mend_locks(root: Path) -> bool:
    """Mend what a killed DVC has cut off; return whether there was anything.

    Each lock file becomes git's last version, or none. Nothing is lost: the stages' own manifests know what has run,
    and the next run records it again. The list of who reads and writes what is removed: it concerns running processes
    only. To be called after DVC has refused to read them: while it holds its lock, nobody else writes.
    """
    names = [file.replace(".yaml", ".lock") for file in (MAIN, STUDIES)]
    cut = [name for name in names if (root / name).exists() and not is_whole((root / name).read_text("utf-8"))]
    for name in cut:
        _restore(root, name)
    home = next((folder for folder in (root, *root.parents) if (folder / ".dvc").is_dir()), root)  # a world has none
    running = home / RUNNING
    if running.exists() and not _is_json(running.read_text("utf-8")):
        running.unlink()
        return True
    return bool(cut)


def _restore(root: Path, name: str) -> None:
    command = ["git", "show", f"HEAD:./{name}"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if shown.returncode == 0 and is_whole(shown.stdout):
        (root / name).write_text(shown.stdout, encoding="utf-8")
        found = "git's last version is there again"
    else:
        (root / name).unlink()
        found = "it is written anew"
    print(f"{name} was cut off when DVC was killed: {found}; no results are lost.", file=sys.stderr)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_whole(text: str) -> bool:
    """Whether this is a lock file that DVC can read, and not the beginning of one."""
    return _stages(text) is not None


def _stages(text: str) -> dict[str, Any] | None:
    """The entries of a whole lock file by stage; None of one that is cut off."""
    try:
        found = parse_yaml(text, "dvc.lock")
    except MergeflowError:
        return None
    stages = found.get("stages") if isinstance(found, dict) and found.get("schema") else None
    return stages if isinstance(stages, dict) and all(map(_is_entry, stages.values())) else None


def _is_entry(stage: Any) -> bool:
    if not isinstance(stage, dict) or not isinstance(stage.get("cmd"), str):
        return False
    params = stage.get("params", {})
    files = [stage.get("deps", []), stage.get("outs", [])]
    return (
        isinstance(params, dict)
        and all(isinstance(values, dict) for values in params.values())
        and all(isinstance(listed, list) and all(_is_file(file) for file in listed) for listed in files)
    )


def _is_file(file: Any) -> bool:
    """Whether every value is whole: the beginning of a digest may read as a number, or as another digest."""
    if not isinstance(file, dict) or not isinstance(file.get("path"), str) or None in file.values():
        return False
    return "md5" not in file or bool(re.fullmatch(r"[0-9a-f]{32}(\.dir)?", str(file["md5"])))
