"""What a stage reads below `inputs`: only what its parameters name, so that other people's files change nothing."""

import re
from collections.abc import Iterator
from posixpath import normpath
from typing import Any

from mergeflow.modalities.vision.data.torchvision_source import DEFAULT_ROOT
from tasks.project.stage import covers

INPUTS = "inputs"


def named_inputs(values: Any) -> list[str]:
    """Return the files and folders below `inputs` that stand in parameters, as paths or as sources of data.

    Example:
        >>> named_inputs({"digits": "suite:pocket8", "cats": "folder:inputs/cats", "dtd": "torchvision:DTD"})
        ['inputs/cats', 'inputs/torchvision']
    """
    paths = {normpath(path) for text in _texts(values) for path in (text, _local(text)) if path}
    return [INPUTS] if "." in paths else sorted(path for path in paths if covers(INPUTS, path))


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from _texts(value)
    elif isinstance(values, str):
        yield values


def _local(source: str) -> str:
    """Return the path in a source, up to its first wildcard."""
    kind, _, address = source.partition(":")
    if kind == "torchvision":
        return address.partition("@")[2] or DEFAULT_ROOT
    return re.sub(r"/?[^/]*[*?\[].*", "", address)
