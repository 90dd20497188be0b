"""Where a tensor stands in its model: how deep its block lies, from 0 for the first to 1 for the last."""

import re
from collections.abc import Mapping
from typing import Any

from mergeflow.merging.architectures.architecture import Architecture
from mergeflow.merging.architectures.blocks import BLOCK

# Towers whose lists have a name of their own beside BLOCK's: LXMERT's pictures and pairs, Idefics' cross-attention.
_OWN_LIST = re.compile(
    r"^(.*?)\b(?:[rx]_layers|(?:gated_cross_attn|encoder|decoder|spatial|temporal|auxiliary|albert)_layers)\.(\d+)\."
)
# Outside the blocks a transformer has what makes tokens of its input, and behind them norms, projections and heads.
_FIRST = re.compile(
    r"embed|token|stem|(?:class|segment)_(?:pos_)?emb\b|feature_(?:extractor|projection)\.|subsampl|"
    r"\binput_(?:linear|layer|ff|conditioner|proj)|(?:encoder|tower)\.conv\d?\.|^conv\d\.|"
    r"\b(?:conv1|conv_proj|patch|pos|wte|wpe|shared|ln_pre|pre_?la?ye?r_?norm|norm_pre|la?ye?r_?norm_pre)(?:\b|_)"
)
# Of these names some are behind the blocks all the same: LFM2's last norm, a neck's convolutions.
_BEHIND = re.compile(r"(?:^|\.)embedding_norm\.|\bneck\.")


def block_of(name: str) -> re.Match[str] | None:
    """Match a tensor of a block: its tower, and its index there."""
    return BLOCK.match(name) or _OWN_LIST.match(name)


def _tower(block: re.Match[str]) -> str:
    return block.group(1) if block.re is BLOCK else block.string[: block.start(2)]


def depth(name: str, shapes: Mapping[str, Any], architecture: Architecture | None = None) -> float:
    """Return l/(L−1) of a tensor: its block's index among its tower's blocks; 0 before the blocks, 1 after them.

    Outside the blocks embeddings and positions come before, heads after them; of other tensors their names tell.

    Example:
        >>> shapes = {f"visual.resblocks.{i}.w": () for i in range(5)}
        >>> depth("visual.resblocks.1.w", shapes), depth("visual.ln_post.bias", shapes), depth("visual.conv1.w", shapes)
        (0.25, 1.0, 0.0)
    """
    block = block_of(name)
    if not block:
        role = (architecture or Architecture()).role(name, shapes.get(name, ()))
        first = role in ("embedding", "position") or _FIRST.search(name.lower())
        return 0.0 if first and role != "head" and not _BEHIND.search(name) else 1.0
    tower = _tower(block)
    blocks = [int(match.group(2)) for other in shapes if (match := block_of(other)) and _tower(match) == tower]
    return int(block.group(2)) / max(max(blocks), 1)
