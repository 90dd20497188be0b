"""A cache of factorisations, so that a grid over (rank, scale) factors each matrix once."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from threading import Lock
from typing import TYPE_CHECKING

from mergeflow.checkpoints.fingerprint import raw_bytes

if TYPE_CHECKING:
    from torch import Tensor


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
        """Return factors with `rank` columns at least, computed when they are not known.

        Args:
            matrix: A, [m, n]; its content is the key.
            rank: 1 … min(m, n).
            compute: (matrix, rank) → factors with at least that many columns, such as `leading_factors`.
        """
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
