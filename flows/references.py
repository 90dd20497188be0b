"""Paths in recipes that only a project can follow: models:/name@alias, and files that DVC keeps."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from flows.dvc_commands import fetch_output
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from registry.store import Store

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
        return _version_of_alias(root, name, which) if separator == "@" else str(_weights(root, name, which))
    if "://" not in path and not Path(path).exists():
        fetch_output(root, Path(path))
    return path


def _version_of_alias(root: Path, name: str, alias: str) -> str:
    from registry.store import connect
    from registry.versions import find_version

    return f"models:/{name}/{find_version(connect(project_root=root), name, alias).version}"


def _weights(root: Path, name: str, which: str) -> Path:
    from mergeflow.modalities.served import WEIGHTS
    from registry.store import LOCK_SECONDS, connect, file_lock
    from registry.versions import find_version

    store = connect(project_root=root)
    number = find_version(store, name, which).version
    # Not the number alone: a registry made anew, or another one, begins at 1 too.
    source = str(store.client.get_model_version(name, number).source)
    place = root / ".mergeflow" / "models" / f"{name}-{number}"
    with file_lock(root / ".mergeflow" / "locks", f"files of {place.name}", LOCK_SECONDS):
        if not _holds(place, source) or not _is_whole(store, name, number, place):
            _fetch(store, name, number, source, place)
    return place / "model" / WEIGHTS


def _holds(place: Path, source: str) -> bool:
    """Return whether a folder holds the files of a version's source, all of them."""
    from mergeflow.modalities.served import WEIGHTS

    noted = place / _SOURCE
    return noted.is_file() and noted.read_text() == source and (place / "model" / WEIGHTS).is_file()


def _is_whole(store: "Store", name: str, number: str, place: Path) -> bool:
    """Return whether the files that were fetched are those that were registered still."""
    from registry.artifacts import MODEL, check_part

    try:
        check_part(store.client.get_model_version(name, number), MODEL, place / "model")
    except MergeflowError:
        return False
    return True


def _fetch(store: "Store", name: str, number: str, source: str, place: Path) -> None:
    """Fetch a version's files beside their place and put them there whole: others may be reading what was there."""
    from registry.versions import download

    scratch, former = (place.with_name(f".{place.name}.{state}") for state in ("new", "former"))
    for folder in (scratch, former):  # of a process that was killed
        shutil.rmtree(folder, ignore_errors=True)
    try:
        download(store, name, number, scratch)
        (scratch / _SOURCE).write_text(source)
        if place.exists():
            place.rename(former)
        scratch.rename(place)
    finally:
        for folder in (scratch, former):
            shutil.rmtree(folder, ignore_errors=True)
