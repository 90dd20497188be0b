"""Linear algebra of the spectral methods: truncated SVD and polar factors through a Gram matrix in float64.

For A [m, n] with n ≤ m the eigenvectors V of AᵀA are A's right singular vectors, and A_k = A V_k V_kᵀ needs nothing
else. Formed in float64 this matches LAPACK's float64 SVD to about 1e-7 of the Frobenius norm and costs a fraction of
its time; a float32 Gram (1e-3) or a plain randomised SVD (3e-2) would be too loose where a spectrum is flat at the cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import ceil
from threading import Lock
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.fingerprint import raw_bytes
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor


# Columns of a Gram matrix formed at once: only the blocks on and below the diagonal are computed.
_STRIP = 192
# Rows turned into float64 at once: the float64 copy of a matrix is never held whole.
_ROWS = 1024
# Singular values below this share of the largest carry no direction a float64 Gram could resolve.
_NULL = 1e-7


def is_zero(matrix: Tensor) -> bool:
    """Whether every element [...] is zero; ten times faster than `any`, which turns all of them into booleans first."""
    if matrix.numel() == 0:
        return True
    low, high = torch.aminmax(matrix)
    return bool(low == 0) and bool(high == 0)


def gram(matrix: Tensor) -> Tensor:
    """Return AᵀA [n, n] of A [m, n] in float64: its lower triangle; above it, what shares a strip with the diagonal."""
    return gram_of(matrix.split(_ROWS), matrix.shape[1])


def gram_of(strips: Iterable[Tensor], side: int) -> Tensor:
    """Return AᵀA [n, n] as `gram` does, of the rows of A, of which some [any number, n] come at a time."""
    product = None
    for rows in strips:
        if product is None:
            product = rows.new_zeros(side, side, dtype=torch.float64)
        wide = rows.double()
        for start in range(0, side, _STRIP):
            stop = min(start + _STRIP, side)
            product[start:stop, :stop].addmm_(wide[:, start:stop].T, wide[:, :stop])
    assert product is not None
    return product


def _tall(matrix: Tensor) -> Tensor:
    """Return A or Aᵀ, with no fewer rows than columns."""
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T


def leading_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return V [n, rank], the leading singular vectors of the smaller side n, and A V [m, rank], in A's type.

    Up to an eighth of the side both have that many columns, so that every such rank is cut from the same bits.
    """
    tall = _tall(matrix)
    side = tall.shape[1]
    few = rank <= side // 8
    vectors = _leading(gram(tall), side // 8 if few else side)[1]
    basis = vectors.flip(1)[:, : max(rank, side // 8)].to(matrix.dtype).contiguous()
    return basis, tall @ basis


def _leading(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues, rising, and their vectors, of a Gram matrix that may be overwritten."""
    if product.device.type == "cpu" and rank <= WORTH * len(product):
        return leading_eigen(product, rank)
    values, vectors = _eigen(product)
    return values[-rank:], vectors[:, -rank:]


def _eigen(product: Tensor) -> tuple[Tensor, Tensor]:
    """All eigenvalues, rising, and vectors of a Gram matrix [n, n], on the CPU in its memory; its lower half counts.

    LAPACK takes twice the matrix beside it; torch copies it first, unless input and output are one tensor by columns.
    """
    if product.device.type != "cpu":
        return torch.linalg.eigh(product, UPLO="L")
    mirror_(product)
    values, by_columns = product.new_empty(len(product)), product.T
    torch.linalg.eigh(by_columns, UPLO="L", out=(values, by_columns))
    return values, by_columns


def mirror_(product: Tensor) -> Tensor:
    """Fill the upper triangle of a symmetric matrix [n, n] from its lower one, in place."""
    for start in range(0, len(product), _STRIP):
        rows = product[start : start + _STRIP]
        product[:start, start : start + _STRIP] = rows[:, :start].T
        block = rows[:, start : start + _STRIP]
        block.copy_(block.tril() + block.tril(-1).T)
    return product


def truncate(matrix: Tensor, rank: int, cache: FactorCache | None = None) -> Tensor:
    """Return the best rank-k approximation, SVD_k(A), of A [m, n]."""
    if rank >= min(matrix.shape):
        return matrix.clone()
    if is_zero(matrix):
        return torch.zeros_like(matrix)
    left, right = low_rank_factors(matrix, rank, cache)
    return left @ right


def add_truncated(
    total: Tensor, matrix: Tensor, rank: int, weight: float = 1.0, cache: FactorCache | None = None
) -> None:
    """Add weight · SVD_k(A) to a total in place; the product is never held by itself.

    Args:
        total: [m, n], changed in place; A itself to put the product in its place.
        rank: k, ≥ 1; from min(m, n) on A is added whole.
    """
    alone = total is matrix
    if rank >= min(matrix.shape):
        torch.add(matrix.new_zeros(()) if alone else total, matrix, alpha=weight, out=total)
        return
    factors = None if is_zero(matrix) else low_rank_factors(matrix, rank, cache)
    if alone:
        total.zero_()
    if factors is not None:
        total.addmm_(*factors, alpha=weight)


def low_rank_factors(matrix: Tensor, rank: int, cache: FactorCache | None = None) -> tuple[Tensor, Tensor]:
    """Return L [m, k] and R [k, n] with L R = SVD_k(A); the factor on the smaller side is orthonormal."""
    factors = cache.factors(matrix, rank, leading_factors) if cache is not None else leading_factors(matrix, rank)
    # Contiguous whatever they were cut from: products of the same numbers in another layout may differ in the last bit.
    basis, image = (factor[:, :rank].contiguous() for factor in factors)
    return (image, basis.T) if matrix.shape[0] >= matrix.shape[1] else (basis, image.T)


def svd(matrix: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [m, r], σ [r] falling and V [n, r] in float64, r = rank or min(m, n).

    Directions whose singular value is below 1e-7 of the largest are left out: r may be smaller.
    """
    sigma, short = short_side(matrix, rank)
    long = long_side(matrix, sigma, short)
    return (short, sigma, long) if matrix.shape[0] < matrix.shape[1] else (long, sigma, short)


def short_side(matrix: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return σ [r] of A = U Σ Vᵀ [m, n], falling, and the singular vectors of its shorter side [min(m, n), r].

    Both are float64 as those of `svd`, which they are half of.
    """
    side = min(matrix.shape)
    return _falling(*_leading(gram(_tall(matrix)), min(rank or side, side)))


def directions(product: Tensor, rank: int, norm: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return σ [r] of A = U Σ Vᵀ, falling, and V [n, r] of its Gram matrix AᵀA [n, n], as `short_side` does of A.

    LAPACK's dsyevr takes one more matrix beside the Gram matrix, where the full decomposition takes two.

    Args:
        product: AᵀA, in float64, of which the lower triangle counts; it is overwritten.
        rank: How many directions, 1 … n.
        norm: What else singular values are compared with: the norm of the matrix that A is what is left of.
    """
    if product.device.type == "cpu":
        # Of most directions all are found: dsyevr has a faster way for them.
        values, vectors = leading_eigen(product, rank if rank <= WORTH * len(product) else len(product))
    else:
        values, vectors = torch.linalg.eigh(product, UPLO="L")
    del product
    return _falling(values[-rank:], vectors[:, -rank:], norm)


def _falling(values: Tensor, vectors: Tensor, norm: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return roots of rising eigenvalues in falling order, and their vectors, without those of no direction."""
    sigma = values.flip(0).clamp_(min=0).sqrt_()
    real = int((sigma > _NULL * max(float(sigma[0]), norm)).sum())
    return sigma[:real], vectors.flip(1)[:, :real]


def long_side(matrix: Tensor, sigma: Tensor, short: Tensor) -> Tensor:
    """Return A V Σ⁻¹ [max(m, n), r], the singular vectors of A's longer side, in float64, after `short_side`."""
    tall = _tall(matrix)
    long = short.new_empty(len(tall), len(sigma))
    for into, rows in zip(long.split(_ROWS), tall.split(_ROWS), strict=True):
        torch.mm(rows.double(), short, out=into)
    return long.div_(sigma)


def polar_(matrix: Tensor, flat: bool = False) -> Tensor:
    """Turn A = U Σ Vᵀ [m, n] into its orthogonal polar factor U Vᵀ, in place; zero on what A maps to zero.

    It is the matrix with orthonormal columns (or rows) nearest to A, and A V Σ⁻¹ Vᵀ costs one product with A.

    Args:
        matrix: A, in any type; the factor is rounded to it.
        flat: Whether the factor is multiplied by the mean singular value, σ̄ U Vᵀ.
    """
    tall = _tall(matrix)
    factor, sigma = whitening(gram(tall))
    for rows in tall.split(_ROWS):
        product = rows.double() @ factor
        rows.copy_(product.mul_(sigma.mean()) if flat else product)
    return matrix


def whitening(product: Tensor) -> tuple[Tensor, Tensor]:
    """Return V Σ⁻¹ Vᵀ [n, n] and Σ [n], rising, of A = U Σ Vᵀ, by its Gram matrix [n, n], which is overwritten."""
    values, vectors = _eigen(product)
    del product
    sigma = values.clamp_(min=0).sqrt_()
    real = sigma > _NULL * sigma[-1]
    real_vectors = vectors[:, real]
    del vectors
    return (real_vectors / sigma[real]) @ real_vectors.T, sigma


class FactorCache:
    """Keeps the leading singular factors of matrices, found again by the content of the matrix.

    The key is a digest of the matrix, so a cache can be shared by any sweeps: equal matrices share their factors, and
    another expert or base never meets a stale one. What is computed depends on the matrix, `rank_ratio` and, beyond it,
    the rank, so a result does not depend on which ranks were tried before. Up to a ratio of 1/8 it is bit for bit the
    one found without a cache; beyond, other eigenvectors are computed than for a small rank alone, and results agree to
    about 1e-7.

    Args:
        rank_ratio: Share of the smaller side that is kept; give the largest ratio of the grid to save memory, and up
            to 1/8 much time.
    """

    def __init__(self, rank_ratio: float = 1.0) -> None:
        self.rank_ratio = rank_ratio
        self.hits = 0
        self.misses = 0
        self._known: dict[tuple[bytes, int], tuple[Tensor, Tensor]] = {}
        self._lock = Lock()

    def factors(
        self, matrix: Tensor, rank: int, compute: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return factors of A [m, n] with `rank` columns at least, by its content; computed when they are not known."""
        side = min(matrix.shape)
        wanted = ceil(side * self.rank_ratio)
        key = _digest(matrix), wanted if rank <= wanted else side
        with self._lock:
            cached = self._known.get(key)
            self.hits += cached is not None
            self.misses += cached is None
        if cached is None:
            cached = compute(matrix, key[1])
            with self._lock:
                self._known[key] = cached
        return cached


def _digest(matrix: Tensor) -> bytes:
    """Return 128 bits of XXH3: the digest lives as long as the cache, and SHA-256 would cost more than the products."""
    from xxhash import xxh3_128_digest  # only sweeps need it

    shape = f"{tuple(matrix.shape)}{matrix.dtype}{matrix.device}".encode()
    return shape + xxh3_128_digest(raw_bytes(matrix))


# The few leading eigenvectors of a symmetric matrix, by LAPACK's dsyevr through SciPy, without holding Python's lock.
#
# torch has only the full eigendecomposition. For the 62 leading of 768 vectors dsyevr takes a third of its time, but
# SciPy's own wrapper holds the lock and so keeps the other workers waiting; called through ctypes it does not.
# SciPy is imported when it is first needed: element-wise merges start without it.

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
