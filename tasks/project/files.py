"""The project's YAML files, read with messages for people."""

from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.yaml_text import parse_yaml


def read_yaml(path: Path) -> Any:
    """Read one YAML file.

    Raises:
        MergeflowError: the file is missing, is not YAML in UTF-8, or has a key twice; the message has the line.
    """
    try:
        content = path.read_bytes()
        return parse_yaml(content.decode(), path.name)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise MergeflowError(
            f"{path.name} is not UTF-8 text: byte 0x{content[error.start]:02x} in line {line}. Save the file as UTF-8."
        ) from None
    except FileNotFoundError:
        raise MergeflowError(f"{path.name} is missing in {path.parent}: run inside a project folder.") from None
