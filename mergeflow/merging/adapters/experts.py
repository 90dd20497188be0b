"""A mixture's experts as PEFT keeps them: the factors of all experts of a stack in one pair of matrices."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mergeflow.checkpoints.lora import EXPERT_STACKS, PREFIX
from mergeflow.merging.adapters.factors import Factors

_PIECE = re.compile(r"^(?P<stack>.+)\[(?P<expert>\d+)\](?:\.(?P<half>gate|up))?$")


@dataclass(frozen=True)
class Place:
    """Where a matrix stands in a stack of experts.

    Attributes:
        stack: The stack's name in memory, such as `model.layers.0.mlp.experts.gate_up_proj`.
        expert: Which expert it is of.
        half: `gate` (the upper rows) or `up` (the lower ones) where it is a half of its expert's matrix; else "".
    """

    stack: str
    expert: int
    half: str


def place_of(name: str) -> Place | None:
    """Return the place that a matrix's name says; None for what is not of a stack.

    Example:
        >>> place_of("mlp.experts.gate_up_proj[3].up")
        Place(stack='mlp.experts.gate_up_proj', expert=3, half='up')
    """
    found = _PIECE.match(name)
    return Place(found["stack"], int(found["expert"]), found["half"] or "") if found else None


def stacks_of(factors: Mapping[str, Factors], counts: Mapping[str, int]) -> dict[str, Factors]:
    """Return the factors of every stack in the order in which PEFT keeps them.

    A = [A_1; …; A_E], [E · r, n];  B[:, k E + e] = column k of B_e, [m, r · E]

    A stack has one rank, the largest of its experts'; those that did not change are zero.

    Args:
        factors: By matrix; those of no stack are passed over.
        counts: The number of experts of each stack.

    Returns:
        By stack, A and B with the factor that all experts share.
    """
    found: dict[str, dict[int, dict[str, Factors]]] = {}
    for name, one in factors.items():
        place = place_of(name)
        if place is not None:
            found.setdefault(place.stack, {}).setdefault(place.expert, {})[place.half] = one
    return {stack: _stacked({e: _joined(of) for e, of in held.items()}, counts[stack]) for stack, held in found.items()}


def _joined(halves: Mapping[str, Factors]) -> Factors:
    """Return an expert's matrix from its halves, gate above up; halves that share A go on sharing it."""
    if "" in halves:
        return halves[""]
    one = next(iter(halves.values()))
    gate, up = (halves.get(half, Factors(one.down, torch.zeros_like(one.up), one.factor)) for half in ("gate", "up"))
    if gate.factor == up.factor and torch.equal(gate.down, up.down):
        return Factors(gate.down, torch.cat([gate.up, up.up]), gate.factor)
    return Factors(torch.cat([gate.down, up.down]), torch.block_diag(gate.up * gate.factor, up.up * up.factor))


def _stacked(experts: Mapping[int, Factors], count: int) -> Factors:
    down, up, factor = of_one_rank(list(experts.values()))
    nothing = torch.zeros_like(down[0]), torch.zeros_like(up[0])
    pairs = dict(zip(experts, zip(down, up, strict=True), strict=True))
    downs, ups = zip(*(pairs.get(expert, nothing) for expert in range(count)), strict=True)
    return Factors(torch.cat(downs), torch.stack(ups).permute(1, 2, 0).reshape(len(ups[0]), -1).contiguous(), factor)


def of_one_rank(several: list[Factors]) -> tuple[list[Tensor], list[Tensor], float]:
    """Return A's and B's of the largest rank, with one factor for all; B takes up factors that differ."""
    shared = len({one.factor for one in several}) == 1
    rank = max(one.rank for one in several)
    padded = [one.padded(rank) for one in several]
    ups = [one.up if shared else one.up * one.factor for one in padded]
    return [one.down for one in padded], ups, several[0].factor if shared else 1.0


def stack_keys(stack: str, stacks: Iterable[str]) -> tuple[str, str]:
    """Return the names of a stack's A and B in an adapter's file.

    PEFT wraps a module once for each parameter, the first innermost, so that of two stacks `down_proj` is outside.

    Example:
        >>> both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        >>> stack_keys("mlp.experts.gate_up_proj", both)[0]
        'base_model.model.mlp.experts.base_layer.lora_A.weight'
    """
    module, _, own = stack.rpartition(".")
    outside = EXPERT_STACKS[EXPERT_STACKS.index(own) + 1 :]
    depth = sum(f"{module}.{other}" in set(stacks) for other in outside)
    stem = PREFIX + module + ".base_layer" * depth
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
