"""Save and load a run's state: a file is complete or absent, and only the run that saved it may load it."""

import hashlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mergeflow.errors import MergeflowError


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values; the file is complete or absent."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        with temporary.open("rb") as written:
            file.write(hashlib.file_digest(written, "sha256").digest())  # torch.load would not see a flipped bit
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def load_state(path: Path, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read what `save_state` wrote into the processor's memory; nothing but tensors and plain values is unpickled.

    Args:
        run: identifies the run; it must equal the state's entry `run`.

    Raises:
        MergeflowError: the file is damaged, or another run saved it.
    """
    try:
        _verify(path)
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        saved_run: dict[str, Any] = state["run"] if run is not None else {}
    except (RuntimeError, ValueError, LookupError, EOFError, OSError, TypeError, pickle.UnpicklingError) as error:
        raise MergeflowError(
            f"the saved state {path} cannot be read ({type(error).__name__}): it is damaged. Delete it; "
            "the run then starts again."
        ) from None
    if run is not None and saved_run != run:
        differing = sorted(key for key in {*run, *saved_run} if run.get(key) != saved_run.get(key))
        raise MergeflowError(
            f"the saved state {path} is that of another run; {', '.join(differing)} differ. Delete it to start again, "
            "or choose another folder."
        )
    return state


def _verify(path: Path) -> None:
    with path.open("rb") as file:
        whole = hashlib.sha256()
        left = path.stat().st_size - whole.digest_size
        while left > 0:
            block = file.read(min(left, 2**20))
            whole.update(block)
            left -= len(block)
        if file.read() != whole.digest():
            raise ValueError("checksum")
