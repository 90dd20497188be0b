"""A cache of factorisations, so that a grid over (rank, scale) factors each matrix once."""

import hashlib
from collections.abc import Callable
from math import ceil
from threading import Lock

from torch import Tensor

from mergeflow.checkpoints.fingerprint import raw_bytes


class FactorCache:
    """Keeps the leading singular vectors of matrices, found again by the content of the matrix.

    The key is a digest of the matrix, so a cache can be shared by any sweeps: equal matrices share their factors, and
    another expert or base never meets a stale one. What is computed depends on the matrix and `rank_ratio` alone, so a
    result does not depend on which ranks were tried before; it agrees with one found without a cache to about 1e-7.

    Args:
        rank_ratio: Share of the smaller side that is kept; give the largest ratio of the grid to save memory, and up
            to 1/8 much time.
    """

    def __init__(self, rank_ratio: float = 1.0) -> None:
        self.rank_ratio = rank_ratio
        self.hits = 0
        self.misses = 0
        self._basis: dict[bytes, Tensor] = {}
        self._lock = Lock()

    def basis(self, matrix: Tensor, rank: int, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return at least `rank` leading singular vectors of the smaller side, computed when they are not known."""
        key = _digest(matrix)
        with self._lock:
            known = self._basis.get(key)
            found = known is not None and known.shape[1] >= rank
            self.hits += found
            self.misses += not found
        if known is not None and found:
            return known
        kept = max(rank, ceil(min(matrix.shape) * self.rank_ratio))
        basis = compute(matrix, kept)[:, :kept].contiguous()
        with self._lock:
            self._basis[key] = basis
        return basis


def _digest(matrix: Tensor) -> bytes:
    shape = f"{tuple(matrix.shape)}{matrix.dtype}{matrix.device}".encode()
    return hashlib.sha256(shape + hashlib.sha256(raw_bytes(matrix)).digest()).digest()
