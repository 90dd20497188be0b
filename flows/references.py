"""Paths in recipes that only a project can follow: models:/name@alias, and files that DVC keeps."""

import re
from pathlib import Path

from flows.staleness import fetch_output
from mergeflow.errors import MergeflowError


def resolve_reference(root: Path, path: str) -> str:
    """Return what a recipe's path stands for: a local path, or for an alias the version that it means now.

    Args:
        root: the project folder.
        path: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or a path; a missing one is fetched when DVC tracks it.

    Raises:
        MergeflowError: no such model, version or alias; DVC cannot fetch the file.
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
    from registry.lookup import find_version
    from registry.store import connect

    return f"models:/{name}/{find_version(connect(project_root=root), name, alias).version}"


def _weights(root: Path, name: str, which: str) -> Path:
    from mergeflow.modalities.serving import weights_file
    from registry.lookup import download, find_version
    from registry.store import connect

    store = connect(project_root=root)
    version = find_version(store, name, which)
    target = root / ".mergeflow" / "models" / f"{name}-{version.version}"
    return weights_file(download(store, name, version.version, target))
