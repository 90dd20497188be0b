"""A scratch project that shares the graph and inputs but has other parameters."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tasks.project.files import file_lock
from tasks.project.stage import STATE

_SHARED = ("inputs", "dvc.yaml")


@contextmanager
def scratch_project(root: Path, name: str, fresh: bool = True) -> Iterator[Path]:
    """Give a project folder that shares graph and inputs with `root`; one holder of a name at a time.

    Stages run in it as in the project, and nothing that they write lands in the project's outputs, in dvc.lock or in
    the stages' records.

    Args:
        fresh: begin with an empty folder and remove it afterwards; else what a killed holder left is found again, and
            the caller removes the folder when its work is done.
    """
    folder, lock = root / STATE / name, root / STATE / "locks" / f"{name.replace('/', '-')}.lock"
    with file_lock(lock, f"the scratch project {name}"):
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for shared in _SHARED:
            if (root / shared).exists():
                link(root / shared, folder / shared)
        try:
            yield folder
        finally:
            if fresh:
                shutil.rmtree(folder, ignore_errors=True)


def write_params(folder: Path, values: Mapping[str, Any]) -> None:
    (folder / "params.yaml").write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")


def link(source: Path, target: Path) -> None:
    """Link one file or folder, instead of an earlier link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.symlink_to(source.resolve())
