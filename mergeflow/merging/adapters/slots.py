"""Where PEFT keeps what changed of a tensor: as two factors, as a bias, or whole with its module."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mergeflow.checkpoints.conv1d import is_conv1d
from mergeflow.checkpoints.lora import EXPERT_STACKS, INNER, PREFIX
from mergeflow.checkpoints.naming import IN_OUT_EXPERTS
from mergeflow.checkpoints.ties import module_of
from mergeflow.errors import MergeflowError
from mergeflow.merging.adapters.experts import place_of
from mergeflow.merging.architectures.architecture import Architecture
from mergeflow.merging.architectures.roles import Role

Kind = Literal["linear", "embedding", "stack"]
_EXPERT_MODULES = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
_LISTED_EXPERT = re.compile(r"\.experts\.\d+\.")
# What a change of is kept whole where a merge need not keep factors that it was given.
_WHOLE: tuple[Role, ...] = ("position", "router", "norm", "other")
_TABLES: tuple[Role, ...] = ("embedding", "head")


@dataclass(frozen=True)
class Slot:
    """Two factors of one weight.

    Attributes:
        module: The module's name as PEFT says it.
        kind: Whether the module is linear (also transformers' Conv1D), an embedding, or a stack of experts.
        transposed: Whether the weight is stored as [in, out], so that B A is its transpose.
        parameter: Whether PEFT is told the weight (`target_parameters`) instead of its module.
    """

    module: str
    kind: Kind
    transposed: bool
    parameter: bool = False

    @property
    def owner(self) -> str:
        """What adapter_config.json calls the module, or the parameter, that is adapted."""
        return f"{self.module}.weight" if self.parameter else self.module.removesuffix(INNER)

    @property
    def keys(self) -> tuple[str, str]:
        """Names of A and B in the adapter's file."""
        ends = (
            ("lora_embedding_A", "lora_embedding_B") if self.kind == "embedding" else ("lora_A.weight", "lora_B.weight")
        )
        return f"{PREFIX}{self.module}.{ends[0]}", f"{PREFIX}{self.module}.{ends[1]}"


def whole_roles(embeddings: str) -> tuple[Role, ...]:
    """Return the roles of tensors that are stored whole; heads and embeddings where they are to be `whole`."""
    return _WHOLE if embeddings == "lora" else (*_WHOLE, *_TABLES)


def check_known_experts(
    shapes: Mapping[str, Sequence[int]], slots: Collection[str], architecture: Architecture
) -> None:
    """Check that every expert of a mixture is a linear module, or part of a stack that is known in memory.

    Args:
        shapes: Of the tensors that some expert has, by name in memory.
        slots: Names of those that can be kept as factors.
        architecture: What the model's tensors are.

    Raises:
        MergeflowError: Some are neither.
    """
    found = [
        name
        for name, shape in shapes.items()
        if architecture.role(name, shape) == "expert" and (name not in slots or _LISTED_EXPERT.search(name))
    ]
    if found:
        biases = all(name.endswith("bias") for name in found)
        pattern = "*experts*bias" if biases else "*experts*"
        why = "biases of stacked experts" if biases else "experts of a mixture"
        only = "" if biases else ", or whose stack only transformers ≥ 5 can say (install it)"
        raise MergeflowError(
            f"{len(found)} tensors such as '{found[0]}' are {why} that no adapter can hold{only}. Leave them as the "
            f"base has them, ignore: ['{pattern}'], or write the whole model."
        )


def slot_of(
    name: str, shape: Sequence[int], architecture: Architecture, names: Collection[str], whole: Collection[str]
) -> Slot | None:
    """Return where the factors of a weight go; None for what PEFT can only keep whole.

    Args:
        name: The tensor's name.
        shape: Its shape.
        architecture: The model's.
        names: All names of the model: torch's own attention is one module for PEFT, with two weights.
        whole: Roles of tensors that are not kept as factors.
    """
    role = architecture.role(name, shape)
    place = place_of(name)
    if place is not None or (len(shape) == 3 and name.endswith(EXPERT_STACKS)):
        in_out = architecture.config.get("model_type") in IN_OUT_EXPERTS
        return Slot(place.stack if place else name, "stack", in_out)
    if len(shape) != 2 or min(shape) < 2 or role in whole:
        return None
    if name.endswith(".in_proj_weight"):
        return Slot(name.removesuffix(".in_proj_weight"), "linear", False)
    if not name.endswith(".weight"):
        return None
    module = name.removesuffix(".weight")
    attention = module.removesuffix(".out_proj")
    if f"{attention}.in_proj_weight" in names:
        return Slot(attention + INNER, "linear", False)
    if role in ("embedding", "position"):
        return Slot(module, "embedding", True)
    transposed = architecture.form(name, shape, split_fused=False).transposed or bool(
        is_conv1d(architecture.config, name)
    )
    # Where a model has stacks of experts, PEFT takes modules of these names for experts of transformers 4.
    mistaken = module.rpartition(".")[2] in _EXPERT_MODULES and any(".experts." in other for other in names)
    return Slot(module, "linear", transposed, parameter=mistaken)


def bias_key(name: str, slots: Mapping[str, Slot]) -> str | None:
    """Return where PEFT keeps a tensor that is the bias of an adapted linear weight; None for any other tensor."""
    for bias, weight in ((".in_proj_bias", ".in_proj_weight"), (".bias", ".weight")):
        slot = slots.get(name.removesuffix(bias) + weight) if name.endswith(bias) else None
        if slot is not None and slot.kind == "linear":
            return f"{PREFIX}{slot.module}.base_layer{bias}"
    return None


def whole_modules(
    changed: Iterable[str], names: Collection[str], slots: Mapping[str, Slot]
) -> dict[str, tuple[str, ...]]:
    """Return the modules that are stored whole for the sake of changed tensors, each with all its tensors.

    PEFT takes for such a module every one whose name ends in a name given, so those come along.

    Args:
        changed: Tensors that the merge changes and that no factors can hold.
        names: All tensors of the model.
        slots: The tensors that are kept as factors, by name.

    Raises:
        MergeflowError: Tensors that lie in no module of their own, or in one with matrices that are kept as factors.
    """
    wanted = {module_of(name) for name in changed}
    faults = sorted(name for name in changed if not module_of(name))
    wanted |= {one for one in {module_of(name) for name in names} if any(one.endswith(end) for end in wanted - {""})}
    outer = [one for one in sorted(wanted - {""}) if not any(one.startswith(f"{other}.") for other in wanted - {""})]
    found = {one: tuple(name for name in names if name.startswith(f"{one}.")) for one in outer}
    clashing = {one for one, held in found.items() if slots.keys() & set(held)}
    faults += sorted(name for name in changed if any(name.startswith(f"{one}.") for one in clashing))
    if faults:
        listed = "', '".join(faults[:5]) + (f"' and {len(faults) - 5} more" if len(faults) > 5 else "'")
        raise MergeflowError(
            f"{len(faults)} changed tensors cannot be part of an adapter, because their module is the model itself or "
            f"holds adapted matrices: '{listed}. Name them in `ignore` to leave them as the "
            "base has them, or write the whole model."
        )
    return found
