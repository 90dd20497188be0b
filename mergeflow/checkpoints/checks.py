"""Checks of state dicts against each other, before any work is done on them."""

from collections.abc import Mapping
from difflib import get_close_matches

from torch import Tensor

from mergeflow.checkpoints.fingerprint import blocks
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError


def infos_of(state: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Return shape and dtype of every tensor, without reading data where the state is lazy."""
    if isinstance(state, LazyStateDict):
        return state.infos
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def check_compatible(
    base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]], dtypes: bool = True
) -> None:
    """Check that every expert has the base's names, shapes and dtypes.

    Args:
        base: The base's state dict.
        experts: State dicts by expert name.
        dtypes: Whether another dtype is a mismatch.

    Raises:
        MergeflowError: One error that lists every mismatch of every expert.
    """
    expected = infos_of(base)
    faults = [fault for name, state in experts.items() for fault in _mismatches(name, expected, state, dtypes)]
    if not faults:
        return
    shown = "\n".join(f"  - {fault}" for fault in faults)
    raise MergeflowError(
        f"{len(faults)} mismatches between the base and the experts:\n{shown}\n"
        "Every expert must be a fine-tuned copy of this base: check the paths"
        + (", or convert the files to one dtype." if dtypes else ".")
    )


def _mismatches(
    expert: str, expected: Mapping[str, TensorInfo], state: Mapping[str, Tensor], dtypes: bool
) -> list[str]:
    found = infos_of(state)
    partial = getattr(state, "is_task_vector", False)
    faults = []
    for name, info in expected.items():
        if name not in found:
            if not partial:
                faults.append(f"expert '{expert}' lacks tensor '{name}' {list(info.shape)}")
        elif found[name].shape != info.shape:
            faults.append(
                f"expert '{expert}', tensor '{name}': shape {list(found[name].shape)}, base has {list(info.shape)}"
            )
        elif dtypes and not partial and found[name].dtype != info.dtype:
            faults.append(f"expert '{expert}', tensor '{name}': {found[name].dtype}, base has {info.dtype}")
    for name in found:
        if name not in expected:
            nearest = get_close_matches(name, expected, n=1)
            hint = f"; the base's nearest is '{nearest[0]}'" if nearest else ""
            faults.append(f"expert '{expert}' has tensor '{name}', unknown to the base{hint}")
    return faults


def check_finite(name: str, state: Mapping[str, Tensor]) -> None:
    """Check that no tensor holds NaN or infinity.

    Raises:
        MergeflowError: Naming the state and the first tensor that does.
    """
    for tensor_name in state:
        tensor = state[tensor_name]
        if tensor.is_floating_point() and not all(all_finite(part) for part in blocks(tensor)):
            raise not_finite(name, tensor_name)


def all_finite(part: Tensor) -> bool:
    """Whether a flat piece is free of NaN and infinity."""
    # x·0 is 0 for every finite x and NaN for the others: one fused pass and no mask in memory.
    return bool((part if part.dtype.itemsize >= 4 else part.float()).mul(0).sum() == 0)


def not_finite(owner: str, tensor: str) -> MergeflowError:
    """Return the error for NaN or infinity in a tensor."""
    return MergeflowError(
        f"'{owner}' holds NaN or infinity in tensor '{tensor}': a merge would spread it. "
        "Its training diverged or the file is damaged: train it again or use an earlier checkpoint."
    )
