"""Experts as they lie after weight matching; permuted when first read, so that checks read headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.merging.alignment.groups import Group, Place
from mergeflow.merging.alignment.layouts import find_groups
from mergeflow.merging.alignment.weight_matching import weight_matching

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Matched:
    """The permutations of one expert, found when they are first asked for; its last tensor stays in memory."""

    base: LazyStateDict
    expert: LazyStateDict
    groups: list[Group]
    _lock: Lock = field(default_factory=Lock)
    _last: tuple[str, Tensor] | None = None

    @cached_property
    def orders(self) -> list[Tensor]:
        return weight_matching(self.base, self.expert, self.groups)

    @cached_property
    def places(self) -> dict[str, list[tuple[Place, Tensor]]]:
        found: dict[str, list[tuple[Place, Tensor]]] = {}
        for group, order in zip(self.groups, self.orders, strict=True):
            for place in group.places:
                found.setdefault(place.name, []).append((place, order))
        return found

    def tensor(self, name: str) -> Tensor:
        with self._lock:
            if self._last is None or self._last[0] != name:
                value = self.expert[name]
                for place, order in self.places.get(name, ()):
                    value = place.permuted(value, order)
                self._last = (name, value.contiguous())
            return self._last[1]


@dataclass(frozen=True)
class _Entry:
    """One tensor of a matched expert."""

    matched: _Matched
    name: str

    def read(self, start: int, stop: int) -> Tensor:
        return self.matched.tensor(self.name).reshape(-1)[start:stop]


def match_experts(
    base: LazyStateDict, experts: Mapping[str, LazyStateDict]
) -> tuple[dict[str, LazyStateDict], tuple[str, ...]]:
    """Return the experts with their units permuted towards the base's, and a note of what is permuted.

    Raises:
        MergeflowError: the architecture is not known, or an expert is a task vector.
    """
    vectors = [name for name, state in experts.items() if state.is_task_vector]
    if vectors:
        raise MergeflowError(
            f"align: weight_matching permutes whole models, and '{vectors[0]}' is a difference from the base, whose "
            "units are the base's already. Remove `align`."
        )
    config = config_of(base)
    groups = find_groups({name: info.shape for name, info in base.infos.items()}, config)
    found = {name: _matched(base, state, groups) for name, state in experts.items()}
    units = sum(group.units for group in groups)
    heads = sum(group.name.startswith("heads") for group in groups)
    told = f"experts are aligned to the base by weight matching: {units} units in {len(groups)} groups"
    return found, (f"{told}, {heads} of them heads" if heads else told,)


def _matched(base: LazyStateDict, expert: LazyStateDict, groups: list[Group]) -> LazyStateDict:
    matched = _Matched(base, expert, groups)
    entries = {name: _Entry(matched, name) for name in expert}
    return LazyStateDict(expert.path, entries, expert.infos, expert.metadata, tied=expert.tied, shards=expert.shards)
