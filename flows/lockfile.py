"""DVC's lock files, which DVC rewrites in place: killed at that moment, it leaves a file that is cut off."""

import json
import subprocess
import sys
from pathlib import Path

from tasks.project.dvc_lock import whole_stages
from tasks.project.stage import MAIN, STUDIES

RUNNING = ".dvc/tmp/rwlock"  # DVC's list of which process reads and writes which paths


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
    running = dvc_home(root) / RUNNING
    if running.exists() and not _is_json(running.read_text("utf-8")):
        running.unlink()
        return True
    return bool(cut)


def dvc_home(root: Path) -> Path:
    """Return the folder that has DVC's settings: the project's, or one above it."""
    return next((folder for folder in (root, *root.parents) if (folder / ".dvc").is_dir()), root)


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
    return whole_stages(text) is not None
