"""The few leading eigenvectors of a symmetric matrix, by LAPACK's dsyevr through SciPy, without holding Python's lock.

torch has only the full eigendecomposition. For the 62 leading of 768 vectors dsyevr takes a third of its time, but
SciPy's own wrapper holds the lock and so keeps the other workers waiting; called through ctypes it does not.
SciPy is imported when it is first needed: element-wise merges start without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor


# From this share of the side on the full decomposition is as fast.
WORTH = 1 / 4


@cache
def _dsyevr() -> Callable[..., None]:
    """The routine SciPy exports for compiled code, as a function that takes pointers."""
    from scipy.linalg import cython_lapack

    capsule = cython_lapack.__pyx_capi__["dsyevr"]
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, name(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 21)(address)


def leading_eigen(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the `rank` largest eigenvalues, rising, and their eigenvectors [n, rank].

    Args:
        gram: Symmetric, float64, on the CPU; its lower triangle counts, and it is overwritten.
    """
    n = len(gram)
    assert gram.is_contiguous()
    values, vectors = gram.new_empty(n), gram.new_empty(rank, n)
    work = gram.new_empty(70 * n)
    whole = torch.empty(12 * n, dtype=torch.int32)
    count, info = ctypes.c_int(0), ctypes.c_int(0)
    zero = ctypes.byref(ctypes.c_double(0.0))

    def at(value: int) -> Any:
        return ctypes.byref(ctypes.c_int(value))

    # The lower triangle in torch's order of rows is the upper one in LAPACK's order of columns.
    _dsyevr()(
        b"V", b"I", b"U", at(n), gram.data_ptr(), at(n), zero, zero, at(n - rank + 1), at(n), zero,
        ctypes.byref(count), values.data_ptr(), vectors.data_ptr(), at(n), whole.data_ptr(), work.data_ptr(),
        at(70 * n), whole[2 * n :].data_ptr(), at(10 * n), ctypes.byref(info),
    )  # fmt: skip
    assert info.value == 0, info.value
    assert count.value == rank
    return values[:rank], vectors.T


@cache
def _libraries() -> Any:
    from threadpoolctl import ThreadpoolController

    _dsyevr()  # loads SciPy's BLAS: the controller sees only what is loaded when it is made
    return ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep SciPy's BLAS to one thread: the workers are the parallelism, and the bits may not depend on cores."""
    with _libraries().limit(limits=1, user_api="blas"):
        yield
