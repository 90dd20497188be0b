"""What a stage reads below `inputs`: only what its parameters name, so that other files there make nothing stale."""

from collections.abc import Iterator
from posixpath import normpath
from typing import Any

from mergeflow.data.address import parse_address
from tasks.project.stage import covers

INPUTS = "inputs"


def named_inputs(values: Any) -> list[str]:
    """Return the files and folders below `inputs` that parameters name, as paths or as sources of data.

    Example:
        >>> named_inputs({"cats": "folder:inputs/cats?rotate=45", "dtd": "torchvision:DTD", "base": "inputs/b.pt"})
        ['inputs/b.pt', 'inputs/cats', 'inputs/torchvision']
    """
    paths = {normpath(path) for text in _texts(values) for path in parse_address(text).paths if path}
    return [INPUTS] if "." in paths else sorted(path for path in paths if covers(INPUTS, path))


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from _texts(value)
    elif isinstance(values, str):
        yield values
