"""Tasks that are a set of digits in one look: turned, outlined or in other colours; and the net that knows all ten."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mergeflow.modalities.classification import Classification
from mergeflow.modalities.nets import on_pixels
from studies.lab.coloured import ColouredWorld, Digits, Pretrained, from_clip, small_transformer
from studies.lab.coloured_clip import clip_of_digits
from studies.lab.tuning import trained

TEN = tuple(range(10))


@dataclass(frozen=True)
class Look:
    """How digits are shown.

    Attributes:
        angle: they are turned by, in degrees.
        dark: black on yellow instead of white on black.
        outlined: only the edges of the strokes are drawn.
    """

    angle: float = 0.0
    dark: bool = False
    outlined: bool = False

    def show(self, grey: np.ndarray) -> np.ndarray:
        """Return pictures uint8 [n, S, S, 3].

        Args:
            grey: white on black, uint8 [n, S, S].
        """
        from scipy.ndimage import morphological_gradient, rotate

        turned = rotate(grey, self.angle, axes=(2, 1), reshape=False, order=1) if self.angle else grey
        if self.outlined:
            turned = morphological_gradient(turned, size=(1, 3, 3))
        if not self.dark:
            return np.repeat(turned[..., None], 3, axis=3)
        light = 255 - turned
        return np.stack([light, light, np.zeros_like(light)], axis=3)


def shown(digits: Digits, look: Look, name: str, chosen: Collection[int] = TEN) -> Classification:
    """Return a task of ten classes, of which it has the chosen ones.

    Args:
        digits: in black and white.
        look: how they are shown.
        name: of the task.
        chosen: digits of the task.
    """
    rows = np.isin(digits.digit, list(chosen))
    images, labels = look.show(digits.grey[rows]), digits.digit[rows]
    return Classification(name, torch.from_numpy(images), torch.from_numpy(labels), encode=on_pixels)


def ten_digits(world: ColouredWorld, digits: Mapping[str, Digits], seed: int) -> Pretrained:
    """Return a small transformer that has learnt to tell the ten digits, white on black and upright; or a CLIP.

    Args:
        world: its sizes and settings.
        digits: the splits.
        seed: of weights and order.
    """
    if world.clip is not None:
        return from_clip(clip_of_digits(world.clip, world.size, [(digit,) for digit in TEN]))
    net = small_transformer(world, 10, seed)
    return Pretrained(net, trained(net, net.state(), shown(digits["train"], Look(), "digits"), world.pretrain, seed))
