"""What an adapter's file holds for its factors, and what its configuration calls each: modules, parameters, stacks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mergeflow.checkpoints.lora import INNER
from mergeflow.merging.adapters.experts import of_one_rank, place_of, stack_keys, stacks_of
from mergeflow.merging.adapters.factors import Factors
from mergeflow.merging.adapters.slots import Slot

Shapes = Mapping[str, Sequence[int]]


@dataclass
class Contents:
    """The factors of an adapter as PEFT keeps them.

    Attributes:
        tensors: A and B by their names in the file.
        modules: Rank and factor of each adapted module.
        parameters: Those of each adapted parameter.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, tuple[int, float]] = field(default_factory=dict)
    parameters: dict[str, tuple[int, float]] = field(default_factory=dict)


def contents(factors: Mapping[str, Factors], slots: Mapping[str, Slot], shapes: Shapes) -> Contents:
    """Return what the file holds.

    Args:
        factors: By matrix; those of a stack of experts are called `STACK[expert]`.
        slots: Where the factors of each tensor go.
        shapes: Shapes of all tensors, by name in memory.
    """
    found = Contents()
    plain = {name: (slots[name], one) for name, one in factors.items() if place_of(name) is None}
    for slot, one in _whole_attention(plain, shapes).values():
        found.tensors |= dict(zip(slot.keys, (one.down, one.up), strict=True))
        (found.parameters if slot.parameter else found.modules)[slot.owner] = one.rank, one.factor
    counts = _experts(shapes)
    stacks = stacks_of(factors, counts)
    for stack, one in stacks.items():
        found.tensors |= dict(zip(stack_keys(stack, stacks), (one.down, one.up), strict=True))
        found.parameters[stack] = one.rank // counts[stack], one.factor
    return found


def _experts(shapes: Shapes) -> dict[str, int]:
    """Return the number of experts of each stack, whether the base's file fuses them or lists them."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        place = place_of(name)
        if place is not None:
            found[place.stack] = max(place.expert + 1, found.get(place.stack, 0))
        elif len(shape) == 3:
            found[name] = shape[0]
    return found


def _whole_attention(plain: Mapping[str, tuple[Slot, Factors]], shapes: Shapes) -> dict[str, tuple[Slot, Factors]]:
    """Give `nn.MultiheadAttention` factors of both its weights, of one rank, as PEFT adapts it: zero where none are."""
    found = dict(plain)
    for module in {slot.owner for slot, _ in plain.values() if f"{slot.owner}.in_proj_weight" in shapes}:
        both = {f"{module}.in_proj_weight": Slot(module, "linear", False)}
        both[f"{module}.out_proj.weight"] = Slot(module + INNER, "linear", False)
        held = [plain[name][1] if name in plain else _nothing(shapes[name], plain, both) for name in both]
        downs, ups, factor = of_one_rank(held)
        for (name, slot), down, up in zip(both.items(), downs, ups, strict=True):
            found[name] = slot, Factors(down, up, factor)
    return found


def _nothing(shape: Sequence[int], plain: Mapping[str, tuple[Slot, Factors]], both: Mapping[str, Slot]) -> Factors:
    """Return factors of a zero matrix, like those of the other weight of the module."""
    other = next(plain[name][1] for name in both if name in plain)
    return Factors(other.down.new_zeros(1, shape[1]), other.up.new_zeros(shape[0], 1), other.factor)
