"""Whether adapters meet the base that they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mergeflow.checkpoints.checks import same_values
from mergeflow.checkpoints.folders import NamedBase, named_base
from mergeflow.checkpoints.formats import cached_id, open_checkpoint
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.merging.preflight.findings import Finding

if TYPE_CHECKING:
    from torch import Tensor

SUBJECT = "base_model"
# How much of how many tensors is compared: fine-tuning moves nearly every tensor, and files may be hundreds of GB.
_TENSORS, _ELEMENTS = 16, 4096


def adapter_findings(base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> list[Finding]:
    """Return which adapters were made for another base than this one.

    One whose base is on this machine is refused where some of its weights differ from this base's; where they cannot be
    compared, and the names differ, that is a warning.

    Args:
        base: The base.
        experts: The experts by name.
    """
    named = {name: named_base(state.path) for name, state in experts.items() if state.is_task_vector}
    return [one for name, wanted in named.items() if wanted is not None and (one := _finding(name, wanted, base))]


def _finding(adapter: str, wanted: NamedBase, base: LazyStateDict) -> Finding | None:
    folder, here = wanted.folder(), cached_id(base.path) or base.path
    place = Path(base.path)
    if folder is not None and folder.resolve() in (place.resolve(), place.parent.resolve()):
        return None
    same = None if folder is None else _same_weights(base, folder)
    if same or (same is None and Path(wanted.name).name.lower() == Path(here).name.lower()):
        return None
    text = f"{SUBJECT}: '{adapter}' was made for '{wanted.path}' (adapter_config.json), the base is '{here}'"
    told = "whose weights are others" if same is False else "which cannot be compared with it here"
    return Finding(SUBJECT, f"{text}, {told}", refused=same is False)


def _same_weights(base: LazyStateDict, folder: Path) -> bool | None:
    """Whether two models hold the same numbers where a sample of them is compared; None where that cannot be told."""
    try:
        with open_checkpoint(folder) as other:
            shared = [name for name in sorted(base) if name in other and _comparable(base, other, name)]
            chosen = shared[:: max(1, len(shared) // _TENSORS)]
            counts = {name: min(_ELEMENTS, base.infos[name].numel) for name in chosen}
            equal = [_equal(base.read(n, 0, count), other.read(n, 0, count)) for n, count in counts.items()]
    except MergeflowError:
        return None
    return all(equal) if equal else None


def _comparable(base: LazyStateDict, other: LazyStateDict, name: str) -> bool:
    own, its = base.infos[name], other.infos[name]
    half = {str(info.dtype) for info in (own, its)} >= {"torch.float16", "torch.bfloat16"}
    return own.shape == its.shape and own.dtype.is_floating_point and its.dtype.is_floating_point and not half


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether the numbers are the same in the narrower of the two types."""
    narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return same_values(a.to(narrow), b.to(narrow))
