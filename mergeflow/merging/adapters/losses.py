"""What an adapter loses of the change that it stands for, told by layer."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Loss:
    """What the factors of one tensor lose.

    Attributes:
        name: The tensor.
        rank: Of the factors.
        norm: ‖Δ‖, Frobenius.
        lost: ‖Δ − s · B A‖, as the factors are stored.
    """

    name: str
    rank: int
    norm: float
    lost: float

    @property
    def error(self) -> float:
        """‖Δ − s · B A‖ / ‖Δ‖."""
        return self.lost / self.norm


def total_error(losses: Iterable[Loss]) -> float:
    """Return the error over several tensors, √(Σ lost²) / √(Σ norm²); 0 for none."""
    found = list(losses)
    norm = sqrt(sum(one.norm**2 for one in found))
    return sqrt(sum(one.lost**2 for one in found)) / norm if norm else 0.0


def lines(losses: Iterable[Loss]) -> list[str]:
    """Return the error as lines for people: of all, then of each layer with the tensor that loses most."""
    layers: dict[str, list[Loss]] = {}
    for one in losses:
        numbered = _LAYER.match(one.name)
        layers.setdefault(numbered.group(1) if numbered else one.name, []).append(one)
    every = [one for found in layers.values() for one in found]
    if not every:
        return []
    width = max(map(len, layers))
    text = [
        f"error {total_error(every):.2e} of the change of {len(every)} matrices (relative Frobenius norm), by layer:"
    ]
    for layer, found in sorted(layers.items(), key=lambda pair: _natural(pair[0])):
        worst = max(found, key=lambda one: one.error)
        where = f"   most {worst.error:.2e} in {worst.name.removeprefix(layer + '.')}" if len(found) > 1 else ""
        ranks = sorted({one.rank for one in found})
        shown = f"rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "")
        text.append(f"  {layer:{width}}  {total_error(found):.2e}  {shown}{where}")
    return text


def _natural(name: str) -> list[tuple[int, str]]:
    """Order numbers by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
