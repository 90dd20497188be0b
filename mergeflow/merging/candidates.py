"""Many candidates from the same experts: one direction for every scale, factorisations kept."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.direction import Direction, prepare
from mergeflow.merging.linalg.cache import FactorCache

State = Mapping[str, Tensor]


class CandidateMerger:
    """Merges candidates in memory.

    Candidates that differ in `scale` alone share one direction when they come after each other; candidates of any
    arguments share factorisations.

    Args:
        base: θ0, in memory or lazy.
        experts: State dicts by name.
        statistics: Of data, for methods that need them: kind → expert → tensor.
        device: Where the arithmetic happens.
    """

    def __init__(
        self,
        base: State,
        experts: Mapping[str, State],
        *,
        statistics: Mapping[str, Any] | None = None,
        device: str = "cpu",
    ) -> None:
        self.base, self.experts = base, experts
        self.cache = FactorCache()
        self.prepared = 0
        self._statistics, self._device = statistics, device
        self._call: MethodCall | None = None
        self._direction: Direction | None = None

    def renew_cache(self, rank_ratio: float) -> None:
        """Forget all factorisations and keep those to come up to a share of the rank."""
        self.cache = FactorCache(rank_ratio)

    def merge(self, call: MethodCall) -> dict[str, Tensor]:
        """Return the merged state dict of a candidate."""
        if self._direction is None or self._call != call.without_scale():
            self._direction = None  # free the old one before the new one is made
            self._direction = prepare(
                call, self.base, self.experts, cache=self.cache, data=self._statistics, device=self._device
            )
            self._call = call.without_scale()
            self.prepared += 1
        return self._direction.at(call.scale)
