"""Recognise quantised weights by config.json or by scales next to codes, and dequantise them on any machine.

Codes and their scales cannot be merged separately: every way into a merge refuses them. `mergeflow convert` reads the
layouts below (GPTQ, AWQ, packed integers and MXFP4 among them) with the numbers in the file alone, so that no library
of the format is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Literal

from mergeflow.checkpoints.header import DTYPES, TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

PackedLayout = Literal["GPTQ", "AWQ", "packed", "MXFP4"]
Infos = Mapping[str, TensorInfo]
State = Mapping[str, "Tensor"]

# Where AWQ keeps the eight codes of an integer, from the lowest four bits on.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# The sixteen numbers of four bits with two for the exponent and one for the mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Packed:
    """One packed weight."""

    layout: PackedLayout
    stem: str  # what the names of its parts begin with
    bits: int  # of a code; 0 where they are told later
    shape: tuple[int, ...] | None  # of the weight, where names and shapes tell it


def _integers(stem: str, infos: Infos, declared: Mapping[str, Any]) -> Packed | None:
    """Tell GPTQ (codes along the inputs) from AWQ (along the outputs) by shapes; other packings fit neither."""
    rows = [infos[stem + end].shape for end in (".qweight", ".qzeros", ".scales") if stem + end in infos]
    if len(rows) != 3 or any(len(shape) != 2 for shape in rows):
        return None
    (tall, wide), zeros, (groups, outputs) = rows
    bits = 32 * zeros[1] // outputs if outputs else 0
    if bits not in (2, 4, 8) or bits * outputs != 32 * zeros[1] or zeros[0] != groups or not groups:
        return None
    if wide == outputs:
        return Packed("GPTQ", stem, bits, (outputs, tall * 32 // bits))
    if bits == 4 and wide * 8 == outputs and str(declared.get("version", "gemm")).lower() == "gemm":
        return Packed("AWQ", stem, bits, (outputs, tall))
    return None


def _compressed(stem: str, infos: Infos, declared: Mapping[str, Any]) -> Packed | None:
    """Tell compressed-tensors' integers; how many bits they have, `weight_shape` tells when it is read."""
    packed, scale, shape = (infos.get(f"{stem}.weight_{part}") for part in ("packed", "scale", "shape"))
    is_packed = packed is not None and packed.dtype == DTYPES["I32"] and len(packed.shape) == 2
    return Packed("packed", stem, 0, None) if is_packed and scale is not None and shape is not None else None


def _mxfp4(stem: str, infos: Infos, declared: Mapping[str, Any]) -> Packed | None:
    blocks, scales = infos[f"{stem}_blocks"].shape, infos[f"{stem}_scales"].shape
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != 16:
        return None
    experts, outputs, count, _ = blocks
    return Packed("MXFP4", stem, 4, (experts, count * 32, outputs))


# By the end of a first part's name: what tells the layout, the ends of all parts (some may lack), other layouts' name.
_FORMS: dict[str, tuple[Callable[[str, Infos, Mapping[str, Any]], Packed | None], tuple[str, ...], str]] = {
    ".qweight": (
        _integers, (".qweight", ".qzeros", ".scales", ".g_idx"), "a GPTQ or AWQ layout that is not known here",
    ),
    ".weight_packed": (
        _compressed,
        (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        "packed codes that are not integers",
    ),
    "_blocks": (_mxfp4, ("_blocks", "_scales"), "blocks that are not MXFP4 of stacked experts"),
}  # fmt: skip


def packed_weights(
    infos: Infos, declared: Mapping[str, Any]
) -> tuple[dict[str, Packed], frozenset[str], tuple[str, ...]]:
    """Return the packed weights of a checkpoint by their plain names, the names of their parts, and what is unknown."""
    weights: dict[str, Packed] = {}
    strange: list[str] = []
    for name, info in infos.items():
        end = next((end for end in _FORMS if name.endswith(end)), None)
        if end is None or info.dtype.is_floating_point or (end == "_blocks" and f"{name[:-7]}_scales" not in infos):
            continue
        stem, (tell, _, unknown) = name.removesuffix(end), _FORMS[end]
        part = tell(stem, infos, declared)
        if part is None:
            strange.append(f"{unknown} ('{name}')")
        else:
            weights[stem if end == "_blocks" else f"{stem}.weight"] = part
    ends = [end for _, ends, _ in _FORMS.values() for end in ends]
    parts = {weight.stem + end for weight in weights.values() for end in ends} & infos.keys()
    return weights, frozenset(parts), tuple(strange)


def packed_shape(state: State, part: Packed) -> tuple[int, ...]:
    """Return the shape of a packed weight's numbers."""
    if part.shape is not None:
        return part.shape
    return tuple(int(size) for size in state[f"{part.stem}.weight_shape"].reshape(-1).tolist())


def unpacked(state: State, name: str, part: Packed, declared: Mapping[str, Any]) -> Tensor:
    """Return a packed weight's numbers, float32 [out, in], or [experts, in, out] of stacked experts in MXFP4.

    GPTQ: s_g (q − z_g − 1), or − z_g in its second format, g the group of an input;  AWQ: s_g (q − z_g);
    packed: s_g (q − 2^(b−1) − z_g);  MXFP4: number of the code · 2^(e − 127) of its block of 32
    """
    made = {"GPTQ": _gptq, "AWQ": _awq, "packed": _from_compressed, "MXFP4": _from_mxfp4}[part.layout]
    try:
        return made(state, part, declared).contiguous()
    except (RuntimeError, IndexError) as error:  # torch's own words on shapes
        raise MergeflowError(
            f"the parts of the {part.layout} weight '{name}' do not fit each other "
            f"({str(error).splitlines()[0]:.120}): is the model's config.json there, and the file whole?"
        ) from None


def _codes(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Return the codes of integers, the lowest bits first, side by side along an axis."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed.unsqueeze(axis + 1) >> shifts.reshape(-1, *[1] * (packed.ndim - axis - 1))) & (2**bits - 1)
    return codes.flatten(axis, axis + 1)


def _gptq(state: State, part: Packed, declared: Mapping[str, Any]) -> Tensor:
    codes = _codes(state[f"{part.stem}.qweight"], part.bits, 0)
    later = 0 if str(declared.get("checkpoint_format")) == "gptq_v2" else 1
    zeros = _codes(state[f"{part.stem}.qzeros"], part.bits, 1) + later
    scales = state[f"{part.stem}.scales"].float()
    group = state[f"{part.stem}.g_idx"].long() if f"{part.stem}.g_idx" in state else _groups(codes, scales, declared)
    return (scales[group] * (codes - zeros[group])).T


def _awq(state: State, packed: Packed, declared: Mapping[str, Any]) -> Tensor:
    order = torch.tensor(_AWQ_ORDER)
    codes, zeros = (
        _codes(state[packed.stem + part], 4, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1)
        for part in (".qweight", ".qzeros")
    )
    scales = state[f"{packed.stem}.scales"].float()
    group = _groups(codes, scales, declared)
    return (scales[group] * (codes - zeros[group])).T


def _groups(codes: Tensor, scales: Tensor, declared: Mapping[str, Any]) -> Tensor:
    """Return the group of each input; groups are equally long, the last may be shorter where config.json says so."""
    size = declared.get("group_size")
    size = size if isinstance(size, int) and size > 0 else -(-len(codes) // len(scales))
    return torch.arange(len(codes)) // size


def _from_compressed(state: State, weight: Packed, declared: Mapping[str, Any]) -> Tensor:
    rows, columns = packed_shape(state, weight)
    stem, packed = weight.stem, state[f"{weight.stem}.weight_packed"]
    bits = next((bits for bits in (4, 8) if -(-columns * bits // 32) == packed.shape[1]), 0)
    if not bits:
        raise RuntimeError(f"{packed.shape[1]} integers hold {columns} codes of neither 4 nor 8 bits")
    middle = 2 ** (bits - 1)
    codes = _codes(packed, bits, 1)[:, :columns] - middle
    scales = state[f"{stem}.weight_scale"].float().reshape(rows, -1)
    group_index = state.get(f"{stem}.weight_g_idx")
    group = (
        group_index.long()
        if group_index is not None and bool((group_index >= 0).all())
        else torch.arange(columns) * scales.shape[1] // columns
    )
    if f"{stem}.weight_zero_point" in state:
        zeros = state[f"{stem}.weight_zero_point"]
        zeros = _codes(zeros, bits, 0)[:rows] - middle if zeros.dtype == torch.int32 else zeros.int()
        codes = codes - zeros.reshape(rows, -1)[:, group]
    return codes * scales[:, group]


def _from_mxfp4(state: State, part: Packed, declared: Mapping[str, Any]) -> Tensor:
    blocks, scales = state[f"{part.stem}_blocks"].int(), state[f"{part.stem}_scales"].int() - 127
    numbers = torch.tensor(_FP4)[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)]
    return torch.ldexp(numbers, scales.unsqueeze(-1)).flatten(2).mT


Layout = Literal["scaled", "LLM.int8", "4-bit"]
# How a weight's scale is called after the weight, and after its module: ComfyUI, Mistral, DeepSeek.
_SCALES, _OF_MODULE = ("_scale_inv", "_scale"), (".scale_weight", ".qscale_weight", ".scale")
_LIKE_A_SCALE = re.compile(r"(.+)\.[^.]*(?:scale|amax)[^.]*")
# Endings of names that mean nothing without codes: scales of activations and of the key/value cache, notes of formats.
_NOTES = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".weight_format", ".g_idx", "_g_idx",
          ".scale_input", ".qscale_act", "scaled_fp8", ".comfy_quant")  # fmt: skip
_STATE = ".quant_state.bitsandbytes__"


# Types that hold codes and not numbers; FNUZ are AMD's.
_CODES = tuple(DTYPES[code] for code in ("I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))


@dataclass(frozen=True)
class Quantised:
    """The quantised weights of a checkpoint."""

    weights: Mapping[str, Layout | Packed]
    parts: frozenset[str]  # names of tensors that belong to them: scales, zero points, maps
    formats: tuple[str, ...]  # what cannot be read, in words, with a name
    declared: Mapping[str, Any]  # `quantization_config` of config.json

    @property
    def any(self) -> bool:
        """Whether there is anything quantised."""
        return bool(self.weights or self.formats or self.declared)

    def words(self) -> str:
        """Say how it was recognised."""
        method = self.declared.get("quant_method", "some method")
        reasons = [f"`quantization_config` of config.json ({method})"] if self.declared else []
        reasons += [f"scales of {len(self.weights)} weights such as '{min(self.weights)}'"] if self.weights else []
        return " and ".join([*reasons, *self.formats[:2]])


def quantised(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Quantised:
    """Find the quantised parts of a checkpoint, from names, types and config.json."""
    given = config.get("quantization_config")
    declared = given if isinstance(given, dict) else {}
    packed, packed_parts, formats = packed_weights(infos, declared)
    weights: dict[str, Layout | Packed] = {**packed}
    for name, info in infos.items():
        if f"{name.removesuffix('.weight')}.SCB" in infos and info.dtype == DTYPES["I8"] and name.endswith(".weight"):
            weights[name] = "LLM.int8"
        elif f"{name}.absmax" in infos:
            weights[name] = "4-bit"
        elif info.dtype in _CODES and _scale_of(name, infos) is not None:
            weights[name] = "scaled"
    codes = [name for name, info in infos.items() if info.dtype in _CODES and name not in weights
             and name.endswith((".weight", "._data"))]  # fmt: skip
    scales = [name for name, info in infos.items() if info.dtype not in _CODES] if codes else []
    scaled = {match[1] for name in scales if (match := _LIKE_A_SCALE.fullmatch(name))}
    strange = [name for name in codes if name.rpartition(".")[0] in scaled]
    formats += (f"codes with scales of an unknown kind ('{strange[0]}')",) if strange else ()
    plain = weights.keys() - packed.keys()
    parts = {name + end for name in plain for end in (*_SCALES, "_zero_point")} & infos.keys() | packed_parts
    parts |= {name.removesuffix(".weight") + end for name in plain for end in (".SCB", *_OF_MODULE)} & infos.keys()
    parts |= {part for part in infos if plain and any(part[: dot.start()] in plain for dot in re.finditer(r"\.", part))}
    if weights:
        parts |= {name for name in infos if name.endswith(_NOTES)}
    return Quantised(weights, frozenset(parts), formats, declared)


def _scale_of(weight: str, infos: Infos) -> str | None:
    """Return the name of a weight's scale; one that is named after the module is of another type than the codes."""
    module = weight.removesuffix(".weight")
    of_module = [module + end for end in _OF_MODULE if module != weight]
    of_module = [place for place in of_module if place in infos and infos[place].dtype != infos[weight].dtype]
    return next((place for place in (*(weight + end for end in _SCALES), *of_module) if place in infos), None)


def check_not_quantised(states: Mapping[str, tuple[Mapping[str, TensorInfo], Mapping[str, Any], str]]) -> None:
    """Check that no input of a merge is quantised, given its tensors, config.json and path ("" in memory) by name."""
    checked = {name: (quantised(infos, config), path) for name, (infos, config, path) in states.items()}
    coded = {name: (weights, path) for name, (weights, path) in checked.items() if weights.any}
    if not coded:
        return
    listed = [f"  - '{name}'{f' ({path})' * bool(path)}: {weights.words()}" for name, (weights, path) in coded.items()]
    readable = all(not weights.formats for weights, _ in coded.values())
    way = (
        "Make plain weights of each first: mergeflow convert IN --out FOLDER --dtype bfloat16"
        if readable
        else "This layout cannot be converted here: merge the original weights, and quantise the result"
    )
    told_all = f"{len(coded)} inputs are quantised; codes and scales cannot be merged separately:"
    raise MergeflowError("\n".join([told_all, *listed, f"{way}."]))


def dequantised_info(state: LazyStateDict, name: str, layout: Layout | Packed) -> tuple[int, ...]:
    """Return the shape of a quantised weight's numbers; for 4-bit weights the note next to the codes is read."""
    if isinstance(layout, Packed):
        return packed_shape(state, layout)
    return tuple(_four_bit_note(state, name)["shape"]) if layout == "4-bit" else state.infos[name].shape


def dequantise(state: LazyStateDict, name: str, layout: Layout | Packed, declared: Mapping[str, Any]) -> Tensor:
    """Return a quantised weight's numbers, float32, of the shape that `dequantised_info` gives ([out, in] of a matrix).

    scaled: (q − zero point) · scale of its row, group, block or tensor;  LLM.int8: q · SCB/127 of its row;
    4-bit: map[q] · absmax of its block, where nested absmax = map₂[q₂] · absmax₂ + offset;  packed ones: as `unpacked`
    """
    if isinstance(layout, Packed):
        return unpacked(state, name, layout, declared)
    if layout == "4-bit":
        return _four_bit(state, name)
    codes = state[name].float()
    if layout == "LLM.int8":
        return codes * (state[f"{name.removesuffix('.weight')}.SCB"].float() / 127).reshape(-1, 1)
    scale = state[str(_scale_of(name, state.infos))]
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
    sizes = [declared.get("weight_block_size"), *(weights.get("block_structure") for weights in inner)]
    return next((size for size in sizes if isinstance(size, list) and len(size) == 2 and min(size) > 0), None)


def _unfit(name: str, shape: torch.Size, scale: Tensor) -> MergeflowError:
    return MergeflowError(
        f"the scales of '{name}' {list(shape)} have shape {list(scale.shape)}, which fits neither tensor, rows, groups "
        "of columns nor the blocks that `weight_block_size` of config.json names: is the model's config.json there?"
    )


def _four_bit_note(state: LazyStateDict, name: str) -> dict[str, Any]:
    note = next((part for part in state if part.startswith(f"{name}{_STATE}")), None)
    if note is None:
        raise MergeflowError(
            f"4-bit weight '{name}' has no '{name}{_STATE}nf4' (or fp4) next to it: save the model again."
        )
    quant_state: dict[str, Any] = json.loads(bytes(state[note].tolist()))
    return quant_state


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
