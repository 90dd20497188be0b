"""One way in for every input format."""

from pathlib import Path

from mergeflow.checkpoints.reader import LazyStateDict, open_safetensors
from mergeflow.errors import MergeflowError


def open_checkpoint(path: str | Path) -> LazyStateDict:
    """Open a checkpoint without reading its data.

    Args:
        path: A safetensors file.

    Returns:
        A lazy mapping from names to tensors.

    Raises:
        MergeflowError: Nothing readable is there, or its header is not valid.
    """
    place = Path(path)
    if not place.exists():
        raise MergeflowError(f"no checkpoint at '{place}'. Check the path.")
    return open_safetensors(place)
