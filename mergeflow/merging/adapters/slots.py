"""The place of a tensor's change in a PEFT adapter: as factors, as a bias, or whole; and the adapter's file."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from mergeflow.checkpoints.align_names import is_conv1d
from mergeflow.checkpoints.checks import pattern_of
from mergeflow.checkpoints.lora import EXPERT_STACKS, INNER, PREFIX
from mergeflow.checkpoints.names import in_out_experts, module_in_memory, module_of, stores_inputs_first
from mergeflow.errors import MergeflowError
from mergeflow.merging.adapters.factors import Factors
from mergeflow.merging.architectures.architecture import Architecture, Role

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
    match = _PIECE.match(name)
    return Place(match["stack"], int(match["expert"]), match["half"] or "") if match else None


def stacks_of(factors: Mapping[str, Factors], counts: Mapping[str, int]) -> dict[str, Factors]:
    """Return the factors of every stack in the order in which PEFT keeps them.

    A = [A_1; …; A_E], [E · r, n];  B[:, k E + e] = column k of B_e, [m, r · E]

    A stack has one rank, the largest of its experts'; those that did not change are zero.

    Args:
        factors: By matrix; those of no stack are passed over.

    Returns:
        By stack, A and B with the factor that all experts share.
    """
    by_stack: dict[str, dict[int, dict[str, Factors]]] = {}
    for name, part in factors.items():
        place = place_of(name)
        if place is not None:
            by_stack.setdefault(place.stack, {}).setdefault(place.expert, {})[place.half] = part
    return {
        stack: _stacked({e: _joined(of) for e, of in held.items()}, counts[stack]) for stack, held in by_stack.items()
    }


def _joined(halves: Mapping[str, Factors]) -> Factors:
    """Return an expert's matrix from its halves, gate above up; halves that share A go on sharing it."""
    if "" in halves:
        return halves[""]
    some = next(iter(halves.values()))
    gate, up = (halves.get(half, Factors(some.down, torch.zeros_like(some.up), some.factor)) for half in ("gate", "up"))
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
    shared = len({part.factor for part in several}) == 1
    rank = max(part.rank for part in several)
    padded = [part.padded(rank) for part in several]
    ups = [part.up if shared else part.up * part.factor for part in padded]
    return [part.down for part in padded], ups, several[0].factor if shared else 1.0


def stack_keys(stack: str, stacks: Iterable[str]) -> tuple[str, str]:
    """Return the names of a stack's A and B in an adapter's file.

    PEFT wraps a module once for each parameter, the first innermost, so that of two stacks `down_proj` is outside.

    Example:
        >>> both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        >>> stack_keys("mlp.experts.gate_up_proj", both)[0]
        'base_model.model.mlp.experts.base_layer.lora_A.weight'
    """
    module, _, parameter = stack.rpartition(".")
    outside = EXPERT_STACKS[EXPERT_STACKS.index(parameter) + 1 :]
    depth = sum(f"{module}.{other}" in set(stacks) for other in outside)
    stem = PREFIX + module + ".base_layer" * depth
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


Kind = Literal["linear", "convolution", "embedding", "stack"]
_EXPERT_MODULES = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
# Modules that PEFT refuses to adapt in models of these types.
_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_NOT_ADAPTED = ("out_proj", "conv1d", "dt_proj")  # of the last one Mamba takes the weight, past what PEFT adds
_LISTED_EXPERT = re.compile(r"\.experts\.\d+\.")
# Names of tables of rows that are looked up, where neither a class nor the vocabulary of roles knows them.
_LOOKED_UP = re.compile(r"(?:^|[._])(?:emb|tok(?:en)?s?|words?|vocab|table|lookup|codebook)(?:_\w+)?\.weight$")
# What a change of is kept whole where a merge need not keep factors that it was given.
_WHOLE: tuple[Role, ...] = ("position", "router", "norm", "other")
_TABLES: tuple[Role, ...] = ("embedding", "head")


@dataclass(frozen=True)
class Slot:
    """Two factors of one weight.

    Attributes:
        module: The module's name as PEFT says it.
        kind: Whether the module is linear (also transformers' Conv1D), a convolution, an embedding, or a stack of
            experts.
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
        slots: Names of those that can be kept as factors.
        architecture: What the model's tensors are.

    Raises:
        MergeflowError: Some are neither.
    """
    unfit = [
        name
        for name, shape in shapes.items()
        if architecture.role(name, shape) == "expert" and (name not in slots or _LISTED_EXPERT.search(name))
    ]
    if unfit:
        biases = all(name.endswith("bias") for name in unfit)
        listed = "*experts*bias" if biases else "*experts*"
        patterns = sorted({listed if fnmatchcase(name, listed) else pattern_of(name) for name in unfit})
        why = "biases of stacked experts" if biases else "experts of a mixture"
        unknown = not biases and module_in_memory(architecture.config, "") is None
        only = ", or whose stack only transformers ≥ 5 can say (install it)" if unknown else ""
        raise MergeflowError(
            f"{len(unfit)} tensors such as '{unfit[0]}' are {why} that no adapter can hold{only}. Leave them as the "
            f"base has them, ignore: {patterns}, or write the whole model."
        )


def slot_of(
    name: str,
    shape: Sequence[int],
    architecture: Architecture,
    names: Collection[str],
    whole: Collection[str],
    factored: bool,
) -> Slot | None:
    """Return where the factors of a weight go; None for what PEFT can only keep whole.

    Args:
        names: All names of the model: torch's own attention is one module for PEFT, with two weights.
        whole: Roles of tensors that are not kept as factors.
        factored: Whether all experts have factors of it. Of a convolution these show that it is not in groups, where
            PEFT's factors are another change; its weight does not.
    """
    role = architecture.role(name, shape)
    place = place_of(name)
    if place is not None or (len(shape) == 3 and name.endswith(EXPERT_STACKS)):
        in_out = in_out_experts(architecture.config)
        return Slot(place.stack if place else name, "stack", in_out)
    if len(shape) > 2 and factored and name.endswith(".weight"):
        return Slot(name.removesuffix(".weight"), "convolution", False)
    if len(shape) != 2 or min(shape) < 2 or role in whole:
        return None
    if name.endswith(".in_proj_weight"):
        return Slot(name.removesuffix(".in_proj_weight"), "linear", False)
    if not name.endswith(".weight"):
        return None
    module = name.removesuffix(".weight")
    unfit = architecture.config.get("model_type") in _MAMBA and module.endswith(_NOT_ADAPTED)
    # PEFT adapts every module whose name ends in one that it is given.
    if unfit or ("." not in module and any(f".{module}." in other for other in names)):
        return None
    attention = module.removesuffix(".out_proj")
    if f"{attention}.in_proj_weight" in names:
        return Slot(attention + INNER, "linear", False)
    holder = module_in_memory(architecture.config, module)
    wrapped = holder is None or _is_wrapped(holder)
    doubtful = not wrapped or (holder is None and role is None and _LOOKED_UP.search(name))
    if doubtful and not factored:
        return None
    if isinstance(holder, torch.nn.Embedding) if holder is not None else role in ("embedding", "position"):
        return Slot(module, "embedding", True)
    transposed = (
        stores_inputs_first(holder)
        if holder is not None
        else architecture.form(name, shape, split_fused=False).transposed or bool(is_conv1d(architecture.config, name))
    )
    # Where a model has stacks of experts, PEFT takes modules of these names for experts of transformers 4.
    mistaken = module.rpartition(".")[2] in _EXPERT_MODULES and any(".experts." in other for other in names)
    return Slot(module, "linear", transposed, parameter=mistaken or not wrapped)


def _is_wrapped(module: torch.nn.Module) -> bool:
    """Whether PEFT's wrapper computes what a module does: plainly linear, or an embedding, maybe scaled."""
    plain = type(module).forward in (torch.nn.Linear.forward, torch.nn.Embedding.forward)
    falcon = type(module).__name__ == "FalconLinear"
    return plain or falcon or stores_inputs_first(module) or hasattr(module, "embed_scale")


def bias_key(name: str, slots: Mapping[str, Slot]) -> str | None:
    """Return where PEFT keeps a tensor that is the bias of an adapted linear weight; None for any other tensor."""
    for bias, weight in ((".in_proj_bias", ".in_proj_weight"), (".bias", ".weight")):
        slot = slots.get(name.removesuffix(bias) + weight) if name.endswith(bias) else None
        if slot is not None and slot.kind in ("linear", "convolution"):
            return f"{PREFIX}{slot.module}.base_layer{bias}"
    return None


def whole_modules(
    changed: Iterable[str], names: Collection[str], slots: Mapping[str, Slot]
) -> dict[str, tuple[str, ...]]:
    """Find the modules that are stored whole because of changed tensors, each with all its tensors.

    PEFT takes for such a module every one whose name ends in a name given, so those come along.

    Args:
        changed: Tensors that the merge changes and that no factors can hold.
        slots: The tensors that are kept as factors, by name.

    Raises:
        MergeflowError: Tensors that lie in no module of their own, or in one with matrices that are kept as factors.
    """
    wanted = {module_of(name) for name in changed}
    faults = sorted(name for name in changed if not module_of(name))
    every = {".".join(parts[:end]) for parts in (name.split(".") for name in names) for end in range(1, len(parts))}
    wanted |= {name for name in every if name.endswith(tuple(wanted - {""}))}
    outer = [name for name in sorted(wanted - {""}) if not any(name.startswith(f"{other}.") for other in wanted - {""})]
    modules = {module: tuple(name for name in names if name.startswith(f"{module}.")) for module in outer}
    clashing = {name for name, held in modules.items() if slots.keys() & set(held)}
    inside = sorted(name for name in changed if any(name.startswith(f"{module}.") for module in clashing))
    faults += [name for name in inside if module_of(name) in clashing] or inside
    if faults:
        listed = "', '".join(faults[:5]) + (f"' and {len(faults) - 5} more" if len(faults) > 5 else "'")
        raise MergeflowError(
            f"{len(faults)} changed tensors cannot be part of an adapter, because their module is the model itself or "
            f"holds adapted matrices: '{listed}. `ignore: {sorted(set(map(pattern_of, faults)))}` leaves them "
            "as the base has them; or write the whole model."
        )
    return modules


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
    """Return the tensors and sizes of the adapter file.

    Args:
        factors: By matrix; those of a stack of experts are called `STACK[expert]`.
        slots: Where the factors of each tensor go.
        shapes: Shapes of all tensors, by name in memory.
    """
    adapter = Contents()
    plain = {name: (slots[name], part) for name, part in factors.items() if place_of(name) is None}
    for name, (slot, part) in _whole_attention(plain, shapes).items():
        kernel = shapes[name][2:]  # of a convolution
        down = part.down.reshape(part.rank, -1, *kernel)
        adapter.tensors |= dict(
            zip(slot.keys, (down, part.up.reshape(-1, part.rank, *(1 for _ in kernel))), strict=True)
        )
        (adapter.parameters if slot.parameter else adapter.modules)[slot.owner] = part.rank, part.factor
    counts = _expert_counts(shapes)
    stacks = stacks_of(factors, counts)
    for stack, part in stacks.items():
        adapter.tensors |= dict(zip(stack_keys(stack, stacks), (part.down, part.up), strict=True))
        adapter.parameters[stack] = part.rank // counts[stack], part.factor
    return adapter


def _expert_counts(shapes: Shapes) -> dict[str, int]:
    """Return the number of experts of each stack, whether the base's file fuses them or lists them."""
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        place = place_of(name)
        if place is not None:
            counts[place.stack] = max(place.expert + 1, counts.get(place.stack, 0))
        elif len(shape) == 3:
            counts[name] = shape[0]
    return counts


def _whole_attention(plain: Mapping[str, tuple[Slot, Factors]], shapes: Shapes) -> dict[str, tuple[Slot, Factors]]:
    """Give `nn.MultiheadAttention` factors of both its weights, of one rank, as PEFT adapts it: zero where none are."""
    joined = dict(plain)
    for module in {slot.owner for slot, _ in plain.values() if f"{slot.owner}.in_proj_weight" in shapes}:
        both = {f"{module}.in_proj_weight": Slot(module, "linear", False)}
        both[f"{module}.out_proj.weight"] = Slot(module + INNER, "linear", False)
        held = [plain[name][1] if name in plain else _nothing(shapes[name], plain, both) for name in both]
        downs, ups, factor = of_one_rank(held)
        for (name, slot), down, up in zip(both.items(), downs, ups, strict=True):
            joined[name] = slot, Factors(down, up, factor)
    return joined


def _nothing(shape: Sequence[int], plain: Mapping[str, tuple[Slot, Factors]], both: Mapping[str, Slot]) -> Factors:
    """Return factors of a zero matrix, like those of the other weight of the module."""
    other = next(plain[name][1] for name in both if name in plain)
    return Factors(other.down.new_zeros(1, shape[1]), other.up.new_zeros(shape[0], 1), other.factor)
