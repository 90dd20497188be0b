"""Checks of state dicts against each other, before any work is done on them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.fingerprint import blocks
from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.lora import AddedEntry, DoraEntry, LoraEntry, TokensEntry, is_target
from mergeflow.checkpoints.names import may_be_tied
from mergeflow.checkpoints.quantised import check_not_quantised
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor


def infos_of(state: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Return shape and dtype of every tensor, without reading data where the state is lazy."""
    if isinstance(state, LazyStateDict):
        return state.infos
    return {name: TensorInfo.of(tensor) for name, tensor in state.items()}


def check_compatible(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that every expert has the base's names and shapes; floating-point types may differ.

    One error has every mismatch of every expert, grouped by the pattern of the names; or every input that is quantised.
    """
    inputs = {"base": base, **experts}
    check_not_quantised(
        {name: (infos_of(state), config_of(state), getattr(state, "path", "")) for name, state in inputs.items()}
    )
    expected = infos_of(base)
    for name, state in inputs.items():
        if not getattr(state, "is_task_vector", False):
            _check_weights(f"'{name}' ({getattr(state, 'path', 'in memory')})", infos_of(state), expected)
    faults = [fault for name, state in experts.items() for fault in _mismatches(name, expected, state)]
    if not faults:
        return
    groups: dict[tuple[str, str, str], list[_Mismatch]] = {}
    for fault in faults:
        groups.setdefault((fault.expert, fault.what, pattern_of(fault.tensor)), []).append(fault)
    shown = "\n".join(f"  - {_described(group, expected)}" for group in groups.values())
    patterns = sorted({pattern_of(fault.tensor) for fault in faults if not fault.what.startswith(_LACKS)})
    ignore = patterns if 0 < len(patterns) <= 8 else "[patterns]"
    raise MergeflowError(
        f"{len(faults)} mismatch{'es' * (len(faults) > 1)} between the base and the experts:\n{shown}\n"
        f"Every expert must be a fine-tuned copy of this base: check the paths. In a recipe, `ignore: {ignore}` "
        "leaves tensors as the base has them, and `missing: base` takes what an expert lacks from the base."
    )


# Factors by the names that PEFT, kohya, diffusers and LyCORIS give them.
FACTOR = re.compile(
    r"(?:^|[._])(?:lora\d*[._](?:[AaBbE]|embedding_[AB]|up|down|linear_layer)|hada_w\d_[ab]|lokr_w\d(?:_[ab])?|"
    r"vera_lambda_[bd]|b?oft_(?:[RS]|blocks|diag))(?:\.|$)|^lora_\w+\.[ab][12]\.weight$"
)
_FLAT = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?$")  # FSDP's and fairscale's


def _check_weights(owner: str, infos: Mapping[str, TensorInfo], expected: Collection[str]) -> None:
    """Check that a state is of weights: not of an adapter's factors alone, and not of tensors whose data are elsewhere.

    A model may hold factors beside the weights that they change, as Phi-4-multimodal does.
    """
    factors = [tensor for tensor in infos if FACTOR.search(tensor)]
    of_model = any(".base_layer." in tensor for tensor in infos) and all(tensor in expected for tensor in factors)
    if factors and not of_model:
        raise MergeflowError(
            f"{owner} holds factors of an adapter, such as '{factors[0]}', whose products alone could be merged: name "
            "the folder of a PEFT adapter, with its adapter_config.json. Merge an adapter of another library into its "
            "base first."
        )
    if flat := next(filter(_FLAT.search, infos), None):
        raise MergeflowError(
            f"{owner} holds '{flat}', the weights of many modules in one row, as FSDP shards them, where nothing tells "
            "them apart: save a full state dict (FSDP's FULL_STATE_DICT), and name that."
        )
    if empty := [tensor for tensor, info in infos.items() if info.shape == (0,) and tensor.endswith("weight")]:
        raise MergeflowError(
            f"{owner} holds no data of {len(empty)} weights, such as '{empty[0]}', as DeepSpeed's ZeRO-3 leaves them: "
            "make whole weights with its zero_to_fp32.py, and name these."
        )


_LACKS, _UNKNOWN = "lacks {} ", "has {}, unknown to the base"
_OTHER_SHAPE = "has {} of shape "


@dataclass(frozen=True)
class _Mismatch:
    expert: str
    tensor: str
    what: str
    partial: bool = False
    shape: tuple[int, ...] = ()


def pattern_of(name: str) -> str:
    """Return a tensor's name with its numbers replaced, equal for the same tensor of all blocks.

    Example:
        >>> pattern_of("model.layers.11.mlp.experts.3.w1.weight")
        'model.layers.*.mlp.experts.*.w1.weight'
    """
    return re.sub(r"\b\d+\b", "*", name)


def _described(group: list[_Mismatch], expected: Mapping[str, TensorInfo]) -> str:
    """Return one line for the mismatches of one expert and pattern."""
    first = group[0]
    hint = _hint(first, expected)
    if len(group) == 1:
        fault = first.what.format(f"tensor '{first.tensor}'")
        return f"expert '{first.expert}' {fault}{hint}"
    many = f"{len(group)} tensors '{pattern_of(first.tensor)}'"
    return f"expert '{first.expert}' {first.what.format(many)}, the first '{first.tensor}'{hint}"


def _hint(fault: _Mismatch, expected: Mapping[str, TensorInfo]) -> str:
    """Suggest the nearest name for an unknown tensor, once for a pattern: 18,000 experts by 300 names took minutes."""
    if fault.what.startswith(_OTHER_SHAPE):
        rows, columns = fault.shape[:1], fault.shape[1:]
        shape = expected[fault.tensor].shape
        more = (
            len(fault.shape) == 2
            and columns == shape[1:]
            and rows > shape[:1]
            and may_be_tied(fault.tensor, fault.tensor)
        )
        return "; if its rows are of tokens, `tokenizer_source: union` in a recipe keeps all of them" if more else ""
    if fault.what != _UNKNOWN:
        return ""
    if fault.partial and fault.tensor.endswith("lm_head.weight"):
        return "; the base's head is its embedding: give a base that stores the head apart"
    nearest = get_close_matches(fault.tensor, expected, n=1)
    return f"; the base's nearest is '{nearest[0]}'" if nearest else ""


def _mismatches(expert: str, expected: Mapping[str, TensorInfo], state: Mapping[str, Tensor]) -> list[_Mismatch]:
    infos = infos_of(state)
    partial = getattr(state, "is_task_vector", False)
    faults = []
    for name, info in expected.items():
        if name not in infos:
            if not partial:
                faults.append(_Mismatch(expert, name, f"{_LACKS}{list(info.shape)}"))
        elif infos[name].shape != info.shape:
            shapes = f"{list(infos[name].shape)}, base has {list(info.shape)}"
            faults.append(_Mismatch(expert, name, _OTHER_SHAPE + shapes, partial, infos[name].shape))
        elif not partial and infos[name].dtype != info.dtype and not _both_floating(infos[name], info):
            faults.append(_Mismatch(expert, name, f"has {{}} of {infos[name].dtype}, base has {info.dtype}"))
    return faults + [_Mismatch(expert, name, _UNKNOWN, partial) for name in infos if name not in expected]


def _both_floating(info: TensorInfo, other: TensorInfo) -> bool:
    return info.dtype.is_floating_point and other.dtype.is_floating_point


def lacking(config: Mapping[str, Any], base: Collection[str], state: LazyStateDict) -> dict[str, list[str]]:
    """List the tensors that an adapter, under the base's names, lacks although its settings name them, by setting.

    A module that the base lacks is not missed (PEFT lists `score` and `classifier` for every classifier).
    """
    absent, tokens = [name for name in base if name not in state], config.get("trainable_token_indices")
    adapted = {name for name, entry in state.entries.items() if isinstance(entry, LoraEntry | DoraEntry | AddedEntry)}
    biases = [name for name in absent if name.endswith("bias")]
    of_adapted = [name for name in biases if f"{name.removesuffix('bias')}weight" in adapted]
    tables = any(isinstance(state.entries[name], TokensEntry) or may_be_tied(name, name) for name in state.absolute)
    listed = [str(end) for end, ids in tokens.items() if ids] if isinstance(tokens, dict) else []
    rows = ["the embedding"] if tokens and not listed and not tables else []
    lacks = {
        "modules_to_save": _inside(absent, config.get("modules_to_save")),
        "trainable_token_indices": _inside(absent, listed) or rows,
        "lora_bias": of_adapted if config.get("lora_bias") else [],
        "bias": {"all": biases, "lora_only": of_adapted}.get(str(config.get("bias")), []),
        "target_modules": _without_factors(config, absent, adapted),
    }
    return {setting: names for setting, names in lacks.items() if names}


def _inside(names: Iterable[str], modules: object) -> list[str]:
    """Return the tensors of the modules that a setting lists, which PEFT takes for the ends of their names."""
    ends = tuple(str(end) for end in modules) if isinstance(modules, list | tuple) else ()
    holders = {name: accumulate(name.split(".")[:-1], "{}.{}".format) for name in names} if ends else {}
    return [name for name, outer in holders.items() if any(holder.endswith(ends) for holder in outer)]


def _without_factors(config: Mapping[str, Any], absent: Iterable[str], adapted: Collection[str]) -> list[str]:
    """Return the targets without factors where the same weight of another block has them."""
    alike = {pattern_of(name) for name in adapted} if config.get("target_modules") else set()
    return [name for name in absent if pattern_of(name) in alike and is_target(config, name.removesuffix(".weight"))]


def check_copied(tensor: str, info: TensorInfo, expert: str, base: Tensor, values: Tensor) -> None:
    """Check that a piece [n] of integers (codes, maps of tokens) or complex numbers is the base's, as a merge keeps it.

    Single integers are counters, and may differ.
    """
    if (info.dtype.is_complex or info.numel > 1) and not torch.equal(values, base):
        what = "complex numbers" if info.dtype.is_complex else "integers"
        reason = "they" if info.dtype.is_complex else "codes of quantised weights, maps and masks"
        raise MergeflowError(
            f"tensor '{tensor}' {list(info.shape)} holds {what} that differ between the base and '{expert}': "
            f"{reason} cannot be merged, and keeping the base's would lose the expert. Merge the weights they "
            "were made from; in a recipe, what is no weight stays the base's by `ignore`."
        )


# Tables that a class computes of config.json and some files hold, and torch's masks of pruned weights.
_COMPUTED = re.compile(r"(?:^|[._])(?:(?P<small>inv_freq)|(?:cos|sin)_cached?|freqs_(?:cos|sin)|(?:weight|bias)_mask)$")


def check_computed(tensor: str, base: Tensor, experts: Sequence[str], taus: Tensor) -> None:
    """Check that a table [...] that nobody trains, as of rotary positions, differs by rounding alone: taus [T, ...]."""
    match = _COMPUTED.search(tensor)
    if match is None:
        return
    tolerance = base.abs() * 2**-7 + (1e-7 if match["small"] else 2**-7)
    for expert, tau in zip(experts, taus, strict=True):
        if bool((tau.abs() > tolerance).any()):
            raise MergeflowError(
                f"tensor '{tensor}' is a table of settings or a mask, and that of '{expert}' is another than the "
                "base's: their weights mean something else, and a mean of both means nothing. Merge fine-tuned copies "
                "of one base, pruned ones as the weights that they compute; in a recipe, `ignore` keeps the base's."
            )


def check_all_copied(base: Mapping[str, Tensor], expert: str, state: Mapping[str, Tensor]) -> None:
    """Check every tensor of an expert that is copied from the base, as `check_copied` does."""
    for name, info in infos_of(base).items():
        if name in state and not info.dtype.is_floating_point:
            check_copied(name, info, expert, base[name], state[name])


def check_finite(name: str, state: Mapping[str, Tensor]) -> None:
    """Check that no tensor holds NaN or infinity."""
    for tensor_name in state:
        tensor = state[tensor_name]
        if tensor.is_floating_point() and not all(all_finite(part) for part in blocks(tensor)):
            raise not_finite(name, tensor_name)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors [...] of one type hold the same values; torch compares no eight-bit floats."""
    if a.is_floating_point() and a.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    return torch.equal(a, b)


def all_finite(part: Tensor) -> bool:
    """Whether a flat piece [n] is free of NaN and infinity; an empty one is."""
    # A finite sum has finite terms; where it overflows, x·0 is 0 for every finite x and NaN for the others.
    wide = part if part.dtype.itemsize >= 4 else part.float()
    return math.isfinite(float(wide.sum())) or bool(wide.mul(0).sum() == 0)


def not_finite(owner: str, tensor: str) -> MergeflowError:
    """Return the error for NaN or infinity in a tensor."""
    return MergeflowError(
        f"'{owner}' holds NaN or infinity in tensor '{tensor}': a merge would spread it. "
        "Its training diverged or the file is damaged: train it again or use an earlier checkpoint. Infinities that "
        "belong there, such as bounds, must be the same in all models, or `ignore` the tensor."
    )
