"""A project folder beside the project: the same code and stages, other inputs and parameters, gone afterwards."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from tasks.project.stage import STATE

_SHARED = ("mergeflow", "tasks", "registry", "flows", "inputs", "dvc.yaml")


@contextmanager
def scratch_project(root: Path, purpose: str) -> Iterator[Path]:
    """Give an empty project folder that shares the code of `root`; one holder per purpose at a time.

    Stages run in it as in the project, and nothing that they write lands in the project's outputs, in dvc.lock or in
    the stages' records.

    Args:
        root: the project folder.
        purpose: one word; names the folder and its lock. What a killed holder left goes first.
    """
    folder, locks = root / STATE / purpose, root / STATE / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{purpose}.lock"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in _SHARED:
            if (root / name).exists():
                (folder / name).symlink_to(root / name)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_params(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the scratch project's params.yaml."""
    (folder / "params.yaml").write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
