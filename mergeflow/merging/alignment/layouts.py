"""Which units of a known architecture may be permuted together: found from names and shapes."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.merging.alignment.groups import Group, Place

Shapes = Mapping[str, Sequence[int]]
Config = Mapping[str, Any]
_KNOWN = (
    "chains of linear layers, residual nets with torchvision's names, open_clip's vision transformers, and encoders "
    "with the names of BERT, RoBERTa or ViT in transformers"
)


def find_groups(shapes: Shapes, config: Config | None = None) -> list[Group]:
    """Return the groups of units that may be permuted without changing the function.

    Args:
        shapes: Name → shape of every tensor.
        config: config.json, where there is one: the number of attention heads. Without it heads keep their order.

    Returns:
        Groups that share no axis of a tensor.

    Raises:
        MergeflowError: the architecture is not known.

    Source:
        Ainsworth et al. 2023, Git Re-Basin, Section 3 and Appendix A.
    """
    for finder in (_residual, _transformer, _chain):
        found = finder(shapes, config or {})
        if found:
            return found
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
    return [*groups, *(Group(name, shapes[f"{name}.weight"][0], tuple(places)) for name, places in streams)]


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
    found = [Group(up, shapes[f"{up}.weight"][0], (*_linear(up, shapes, 0), *_linear(down, shapes, 1)))]
    heads, width = _heads(config), shapes[f"{out}.weight"][1]
    if not heads or width % heads:
        return found
    size = width // heads
    if "fused" in table:
        parts = [f"{block}.{table['fused']}{part}" for part in ("weight", "bias")]
        places = [Place(part, 0, third * width, size) for part in parts if part in shapes for third in range(3)]
    else:
        names = next(names for names in table["apart"] if f"{block}.{names[0]}.weight" in shapes)
        places = [Place(place.name, 0, 0, size) for name in names for place in _linear(f"{block}.{name}", shapes, 0)]
    return [*found, Group(f"heads of {out}", heads, (*places, Place(f"{out}.weight", 1, 0, size)))]


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
