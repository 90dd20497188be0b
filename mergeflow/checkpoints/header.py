"""Read and write the safetensors header and its element types, without torch.

Every number of a header is checked against the file's size before anything is allocated, so that a truncated or
hostile file is refused with a message instead of crashing the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from mergeflow.checkpoints.sniff_format import mistaken
from mergeflow.errors import MergeflowError
from mergeflow.late import torch as late_torch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class DType:
    """A type of elements; its text is that of torch's type, which fingerprints count."""

    name: str
    itemsize: int
    is_floating_point: bool = False
    is_complex: bool = False

    def __str__(self) -> str:
        return f"torch.{self.name}"

    @property
    def torch(self) -> torch.dtype:
        """The same type, of torch."""
        dtype: torch.dtype = getattr(late_torch, self.name)
        return dtype


@cache
def dtype_of(dtype: torch.dtype) -> DType:
    """Return the `DType` of a torch type."""
    return DType(str(dtype).removeprefix("torch."), dtype.itemsize, dtype.is_floating_point, dtype.is_complex)


# The type of every code of the safetensors format that we read.
DTYPES = {
    "F64": DType("float64", 8, is_floating_point=True),
    "F32": DType("float32", 4, is_floating_point=True),
    "F16": DType("float16", 2, is_floating_point=True),
    "BF16": DType("bfloat16", 2, is_floating_point=True),
    "F8_E4M3": DType("float8_e4m3fn", 1, is_floating_point=True),
    "F8_E5M2": DType("float8_e5m2", 1, is_floating_point=True),
    "F8_E4M3FNUZ": DType("float8_e4m3fnuz", 1, is_floating_point=True),
    "F8_E5M2FNUZ": DType("float8_e5m2fnuz", 1, is_floating_point=True),
    "F8_E8M0": DType("float8_e8m0fnu", 1, is_floating_point=True),
    "I64": DType("int64", 8),
    "I32": DType("int32", 4),
    "I16": DType("int16", 2),
    "I8": DType("int8", 1),
    "U64": DType("uint64", 8),
    "U32": DType("uint32", 4),
    "U16": DType("uint16", 2),
    "U8": DType("uint8", 1),
    "BOOL": DType("bool", 1),
    "C64": DType("complex64", 8, is_complex=True),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = (DTYPES[code] for code in ("F64", "F32", "F16", "BF16"))

# The types that weights are written in, by name.
FLOATS = {dtype.name: dtype for dtype in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}


# The reference implementation's limit: a larger header is an attack or a mistake.
MAX_HEADER_BYTES = 100_000_000
# More than the largest published mixtures have in all their shards; 1.5 million empty tensors would take minutes.
MAX_TENSORS = 250_000
_MAX_RANK = 64


@dataclass(frozen=True)
class TensorInfo:
    """Shape and storage type of one tensor, known without reading its data."""

    shape: tuple[int, ...]
    dtype: DType

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return shape and type of a tensor [...] in memory."""
        return cls(tuple(tensor.shape), dtype_of(tensor.dtype))

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar, 0 for an empty tensor)."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored data."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """A validated header: per tensor its info and the offset of its first byte in the file."""

    infos: dict[str, TensorInfo]
    offsets: dict[str, int]
    metadata: dict[str, str]


def read_header(file: BinaryIO, path: str) -> Header:
    """Read and validate the header of an open safetensors file, positioned anywhere."""
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise _bad(path, f"has {size} bytes, shorter than the 8 bytes of a header length")
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        if other := mistaken(prefix + file.read(248), "safetensors"):
            raise MergeflowError(f"'{path}' {other}.")
        raise _bad(path, f"announces a header of {length} bytes, but the file has {size} bytes")
    raw = file.read(length)
    if raw.count(b'"data_offsets"') > MAX_TENSORS:
        raise MergeflowError(f"'{path}' describes more than {MAX_TENSORS} tensors, which no model has in one file.")
    return _validate(_parse(raw, path), 8 + length, size, path)


def _bad(path: str, fault: str) -> MergeflowError:
    return MergeflowError(
        f"'{path}' is not a valid safetensors file: it {fault}. "
        "It may be truncated or damaged: copy or download it again, or write it anew from its source."
    )


def _parse(raw: bytes, path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise _bad(path, f"names {', '.join(map(repr, twice[:3]))} twice in its header")
        return values

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except MergeflowError:
        raise
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"has a header that is not JSON ({type(error).__name__})") from None
    if not isinstance(parsed, dict):
        raise _bad(path, f"has a header that is a {type(parsed).__name__}, not an object")
    return parsed


def _validate(parsed: dict[str, Any], start: int, size: int, path: str) -> Header:
    given = parsed.pop("__metadata__", None)
    metadata = {} if given is None else given
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(path, "has a __metadata__ that is not a mapping of text to text")
    infos: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in parsed.items():
        if not name.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in name):
            raise _bad(path, f"has a name that is no text, {name!a:.60}")
        infos[name], begin, end = _entry(name, entry, size - start, path)
        spans.append((begin, end, name))
    spans.sort()
    reached = 0
    for begin, end, name in spans:
        if begin != reached:
            fault = "overlaps the one before it" if begin < reached else "leaves a hole before it"
            raise _bad(path, f"has a tensor '{name}' at bytes {begin}..{end} that {fault}, which ends at {reached}")
        reached = end
    if reached != size - start:
        raise _bad(path, f"describes {reached} bytes of data, but holds {size - start}")
    return Header(infos, {name: start + begin for begin, _, name in spans}, metadata)


def _entry(name: str, entry: Any, available: int, path: str) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise _bad(path, f"describes tensor '{name}' without dtype, shape or data_offsets")
    if not isinstance(entry["dtype"], str):
        raise _bad(path, f"gives tensor '{name}' a dtype that is not a name ({entry['dtype']!r:.40})")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise MergeflowError(
            f"'{path}' holds tensor '{name}' in the type {entry['dtype']!r:.40}, which cannot be read (types that can: "
            f"{', '.join(DTYPES)}). Merge the weights that it was quantised from, or save them in one of these types."
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or len(shape) > _MAX_RANK:
        raise _bad(path, f"gives tensor '{name}' a shape that is not a list of sizes ({shape!r:.60})")
    if not _naturals(offsets) or len(offsets) != 2:
        raise _bad(path, f"gives tensor '{name}' data_offsets that are not two positions ({offsets!r:.60})")
    begin, end = offsets
    if begin > end or end > available:
        raise _bad(path, f"places tensor '{name}' at bytes {begin}..{end}, but holds {available} bytes of data")
    if max(shape, default=0) > 2**62:
        raise _bad(path, f"gives tensor '{name}' a dimension of {max(shape)}")
    info = TensorInfo(tuple(shape), dtype)
    if info.nbytes != end - begin:
        raise _bad(path, f"gives tensor '{name}' {end - begin} bytes, but its shape {list(shape)} needs {info.nbytes}")
    return info, begin, end


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def build_header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before a file's data, and for each tensor the offset of its first byte in the file.

    Wide types come first, then names in order, so that every tensor is aligned to its own type.
    """
    for name, info in infos.items():
        if info.dtype not in CODES:
            raise MergeflowError(
                f"tensor '{name}' has type {info.dtype}, which safetensors cannot hold: convert it first."
            )
    order = sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name))
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position, begins = 0, {}
    for name in order:
        info = infos[name]
        table[name] = {
            "dtype": CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, position + info.nbytes],
        }
        begins[name] = position
        position += info.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}
