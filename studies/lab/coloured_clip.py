"""A CLIP that answers about digits: its image tower, and a head from prompts, frozen or tuned beside the tower."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.heads import build_head
from mergeflow.modalities.vision.models import ClipModel, ImageEncoder, load_clip
from mergeflow.modality import Network
from suites.pocket.drawn.digits import NUMBERS
from tasks.project.sections import Section


class ClipBase(Section):
    """What Ψ^(0) is instead of a net from nothing.

    architecture, pretrained: as in params.yaml's `model`. head: `zero-shot`, from the prompts and frozen, or `trained`,
    from the same prompts and tuned beside the tower. templates: prompts; `{}` stands for a digit's name, such as seven.
    """

    architecture: str = "pocket-clip"
    pretrained: str = "pocket8"
    head: Literal["zero-shot", "trained"] = "zero-shot"
    templates: list[str] = Field(["a photo of handwritten digit {}"], min_length=1)


class _Answering(nn.Module):
    """Logits s · f Wᵀ of the tower's features f; W is a part of the weights only if it is trained."""

    def __init__(self, clip: ClipModel, rows: Tensor, scale: float, trained: bool) -> None:
        super().__init__()
        self.tower, self.scale = ImageEncoder(clip), scale
        if trained:
            self.rows: Tensor = nn.Parameter(rows)
        else:
            self.register_buffer("rows", rows, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits [n, C] of pixels [n, 3, S, S] in −1 … 1, as the studies' nets take them."""
        images = ((pixels + 1) * 127.5).permute(0, 2, 3, 1)  # the tower normalises by itself
        logits: Tensor = self.scale * self.tower(images) @ self.rows.T
        return logits


def clip_of_digits(chosen: ClipBase, size: int, groups: Sequence[Sequence[int]]) -> Network:
    """Return a CLIP with a logit for each group of digits.

    w_g = n(1/|g| Σ_{d∈g} n(text(d)))

    Args:
        chosen: which CLIP, and whether its head is trained.
        size: pixels a side of the pictures.
        groups: the digits that each logit stands for.

    Raises:
        MergeflowError: no such CLIP, or pictures of another size than it takes.
    """
    clip = load_clip(chosen.architecture, chosen.pretrained)
    if clip.image_size != size:
        raise MergeflowError(
            f"{chosen.architecture} takes pictures of {clip.image_size} pixels a side and the world's `size` is "
            f"{size}: write size: {clip.image_size}."
        )
    ten = build_head(clip, NUMBERS, chosen.templates)
    rows = torch.stack([ten.weight.detach()[list(group)].mean(0) for group in groups])
    rows = nn.functional.normalize(rows, dim=1)
    return Network(_Answering(clip, rows, ten.logit_scale, chosen.head == "trained").eval())
