"""The types of tensors' elements, known without torch: a header names them, and whoever reads data asks for torch's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mergeflow.late import torch as late_torch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """A type of elements; its text is that of torch's type, which fingerprints count.

    Attributes:
        name: What torch calls it.
        itemsize: Bytes of an element.
        is_floating_point: Whether elements are real numbers.
        is_complex: Whether they are complex.

    Example:
        >>> print(DTYPES["BF16"], DTYPES["BF16"].itemsize)
        torch.bfloat16 2
    """

    name: str
    itemsize: int
    is_floating_point: bool = False
    is_complex: bool = False

    def __str__(self) -> str:
        return f"torch.{self.name}"

    @property
    def torch(self) -> torch.dtype:
        """The same type, of torch."""
        found: torch.dtype = getattr(late_torch, self.name)
        return found


@cache
def dtype_of(dtype: torch.dtype) -> DType:
    """Return what is known of a type of torch.

    Example:
        >>> import torch
        >>> dtype_of(torch.float32) == FLOAT32
        True
    """
    return DType(str(dtype).removeprefix("torch."), dtype.itemsize, dtype.is_floating_point, dtype.is_complex)


FLOAT64 = DType("float64", 8, is_floating_point=True)
FLOAT32 = DType("float32", 4, is_floating_point=True)
FLOAT16 = DType("float16", 2, is_floating_point=True)
BFLOAT16 = DType("bfloat16", 2, is_floating_point=True)
FLOAT8_E4M3 = DType("float8_e4m3fn", 1, is_floating_point=True)
FLOAT8_E5M2 = DType("float8_e5m2", 1, is_floating_point=True)
INT8 = DType("int8", 1)

# The type of every code of the safetensors format that we read.
DTYPES = {
    "F64": FLOAT64,
    "F32": FLOAT32,
    "F16": FLOAT16,
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8_E4M3,
    "F8_E5M2": FLOAT8_E5M2,
    "F8_E4M3FNUZ": DType("float8_e4m3fnuz", 1, is_floating_point=True),
    "F8_E5M2FNUZ": DType("float8_e5m2fnuz", 1, is_floating_point=True),
    "F8_E8M0": DType("float8_e8m0fnu", 1, is_floating_point=True),
    "I64": DType("int64", 8),
    "I32": DType("int32", 4),
    "I16": DType("int16", 2),
    "I8": INT8,
    "U64": DType("uint64", 8),
    "U32": DType("uint32", 4),
    "U16": DType("uint16", 2),
    "U8": DType("uint8", 1),
    "BOOL": DType("bool", 1),
    "C64": DType("complex64", 8, is_complex=True),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

# The types that weights are written in, by name.
FLOATS = {dtype.name: dtype for dtype in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}
