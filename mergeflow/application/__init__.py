"""The application (stages, registry, flows) on the import path, and the project folder that a command works in.

In the repository the packages `tasks`, `registry`, `flows`, `suites` and `studies` lie beside the library. A wheel
holds them in this very folder, so that site-packages gets no package with a name as general as `tasks`.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INSTALLED = (HERE / "flows").is_dir()
HOME = HERE if INSTALLED else HERE.parents[1]
"""The folder that holds the packages `tasks`, `registry`, `flows`, `suites` and `studies`."""
TEMPLATE = HERE / "template" if INSTALLED else HOME
"""The project whose files `mergeflow new` copies: the repository's root, or the same files in a wheel."""
PAGES = (HERE if INSTALLED else HOME) / "docs"
"""The pages of the documentation."""


def make_importable() -> None:
    """Put the application on the import path, here and in every process that is started from here."""
    home, inherited = str(HOME), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if home not in sys.path:
        sys.path.insert(0, home)
    if home not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, *inherited]))


def call(module: str, function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of the application; a process of another program, such as Dask's worker, finds it by this one."""
    make_importable()
    return getattr(import_module(module), function)(*arguments, **options)


def find_project(start: Path) -> Path | None:
    """Return the project folder that is `start` or holds it: the nearest with dvc.yaml and params.yaml.

    The folder `studies` of a project has the same two files and is not a project of its own.
    """
    for folder in [start, *start.parents]:
        if _has_choices(folder) and not (folder.name == "studies" and _has_choices(folder.parent)):
            return folder
    return None


def _has_choices(folder: Path) -> bool:
    return (folder / "dvc.yaml").is_file() and (folder / "params.yaml").is_file()
