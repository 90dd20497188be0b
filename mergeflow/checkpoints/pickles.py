"""Pickled state dicts, loaded by torch's weights-only reader: a file that holds code is refused."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.mistaken import cut_short, first_bytes, mistaken
from mergeflow.checkpoints.reader import LazyStateDict, TensorEntry, tied_names
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("state_dict", "model_state_dict", "model")
_PREFIX = "module."


def open_pickle(path: Path) -> LazyStateDict:
    """Open a pickled state dict; its data stays in the file where the format allows it.

    Raises:
        MergeflowError: The file holds code or objects, is damaged, or has no state dict.
    """
    tensors = _unwrap(_load(path), path)
    infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    entries = {name: TensorEntry(tensor.detach()) for name, tensor in tensors.items()}
    return LazyStateDict(str(path), entries, infos, {}, tied=tied_names(tensors))


def _load(path: Path) -> Any:
    try:
        start = first_bytes(path)
        # Only files in the zip format can be mapped; older ones are read whole.
        zipped = start.startswith(b"PK\x03\x04")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except OSError as error:
        raise _unreadable(path, error) from None
    except Exception as error:  # the reader raises whatever a damaged or hostile file leads it to
        raise _refused(path, start, str(error) or type(error).__name__) from None


def _unreadable(path: Path, error: OSError) -> MergeflowError:
    """Return the error for a file that cannot be read; mapping a cut one is an "invalid argument" to the system."""
    if error.errno == errno.EINVAL:
        return _refused(path, b"", "EOF")
    return MergeflowError(f"cannot read checkpoint '{path}': {error.strerror}. Check the path.")


def _refused(path: Path, start: bytes, reason: str) -> MergeflowError:
    """Return our own error; torch's ends in the advice to run the file's code."""
    other = mistaken(start, "pickle")
    if other is not None:
        return MergeflowError(f"'{path}' {other}.")
    if cut_short(path, start, reason):
        size = path.stat().st_size
        return MergeflowError(f"'{path}' is cut short: it ends after {size} bytes. Copy or download it again.")
    wanted = re.search(r"GLOBAL ([\w.]+)", reason)
    if wanted:
        what = f"it wants to load '{wanted.group(1)}', so it holds code, which is never run"
    elif "weights_only" in reason:
        what = "it is damaged, or it holds code, which is never run"
    else:
        what = f"it is damaged ({reason.splitlines()[0].split('. ')[0][:120]})"
    return MergeflowError(
        f"'{path}' is not a plain state dict: {what}. Save the state dict alone where the file was made, best as "
        "safetensors: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
    )


def _unwrap(loaded: Any, path: Path) -> dict[str, Tensor]:
    for key in _NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not loaded:
        raise MergeflowError(f"'{path}' holds a {type(loaded).__name__}, not a state dict of named tensors.")
    odd = [
        str(name) for name, value in loaded.items() if not isinstance(value, torch.Tensor) or not isinstance(name, str)
    ]
    if odd:
        raise MergeflowError(
            f"'{path}' has entries that are not named tensors: {', '.join(odd[:5])}. "
            f"Save the state dict alone, or under one of the keys {', '.join(_NESTED)}."
        )
    if any(value.layout != torch.strided or value.is_quantized for value in loaded.values()):
        raise MergeflowError(f"'{path}' holds sparse or quantised tensors, which cannot be merged: convert them first.")
    if all(name.startswith(_PREFIX) for name in loaded):
        return {name.removeprefix(_PREFIX): value for name, value in loaded.items()}
    return dict(loaded)
