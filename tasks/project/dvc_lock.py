"""What DVC has recorded: the entries of its lock file, and the hashes that stand there."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from tasks.project.files import parse_yaml
from tasks.project.stage import MAIN


def locked_stages(root: Path, file: str = MAIN) -> dict[str, Any]:
    """Return what DVC's lock has recorded by stage; nothing where it is missing or cut off.

    Args:
        root: the project folder.
        file: the dvc.yaml that the lock belongs to.
    """
    path = root / file.replace(".yaml", ".lock")
    return (whole_stages(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def whole_stages(text: str) -> dict[str, Any] | None:
    """Return the entries of a whole lock file by stage; None of one that is cut off."""
    try:
        found = parse_yaml(text, "dvc.lock")
    except MergeflowError:
        return None
    stages = found.get("stages") if isinstance(found, dict) and found.get("schema") else None
    return stages if isinstance(stages, dict) and all(map(_is_entry, stages.values())) else None


def md5_of(path: Path) -> str:
    """Return the MD5 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def digest_as_dvc(path: Path, of_file: Callable[[Path], str] = md5_of) -> str:
    """Return what DVC writes into its lock: of a folder the MD5 of the list of its files with theirs.

    Args:
        path: a file or a folder.
        of_file: gives the MD5 of a file.
    """
    if path.is_file():
        return of_file(path)
    files = sorted((one.relative_to(path).as_posix(), one) for one in path.rglob("*") if one.is_file())
    listed = [{"md5": of_file(one), "relpath": name} for name, one in files]
    return f"{hashlib.md5(json.dumps(listed, sort_keys=True).encode()).hexdigest()}.dir"


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
