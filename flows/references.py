"""Paths in recipes that only a project can follow: models:/name@alias, and files that DVC keeps."""

from pathlib import Path

from flows.staleness import fetch_output
from mergeflow.errors import MergeflowError


def resolve_reference(root: Path, path: str) -> str:
    """Return the local path that a recipe's path stands for.

    Args:
        root: the project folder.
        path: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or a path; a missing one is fetched when DVC tracks it.

    Raises:
        MergeflowError: no such model, version or alias; DVC cannot fetch the file.
    """
    if path.startswith("models:/"):
        return str(_registered_encoder(root, path.removeprefix("models:/")))
    if "://" not in path and not Path(path).exists():
        fetch_output(root, Path(path))
    return path


def _registered_encoder(root: Path, address: str) -> Path:
    from registry.lookup import download, find_version
    from registry.store import connect

    name, _, which = address.replace("@", "/").partition("/")
    if not name.strip(".") or not which:
        raise MergeflowError(f"'models:/{address}' names no version: write models:/NAME@ALIAS or models:/NAME/VERSION.")
    store = connect(project_root=root)
    version = find_version(store, name, which)
    target = root / ".mergeflow" / "models" / f"{name}-{version.version}"
    return next(download(store, name, version.version, target).rglob("encoder.safetensors"))
