"""Weights of several codes in one integer: GPTQ, AWQ, compressed-tensors' packed integers and MXFP4, made numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mergeflow.checkpoints.dtype import DType
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["GPTQ", "AWQ", "packed", "MXFP4"]
Infos = Mapping[str, TensorInfo]
State = Mapping[str, "Tensor"]

# Names of a weight's parts: what the first is called tells the layout, those in brackets may be missing.
_ENDS: dict[str, tuple[str, ...]] = {
    ".qweight": (".qweight", ".qzeros", ".scales", ".g_idx"),
    ".weight_packed": (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    "_blocks": ("_blocks", "_scales"),
}
# Where AWQ keeps the eight codes of an integer, from the lowest four bits on.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# The sixteen numbers of four bits with two for the exponent and one for the mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Packed:
    """One packed weight.

    Attributes:
        layout: Its layout.
        stem: What the names of its parts begin with.
        bits: Of a code; 0 where they are told later.
        shape: Of the weight, where names and shapes tell it.
    """

    layout: Layout
    stem: str
    bits: int
    shape: tuple[int, ...] | None


def packed_weights(
    infos: Infos, declared: Mapping[str, Any]
) -> tuple[dict[str, Packed], frozenset[str], tuple[str, ...]]:
    """Return the packed weights of a checkpoint by their plain names, the names of their parts, and what is unknown.

    Args:
        infos: Shapes and types of the tensors.
        declared: `quantization_config` of config.json.
    """
    found: dict[str, Packed] = {}
    strange: list[str] = []
    for name, info in infos.items():
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None or info.dtype.is_floating_point or (end == "_blocks" and f"{name[:-7]}_scales" not in infos):
            continue
        stem = name.removesuffix(end)
        one = (_integers if end == ".qweight" else _compressed if end == ".weight_packed" else _mxfp4)(
            stem, infos, declared
        )
        if one is None:
            strange.append(f"{_WORDS[end]} ('{name}')")
        else:
            found[stem if end == "_blocks" else f"{stem}.weight"] = one
    parts = {one.stem + end for one in found.values() for ends in _ENDS.values() for end in ends} & infos.keys()
    return found, frozenset(parts), tuple(strange)


_WORDS = {
    ".qweight": "a GPTQ or AWQ layout that is not known here",
    ".weight_packed": "packed codes that are not integers",
    "_blocks": "blocks that are not MXFP4 of stacked experts",
}


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
    known = packed is not None and packed.dtype == _INT32 and len(packed.shape) == 2
    return Packed("packed", stem, 0, None) if known and scale is not None and shape is not None else None


_INT32 = DType("int32", 4)


def _mxfp4(stem: str, infos: Infos, declared: Mapping[str, Any]) -> Packed | None:
    blocks, scales = infos[f"{stem}_blocks"].shape, infos[f"{stem}_scales"].shape
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != 16:
        return None
    experts, outputs, count, _ = blocks
    return Packed("MXFP4", stem, 4, (experts, count * 32, outputs))


def packed_shape(state: State, one: Packed) -> tuple[int, ...]:
    """Return the shape of a packed weight's numbers."""
    if one.shape is not None:
        return one.shape
    return tuple(int(size) for size in state[f"{one.stem}.weight_shape"].reshape(-1).tolist())


def unpacked(state: State, name: str, one: Packed, declared: Mapping[str, Any]) -> Tensor:
    """Return a packed weight's numbers, float32.

    GPTQ: s_g (q − z_g − 1), or − z_g in its second format, g the group of an input;  AWQ: s_g (q − z_g);
    packed: s_g (q − 2^(b−1) − z_g);  MXFP4: number of the code · 2^(e − 127) of its block of 32

    Args:
        state: The checkpoint.
        name: The weight, for messages.
        one: What is known of it.
        declared: `quantization_config` of config.json.

    Returns:
        [out, in]; [experts, in, out] for stacked experts in MXFP4.

    Raises:
        MergeflowError: Parts whose shapes do not fit each other.
    """
    made = {"GPTQ": _gptq, "AWQ": _awq, "packed": _from_compressed, "MXFP4": _from_mxfp4}[one.layout]
    try:
        return made(state, one, declared).contiguous()
    except (RuntimeError, IndexError) as error:  # torch's own words on shapes
        raise MergeflowError(
            f"the parts of the {one.layout} weight '{name}' do not fit each other ({str(error).splitlines()[0]:.120}): "
            "is the model's config.json there, and the file whole?"
        ) from None


def _codes(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Return the codes of integers, the lowest bits first, side by side along an axis."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed.unsqueeze(axis + 1) >> shifts.reshape(-1, *[1] * (packed.ndim - axis - 1))) & (2**bits - 1)
    return codes.flatten(axis, axis + 1)


def _gptq(state: State, one: Packed, declared: Mapping[str, Any]) -> Tensor:
    codes = _codes(state[f"{one.stem}.qweight"], one.bits, 0)
    later = 0 if str(declared.get("checkpoint_format")) == "gptq_v2" else 1
    zeros = _codes(state[f"{one.stem}.qzeros"], one.bits, 1) + later
    scales = state[f"{one.stem}.scales"].float()
    group = state[f"{one.stem}.g_idx"].long() if f"{one.stem}.g_idx" in state else _groups(codes, scales, declared)
    return (scales[group] * (codes - zeros[group])).T


def _awq(state: State, one: Packed, declared: Mapping[str, Any]) -> Tensor:
    order = torch.tensor(_AWQ_ORDER)
    codes, zeros = (
        _codes(state[one.stem + part], 4, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1)
        for part in (".qweight", ".qzeros")
    )
    scales = state[f"{one.stem}.scales"].float()
    group = _groups(codes, scales, declared)
    return (scales[group] * (codes - zeros[group])).T


def _groups(codes: Tensor, scales: Tensor, declared: Mapping[str, Any]) -> Tensor:
    """Return the group of each input; groups are equally long, the last may be shorter where config.json says so."""
    size = declared.get("group_size")
    size = size if isinstance(size, int) and size > 0 else -(-len(codes) // len(scales))
    return torch.arange(len(codes)) // size


def _from_compressed(state: State, one: Packed, declared: Mapping[str, Any]) -> Tensor:
    rows, columns = packed_shape(state, one)
    stem, packed = one.stem, state[f"{one.stem}.weight_packed"]
    bits = next((bits for bits in (4, 8) if -(-columns * bits // 32) == packed.shape[1]), 0)
    if not bits:
        raise RuntimeError(f"{packed.shape[1]} integers hold {columns} codes of neither 4 nor 8 bits")
    middle = 2 ** (bits - 1)
    codes = _codes(packed, bits, 1)[:, :columns] - middle
    scales = state[f"{stem}.weight_scale"].float().reshape(rows, -1)
    own = state.get(f"{stem}.weight_g_idx")
    group = (
        own.long() if own is not None and bool((own >= 0).all()) else torch.arange(columns) * scales.shape[1] // columns
    )
    if f"{stem}.weight_zero_point" in state:
        zeros = state[f"{stem}.weight_zero_point"]
        zeros = _codes(zeros, bits, 0)[:rows] - middle if zeros.dtype == torch.int32 else zeros.int()
        codes = codes - zeros.reshape(rows, -1)[:, group]
    return codes * scales[:, group]


def _from_mxfp4(state: State, one: Packed, declared: Mapping[str, Any]) -> Tensor:
    blocks, scales = state[f"{one.stem}_blocks"].int(), state[f"{one.stem}_scales"].int() - 127
    numbers = torch.tensor(_FP4)[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)]
    return torch.ldexp(numbers, scales.unsqueeze(-1)).flatten(2).mT
