"""Types of elements that are known without torch are what torch says of them."""

import pytest
import torch

from mergeflow.checkpoints.header import DTYPES, DType, dtype_of


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_type_of_the_format_is_torchs(dtype: DType) -> None:
    assert dtype_of(dtype.torch) == dtype
    assert str(dtype) == str(dtype.torch)


def test_a_type_that_the_format_lacks_is_known_all_the_same() -> None:
    dtype = dtype_of(torch.complex128)
    assert (dtype.torch, dtype.itemsize, dtype.is_complex) == (torch.complex128, 16, True)
    assert dtype not in DTYPES.values()
