"""Git re-basin: the units of experts permuted so that their weights lie near to those of the base."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.reader import ComputedEntry, LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import np, torch
from mergeflow.schema import check_seed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where units lie in a tensor: unit u holds the entries start + u · size … start + (u + 1) · size − 1 of an axis.

    The size is 1 for a neuron, the head's width for a head.
    """

    name: str
    axis: int
    start: int = 0
    size: int = 1

    def rows(self, tensor: Tensor, units: int) -> Tensor:
        """Return the units of a tensor as rows, [units, ...]."""
        part = tensor.movedim(self.axis, 0)[self.start : self.start + units * self.size]
        return part.reshape(units, -1)

    def permuted(self, tensor: Tensor, order: Tensor) -> Tensor:
        """Return the tensor with unit `order[u]` where unit u was."""
        index = torch.arange(tensor.shape[self.axis])
        offsets = order[:, None] * self.size + torch.arange(self.size)
        index[self.start : self.start + len(order) * self.size] = self.start + offsets.reshape(-1)
        return tensor.index_select(self.axis, index)


@dataclass(frozen=True)
class Group:
    """Units that one permutation reorders in all places where they lie: the net's function stays as it was."""

    name: str
    units: int
    places: tuple[Place, ...]


def permute(state: Mapping[str, Tensor], groups: Sequence[Group], orders: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return weights with each group's units reordered.

    Args:
        orders: For each group a permutation, int64 [units]: unit u of the result is unit `order[u]` of `state`.
    """
    permuted = dict(state)
    for group, order in zip(groups, orders, strict=True):
        for place in group.places:
            permuted[place.name] = place.permuted(permuted[place.name], order)
    return permuted


_ROUNDS = 100  # Git Re-Basin converges in 5 to 30; each one costs an assignment a group


def weight_matching(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], groups: Sequence[Group], seed: int = 0
) -> list[Tensor]:
    """Return for each group the order of `other`'s units that brings it closest to `reference`.

    max_P ⟨θ_A, P(θ_B)⟩ by coordinate descent: given all other permutations, one group's best is a linear assignment.
    The groups are visited in random order until a whole round changes nothing.

    Args:
        reference: θ_A.
        other: θ_B, with the same names and shapes.
        groups: As `find_groups` gives them.
        seed: Of the order of visits.

    Example:
        >>> net = {"0.weight": torch.tensor([[1.0], [2.0]]), "1.weight": torch.tensor([[3.0, 4.0]])}
        >>> groups = find_groups({name: value.shape for name, value in net.items()})
        >>> weight_matching(net, permute(net, groups, [torch.tensor([1, 0])]), groups)
        [tensor([1, 0])]

    Source:
        Ainsworth et al. 2023, Git Re-Basin, Algorithm 1.
    """
    from scipy.optimize import linear_sum_assignment

    check_seed(seed)

    orders = [torch.arange(group.units) for group in groups]
    if not groups:
        return orders
    touched = {place.name for group in groups for place in group.places}
    current = {name: other[name].double() for name in touched}
    wanted = {name: reference[name].double() for name in touched}
    generator = np.random.default_rng(seed)
    for _ in range(_ROUNDS):
        changed = False
        for index in generator.permutation(len(groups)):
            group = groups[index]
            gain = alikeness(group, wanted, current).numpy()
            _, columns = linear_sum_assignment(gain, maximize=True)
            order, still = torch.from_numpy(columns), np.arange(group.units)
            # Ties are left as they are, or the rounds would not end.
            if gain[still, columns].sum() > gain[still, still].sum() * (1 + 1e-12) + 1e-12:
                current = permute(current, [group], [order])
                orders[index] = orders[index][order]
                changed = True
        if not changed:
            break
    return orders


def alikeness(group: Group, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return inner products of a group's units in two nets, float64 [units of a, units of b], statistics apart."""
    total = torch.zeros(group.units, group.units, dtype=torch.float64)
    for place in group.places:
        if "running_" not in place.name:
            total += place.rows(a[place.name], group.units) @ place.rows(b[place.name], group.units).T
    return total


Shapes = Mapping[str, Sequence[int]]
Config = Mapping[str, Any]
_KNOWN = (
    "chains of linear layers, residual nets with torchvision's names, open_clip's vision transformers, and encoders "
    "with the names of BERT, RoBERTa or ViT in transformers"
)


def find_groups(shapes: Shapes, config: Config | None = None) -> list[Group]:
    """Return the groups of units that may be permuted without changing the function.

    Args:
        config: config.json, where there is one: the number of attention heads. Without it heads keep their order.

    Source:
        Ainsworth et al. 2023, Git Re-Basin, Section 3 and Appendix A.
    """
    for finder in (_residual, _transformer, _chain):
        groups = finder(shapes, config or {})
        if groups:
            return groups
    some = ", ".join(list(shapes)[:3])
    raise MergeflowError(
        f"align: weight_matching knows {_KNOWN}; tensors such as {some} are of none of these. Remove `align`."
    )


def _norm(name: str, shapes: Shapes) -> list[Place]:
    parts = ("weight", "bias", "running_mean", "running_var")
    return [Place(f"{name}.{part}", 0) for part in parts if f"{name}.{part}" in shapes]


def _linear(name: str, shapes: Shapes, axis: int) -> list[Place]:
    """Return where the outputs (axis 0) or the inputs (axis 1) of a layer lie."""
    bias = [Place(f"{name}.bias", 0)] if axis == 0 and f"{name}.bias" in shapes else []
    return [Place(f"{name}.weight", axis), *bias]


def _chain(shapes: Shapes, _: Config) -> list[Group]:
    """A stack of linear layers, each taking what the one before gives; nothing else but their biases."""
    layers = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    numbers = [re.findall(r"\d+", layer) for layer in layers]
    if not all(numbers) or any(name.rpartition(".")[0] not in layers for name in shapes):
        return []
    layers = [layer for _, layer in sorted(zip([int(n[-1]) for n in numbers], layers, strict=True))]
    sizes = [shapes[f"{layer}.weight"] for layer in layers]
    fits = all(len(a) == len(b) == 2 and a[0] == b[1] for a, b in pairwise(sizes))
    if len(layers) < 2 or not fits:
        return []
    return [
        Group(layer, shapes[f"{layer}.weight"][0], (*_linear(layer, shapes, 0), *_linear(after, shapes, 1)))
        for layer, after in pairwise(layers)
    ]


def _residual(shapes: Shapes, _: Config) -> list[Group]:
    """A stem, stages of basic or bottleneck blocks with identity or 1×1 shortcuts, and a linear layer on the mean."""
    if not all(f"{name}.weight" in shapes for name in ("conv1", "layer1.0.conv1", "fc")):
        return []
    numbers = {(int(m[1]), int(m[2])) for name in shapes if (m := re.match(r"layer(\d+)\.(\d+)\.", name))}
    # Each shortcut with weights begins a new stream; what the blocks of one stream add up has one order.
    streams = [("conv1", [*_linear("conv1", shapes, 0), *_norm("bn1", shapes)])]
    groups = []
    for block in (f"layer{stage}.{number}" for stage, number in sorted(numbers)):
        convs = [f"{block}.conv{n}" for n in (1, 2, 3) if f"{block}.conv{n}.weight" in shapes]
        streams[-1][1].extend(_linear(convs[0], shapes, 1))
        shortcut = f"{block}.downsample.0"
        if f"{shortcut}.weight" in shapes:
            streams[-1][1].extend(_linear(shortcut, shapes, 1))
            streams.append((shortcut, [*_linear(shortcut, shapes, 0), *_norm(f"{block}.downsample.1", shapes)]))
        for conv, following in pairwise(convs):
            norm = _norm(conv.replace("conv", "bn"), shapes)
            places = (*_linear(conv, shapes, 0), *norm, *_linear(following, shapes, 1))
            groups.append(Group(conv, shapes[f"{conv}.weight"][0], places))
        streams[-1][1].extend([*_linear(convs[-1], shapes, 0), *_norm(convs[-1].replace("conv", "bn"), shapes)])
    streams[-1][1].extend(_linear("fc", shapes, 1))
    groups += [Group(name, shapes[f"{name}.weight"][0], tuple(places)) for name, places in streams]
    placed = {place.name for group in groups for place in group.places}
    others = [name for name in shapes if name not in placed and not name.endswith("num_batches_tracked")]
    whole = all(shapes[place.name][place.axis] == group.units for group in groups for place in group.places)
    return groups if whole and others in ([], ["fc.bias"]) else []  # else in groups, or with other parts in a block


# A block's parts: hidden layer in and out; query, key, value (or one fused weight); attention's output.
_CLIP = {
    "block": r"(?P<block>.*resblocks\.\d+)\.mlp\.c_fc\.weight$",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "fused": "attn.in_proj_",
    "out": "attn.out_proj",
    "stream": (
        (r"visual\.(conv1\.weight|class_embedding|proj)$", 0),
        (r"visual\.positional_embedding$", 1),
        (r"ln_(pre|post|1|2)\.(weight|bias)$", 0),
        (r"attn\.in_proj_weight$|mlp\.c_fc\.weight$", 1),
        (r"(attn\.out_proj|mlp\.c_proj)\.(weight|bias)$", 0),
    ),
    "free": r"attn\.in_proj_bias$|mlp\.c_fc\.bias$",
}
_BERT = {
    "block": r"(?P<block>.*layers?\.\d+)\.intermediate\.dense\.weight$",
    "up": "intermediate.dense",
    "down": "output.dense",
    "apart": (
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    ),
    "out": "attention.output.dense",
    "stream": (
        (r"embeddings\.(word|position|token_type)_embeddings\.weight$", 1),
        (r"embeddings\.(cls_token|position_embeddings)$", 2),
        (r"patch_embeddings\.projection\.(weight|bias)$", 0),
        (r"(LayerNorm|layernorm\w*)\.(weight|bias)$", 0),
        (
            r"(query|key|value)\.weight$|intermediate\.dense\.weight$|(pooler|classifier)\.dense\.weight$|\bclassifier\.weight$",
            1,
        ),
        (r"output\.dense\.(weight|bias)$", 0),
    ),
    "free": r"(query|key|value)\.bias$|(intermediate|pooler|classifier)\.dense\.bias$|\bclassifier\.(bias$|out_proj)",
}


def _transformer(shapes: Shapes, config: Config) -> list[Group]:
    """Hidden units of each block, its heads where their number is known, and the stream where all of it is known."""
    for table in (_CLIP, _BERT):
        blocks = [m["block"] for name in shapes if (m := re.match(str(table["block"]), name))]
        if blocks:
            groups = [group for block in blocks for group in _block(block, table, shapes, config)]
            return [*groups, *_stream(table, shapes)]
    return []


def _block(block: str, table: Mapping[str, Any], shapes: Shapes, config: Config) -> list[Group]:
    up, down, out = (f"{block}.{table[part]}" for part in ("up", "down", "out"))
    groups = [Group(up, shapes[f"{up}.weight"][0], (*_linear(up, shapes, 0), *_linear(down, shapes, 1)))]
    heads, width = _heads(config), shapes[f"{out}.weight"][1]
    if not heads or width % heads:
        return groups
    size = width // heads
    if "fused" in table:
        parts = [f"{block}.{table['fused']}{part}" for part in ("weight", "bias")]
        places = [Place(part, 0, third * width, size) for part in parts if part in shapes for third in range(3)]
    else:
        names = next(names for names in table["apart"] if f"{block}.{names[0]}.weight" in shapes)
        places = [Place(place.name, 0, 0, size) for name in names for place in _linear(f"{block}.{name}", shapes, 0)]
    return [*groups, Group(f"heads of {out}", heads, (*places, Place(f"{out}.weight", 1, 0, size)))]


def _heads(config: Config) -> int | None:
    nested = config.get("vision_config")
    for section in (config, nested if isinstance(nested, Mapping) else {}):
        heads = section.get("num_attention_heads")
        if isinstance(heads, int) and heads > 0:
            return heads
    return None


def _stream(table: Mapping[str, Any], shapes: Shapes) -> list[Group]:
    """The residual stream, if each tensor is known to read it, write it or leave it alone."""
    places, widths = [], set()
    pooled = any("pooler.dense" in name for name in shapes)
    for name, shape in shapes.items():
        if pooled and re.search(r"\bclassifier\.", name):
            continue  # a classifier on the pooler's output does not read the stream
        axis = next((axis for pattern, axis in table["stream"] if re.search(pattern, name)), None)
        if axis is not None and axis < len(shape):
            places.append(Place(name, axis))
            widths.add(shape[axis])
        elif not re.search(table["free"], name):
            return []
    return [Group("residual stream", widths.pop(), tuple(places))] if len(widths) == 1 else []


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
        places: dict[str, list[tuple[Place, Tensor]]] = {}
        for group, order in zip(self.groups, self.orders, strict=True):
            for place in group.places:
                places.setdefault(place.name, []).append((place, order))
        return places

    def read(self, name: str, start: int, stop: int) -> Tensor:
        with self._lock:
            if self._last is None or self._last[0] != name:
                value = self.expert[name]
                for place, order in self.places.get(name, ()):
                    value = place.permuted(value, order)
                self._last = (name, value.contiguous())
            return self._last[1].reshape(-1)[start:stop]


def match_experts(
    base: LazyStateDict, experts: Mapping[str, LazyStateDict]
) -> tuple[dict[str, LazyStateDict], tuple[str, ...]]:
    """Return the experts with their units permuted towards the base's, and a note of what is permuted."""
    vectors = [name for name, state in experts.items() if state.is_task_vector]
    if vectors:
        raise MergeflowError(
            f"align: weight_matching permutes whole models, and '{vectors[0]}' is a difference from the base, whose "
            "units are the base's already. Remove `align`."
        )
    config = config_of(base)
    groups = find_groups({name: info.shape for name, info in base.infos.items()}, config)
    matched = {}
    for name, expert in experts.items():
        permuted = _Matched(base, expert, groups)
        entries = {tensor: ComputedEntry(partial(permuted.read, tensor)) for tensor in expert}
        matched[name] = LazyStateDict(
            expert.path, entries, expert.infos, expert.metadata, tied=expert.tied, shards=expert.shards
        )
    units = sum(group.units for group in groups)
    heads = sum(group.name.startswith("heads") for group in groups)
    note = f"experts are aligned to the base by weight matching: {units} units in {len(groups)} groups"
    return matched, (f"{note}, {heads} of them heads" if heads else note,)
