"""Pickled state dicts, loaded by torch's weights-only reader: a file that holds code is refused."""

from __future__ import annotations

import errno
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.mistaken import cut_short, first_bytes, is_pickled, mistaken, other_archive
from mergeflow.checkpoints.reader import LazyStateDict, TensorEntry, tied_names
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
# Keys under which training runs keep a model's state dict, in order of preference; `module` is DeepSpeed's.
_NESTED = ("state_dict", "model_state_dict", "model", "module")


def is_pickle(path: Path) -> bool:
    """Whether a file is to be read as one of torch.save: by its ending, or for unusual endings by its first bytes."""
    if path.suffix in (*PICKLES, ".safetensors"):
        return path.suffix in PICKLES
    try:
        return is_pickled(first_bytes(path))
    except OSError:  # whoever opens it says why
        return False


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
        with torch.serialization.safe_globals(_notes_of_training()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except OSError as error:
        raise _unreadable(path, error) from None
    except Exception as error:  # the reader raises whatever a damaged or hostile file leads it to
        raise _refused(path, start, str(error) or type(error).__name__) from None


def _notes_of_training() -> list[Any]:
    """Return the classes beside tensors that training scripts often save, and whose loading runs no code."""
    import numpy as np

    scalar = np.float64(0).__reduce__()[0]
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    kinds = {type(np.dtype(kind)) for kind in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
    return [Namespace, np.dtype, *kinds, *((scalar, name) for name in names)]


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
    archive = other_archive(path) if is_pickled(start) else None
    if archive is not None:
        return MergeflowError(f"'{path}' is {archive}.")
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
    if not isinstance(loaded, Mapping):
        raise MergeflowError(f"'{path}' holds a {type(loaded).__name__}, not a state dict of named tensors.")
    states = _states(loaded)
    if len(states) != 1:
        raise _no_state(loaded, path, list(states))
    (state,) = states.values()
    if any(value.layout != torch.strided or value.is_quantized for value in state.values()):
        raise MergeflowError(f"'{path}' holds sparse or quantised tensors, which cannot be merged: convert them first.")
    return dict(state)


def _states(loaded: Mapping[Any, Any], depth: int = 3, seen: set[int] | None = None) -> dict[str, Mapping[str, Tensor]]:
    """Return the state dict of a model that a checkpoint holds, by its key; several where no key says which it is."""
    if loaded and all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()):
        return {"": loaded}
    seen, inner = set() if seen is None else seen, {}
    for key in sorted(filter(_may_hold_a_model, loaded), key=lambda key: key not in _NESTED):
        value = loaded[key]
        if depth and isinstance(value, Mapping) and "param_groups" not in value and id(value) not in seen:
            seen.add(id(value))  # a hostile pickle may hold one mapping many times
            inner[key] = _states(value, depth - 1, seen)
    chosen = next((inner[key] for key in _NESTED if inner.get(key)), None)
    if chosen is not None or any(isinstance(value, torch.Tensor) and value.ndim for value in loaded.values()):
        return chosen or {}
    return {f"{key}.{end}".rstrip("."): state for key, states in inner.items() for end, state in states.items()}


def _may_hold_a_model(key: Any) -> bool:
    return isinstance(key, str) and "optim" not in key and "scheduler" not in key


def _no_state(loaded: Mapping[Any, Any], path: Path, several: list[str]) -> MergeflowError:
    advice = f"Save the state dict alone, or under one of the keys {', '.join(_NESTED)}."
    if several:
        return MergeflowError(f"'{path}' holds {len(several)} state dicts: {', '.join(several[:5])}. {advice}")
    key = next((key for key in _NESTED if isinstance(loaded.get(key), Mapping)), None)
    if key is not None:
        return _no_state(loaded[key], path, [])
    if not loaded:
        return MergeflowError(f"'{path}' holds an empty state dict. {advice}")
    odd = [str(key) for key, value in loaded.items() if not (isinstance(key, str) and isinstance(value, torch.Tensor))]
    return MergeflowError(f"'{path}' has entries that are not named tensors: {', '.join(odd[:5])}. {advice}")
