"""Paths in recipes that only a project can follow: models:/name@alias, and files that DVC keeps."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from flows.dvc_commands import fetch_output
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from registry.store import Store
    from registry.versions import ModelVersion

_SOURCE = "source"  # a file beside a fetched version's files: where they come from; written when they are all there


def resolve_reference(root: Path, path: str) -> str:
    """Resolve a recipe's path: to a local path, or for an alias to the version that it means now.

    Args:
        path: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or a path; a missing one is fetched when DVC tracks it.
    """
    if path.startswith("models:/"):
        address = path.removeprefix("models:/")
        name, separator, which = re.match(r"([^/@]*)([/@]?)(.*)", address).groups()  # type: ignore[union-attr]
        if not name.strip(".") or not which:
            raise MergeflowError(f"'{path}' names no version: write models:/NAME@ALIAS or models:/NAME/VERSION.")
        if separator != "@":
            return str(_weights(root, name, which))
        from registry.store import connect
        from registry.versions import find_version

        return f"models:/{name}/{find_version(connect(project_root=root), name, which).version}"
    if "://" not in path and not Path(path).exists():
        fetch_output(root, Path(path))
    return path


def _weights(root: Path, name: str, which: str) -> Path:
    from mergeflow.modalities.served import WEIGHTS
    from registry.store import LOCK_SECONDS, connect, file_lock
    from registry.versions import find_stored

    store = connect(project_root=root)
    version = find_stored(store, name, which)
    place = root / ".mergeflow" / "models" / f"{name}-{version.version}"
    with file_lock(root / ".mergeflow" / "locks", f"files of {place.name}", LOCK_SECONDS):
        if not _holds(place, version):
            _fetch(store, version, place)
    return place / "model" / WEIGHTS


def _holds(place: Path, version: "ModelVersion") -> bool:
    """Return whether a folder holds the files of a version, all of them and as they were registered."""
    from mergeflow.modalities.served import WEIGHTS
    from registry.artifacts import MODEL, check_part

    noted = place / _SOURCE
    # Not the number alone: a registry made anew, or another one, begins at 1 too.
    if not (noted.is_file() and noted.read_text() == version.source and (place / "model" / WEIGHTS).is_file()):
        return False
    try:
        check_part(version, MODEL, place / "model")
    except MergeflowError:
        return False
    return True


def _fetch(store: "Store", version: "ModelVersion", place: Path) -> None:
    """Fetch a version's files beside their place and put them there whole: others may be reading what was there."""
    from registry.versions import download_model

    scratch, former = (place.with_name(f".{place.name}.{state}") for state in ("new", "former"))
    for folder in (scratch, former):  # of a process that was killed
        shutil.rmtree(folder, ignore_errors=True)
    try:
        download_model(store, version, scratch)
        (scratch / _SOURCE).write_text(str(version.source))
        if place.exists():
            place.rename(former)
        scratch.rename(place)
    finally:
        for folder in (scratch, former):
            shutil.rmtree(folder, ignore_errors=True)
