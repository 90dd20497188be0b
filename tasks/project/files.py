"""The project's YAML files, read with messages for people."""

from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.yaml_text import parse_yaml


def read_yaml(path: Path) -> Any:
    """Read one YAML file.

    Raises:
        MergeflowError: the file is missing, is not YAML, or has a key twice; the message has the line.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except FileNotFoundError:
        raise MergeflowError(f"{path.name} is missing in {path.parent}: run inside a project folder.") from None
