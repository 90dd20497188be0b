"""Quantised weights, recognised by config.json or by scales beside codes, and made plain numbers on any machine.

Codes and their scales cannot be merged separately: every way into a merge refuses them. `mergeflow convert` reads the
layouts below with the numbers that stand in the file, so that no library of the format is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Literal

from mergeflow.checkpoints.dtype import FLOAT8_E4M3, FLOAT8_E5M2, INT8
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.packed import Packed, packed_shape, packed_weights, unpacked
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["scaled", "LLM.int8", "4-bit"]
_SCALES = ("_scale_inv", "_scale")
# Endings of names that mean nothing without codes: scales of activations and of the key/value cache, notes of formats.
_NOTES = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".weight_format", ".g_idx", "_g_idx")
_STATE = ".quant_state.bitsandbytes__"


# Types that hold codes and not numbers.
_CODES = (INT8, FLOAT8_E4M3, FLOAT8_E5M2)


@dataclass(frozen=True)
class Quantised:
    """The quantised weights of a checkpoint.

    Attributes:
        weights: Layout of each weight, by its plain name.
        parts: Names of tensors that belong to them: scales, zero points, maps.
        formats: What cannot be read, in words, with a name.
        declared: `quantization_config` of config.json.
    """

    weights: Mapping[str, Layout | Packed]
    parts: frozenset[str]
    formats: tuple[str, ...]
    declared: Mapping[str, Any]

    @property
    def any(self) -> bool:
        """Whether there is anything quantised."""
        return bool(self.weights or self.formats or self.declared)

    def words(self) -> str:
        """Say how it was recognised."""
        method = self.declared.get("quant_method", "some method")
        told = [f"`quantization_config` of config.json ({method})"] if self.declared else []
        told += [f"scales beside {len(self.weights)} weights such as '{min(self.weights)}'"] if self.weights else []
        return " and ".join([*told, *self.formats[:2]])


def quantised(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Quantised:
    """Return what is quantised in a checkpoint, from names, types and config.json."""
    given = config.get("quantization_config")
    declared = given if isinstance(given, dict) else {}
    packed, packed_parts, formats = packed_weights(infos, declared)
    weights: dict[str, Layout | Packed] = {**packed}
    for name, info in infos.items():
        if f"{name.removesuffix('.weight')}.SCB" in infos and info.dtype == INT8 and name.endswith(".weight"):
            weights[name] = "LLM.int8"
        elif f"{name}.absmax" in infos:
            weights[name] = "4-bit"
        elif info.dtype in _CODES and any(name + end in infos for end in _SCALES):
            weights[name] = "scaled"
    parts = {part for name in weights.keys() - packed.keys() for part in infos if _belongs(part, name)} | packed_parts
    if weights:
        parts |= {name for name in infos if name.endswith(_NOTES)}
    return Quantised(weights, frozenset(parts), formats, declared)


def _belongs(part: str, weight: str) -> bool:
    return part in {weight + end for end in (*_SCALES, "_zero_point")} | {f"{weight.removesuffix('.weight')}.SCB"} or (
        part.startswith(f"{weight}.")
    )


def check_not_quantised(states: Mapping[str, tuple[Mapping[str, TensorInfo], Mapping[str, Any], str]]) -> None:
    """Check that no input of a merge is quantised.

    Args:
        states: Of each input by name: its tensors, its config.json, its path ("" in memory).

    Raises:
        MergeflowError: Naming each that is, how that was told, and the way out.
    """
    found = {name: (quantised(infos, config), path) for name, (infos, config, path) in states.items()}
    told = {name: (one, path) for name, (one, path) in found.items() if one.any}
    if not told:
        return
    listed = [f"  - '{name}'{f' ({path})' * bool(path)}: {one.words()}" for name, (one, path) in told.items()]
    readable = all(not one.formats for one, _ in told.values())
    way = (
        "Make plain weights of each first: mergeflow convert IN --out FOLDER --dtype bfloat16"
        if readable
        else "This layout cannot be converted here: merge the original weights, and quantise the result"
    )
    told_all = f"{len(told)} inputs are quantised; codes and scales cannot be merged separately:"
    raise MergeflowError("\n".join([told_all, *listed, f"{way}."]))


def dequantised_info(state: LazyStateDict, name: str, layout: Layout | Packed) -> tuple[int, ...]:
    """Return the shape of a quantised weight's numbers.

    Args:
        state: The checkpoint; of 4-bit weights the note beside the codes is read.
        name: The weight.
        layout: How it is quantised.
    """
    if isinstance(layout, Packed):
        return packed_shape(state, layout)
    return tuple(_four_bit_note(state, name)["shape"]) if layout == "4-bit" else state.infos[name].shape


def dequantise(state: LazyStateDict, name: str, layout: Layout | Packed, declared: Mapping[str, Any]) -> Tensor:
    """Return a quantised weight's numbers.

    scaled: (q − zero point) · scale of its row, group, block or tensor;  LLM.int8: q · SCB/127 of its row;
    4-bit: map[q] · absmax of its block, where nested absmax = map₂[q₂] · absmax₂ + offset;  packed ones: as `unpacked`

    Args:
        state: The checkpoint, with the codes and what stands beside them.
        name: The weight.
        layout: How it is quantised.
        declared: `quantization_config` of config.json, which gives the size of blocks; {} where there is none.

    Returns:
        float32 [out, in] for a matrix; whatever shape `dequantised_info` gives.

    Raises:
        MergeflowError: Scales that do not fit the weight, or a note that is missing.
    """
    if isinstance(layout, Packed):
        return unpacked(state, name, layout, declared)
    if layout == "4-bit":
        return _four_bit(state, name)
    codes = state[name].float()
    if layout == "LLM.int8":
        return codes * (state[f"{name.removesuffix('.weight')}.SCB"].float() / 127).reshape(-1, 1)
    scale = next(state[name + end] for end in _SCALES if name + end in state)
    block = _block_size(declared)
    if f"{name}_zero_point" in state:
        codes = codes - _spread(state[f"{name}_zero_point"], codes.shape, block, name)
    return codes * _spread(scale, codes.shape, block, name)


def _spread(scale: Tensor, shape: torch.Size, block: Sequence[int] | None, name: str) -> Tensor:
    """Return a scale per element, from one per tensor, row, group of columns, or block of both."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape([1] * len(shape))
    if scale.shape == shape[:-1]:
        scale = scale.unsqueeze(-1)
    if scale.ndim != len(shape):
        raise _unfit(name, shape, scale)
    # Blocks of rows may end in a shorter one (192 rows in 2 are 96 or 128 each), so config.json must tell their size.
    blocked = scale.shape[-2] not in (1, shape[-2])
    for axis in (len(shape) - 2, len(shape) - 1):
        length, count = shape[axis], scale.shape[axis]
        if count in (1, length):
            continue
        each = length // count if not blocked else block[axis - len(shape)] if block else 0
        if not each or ceil(length / each) != count or (not blocked and length % count):
            raise _unfit(name, shape, scale)
        scale = scale.repeat_interleave(each, axis).narrow(axis, 0, length)
    if any(count not in (1, length) for length, count in zip(shape, scale.shape, strict=True)):
        raise _unfit(name, shape, scale)
    return scale


def _block_size(declared: Mapping[str, Any]) -> Sequence[int] | None:
    """Return rows and columns of a block of scales: `weight_block_size`, or the groups' `block_structure`."""
    groups = declared.get("config_groups")
    inner = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    found = [declared.get("weight_block_size"), *(weights.get("block_structure") for weights in inner)]
    return next((size for size in found if isinstance(size, list) and len(size) == 2 and min(size) > 0), None)


def _unfit(name: str, shape: torch.Size, scale: Tensor) -> MergeflowError:
    return MergeflowError(
        f"the scales of '{name}' {list(shape)} have shape {list(scale.shape)}, which fits neither tensor, rows, groups "
        "of columns nor the blocks that `weight_block_size` of config.json names: is the model's config.json there?"
    )


def _four_bit_note(state: LazyStateDict, name: str) -> dict[str, Any]:
    note = next((part for part in state if part.startswith(f"{name}{_STATE}")), None)
    if note is None:
        raise MergeflowError(
            f"4-bit weight '{name}' has no '{name}{_STATE}nf4' (or fp4) beside it: save the model again."
        )
    found: dict[str, Any] = json.loads(bytes(state[note].tolist()))
    return found


def _four_bit(state: LazyStateDict, name: str) -> Tensor:
    note, packed = _four_bit_note(state, name), state[name].reshape(-1)
    largest = state[f"{name}.absmax"]
    if f"{name}.nested_absmax" in state:
        blocks = state[f"{name}.nested_absmax"].float().repeat_interleave(int(note["nested_blocksize"]))
        largest = state[f"{name}.nested_quant_map"].float()[largest.long()] * blocks[: largest.numel()]
        largest += float(note["nested_offset"])
    codes = torch.stack((packed >> 4, packed & 15), 1).reshape(-1).long()
    count = prod(note["shape"])
    each = largest.float().repeat_interleave(int(note["blocksize"]))[:count]
    return (state[f"{name}.quant_map"].float()[codes[:count]] * each).reshape(note["shape"])
