"""Where a tensor stands in its model: how deep its block lies, from 0 for the first to 1 for the last."""

import re
from collections.abc import Mapping
from typing import Any

from mergeflow.merging.architectures.architecture import Architecture
from mergeflow.merging.architectures.blocks import BLOCK

# Outside the blocks a transformer has what makes tokens of its input, and behind them norms, projections and heads.
_FIRST = re.compile(
    r"embed|token|stem|\b(?:conv1|conv_proj|patch|pos|wte|wpe|shared|ln_pre|pre_?la?ye?rnorm|norm_pre)(?:\b|_)"
)


def depth(name: str, shapes: Mapping[str, Any], architecture: Architecture | None = None) -> float:
    """Return l/(L−1) of a tensor: its block's index among its tower's blocks; 0 before the blocks, 1 after them.

    Outside the blocks embeddings and positions come before, heads after them; of other tensors their names tell.

    Args:
        architecture: What the model's tensors are; by default nothing but their names is known.

    Example:
        >>> shapes = {f"visual.resblocks.{i}.w": () for i in range(5)}
        >>> depth("visual.resblocks.1.w", shapes), depth("visual.ln_post.bias", shapes), depth("visual.conv1.w", shapes)
        (0.25, 1.0, 0.0)
    """
    found = BLOCK.match(name)
    if not found:
        role = (architecture or Architecture()).role(name, shapes.get(name, ()))
        first = role != "head" and (role in ("embedding", "position") or _FIRST.search(name.lower()))
        return 0.0 if first else 1.0
    tower = found.group(1)
    blocks = [int(match.group(2)) for other in shapes if (match := BLOCK.match(other)) and match.group(1) == tower]
    return int(found.group(2)) / max(max(blocks), 1)
