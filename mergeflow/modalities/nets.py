"""Nets that are trained from random weights and give logits: MLPs and residual nets for small images."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from mergeflow.errors import MergeflowError
from mergeflow.modalities.modules import own_generator
from mergeflow.schema import check_seed


def mlp(widths: Sequence[int], seed: int = 0) -> nn.Sequential:
    """Return linear layers with biases and a ReLU between each two; inputs are flattened.

    Args:
        widths: Of the inputs, of every hidden layer, and the number of classes.
    """
    check_seed(seed)
    with own_generator(seed):
        parts: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class SmallResNet(nn.Module):
    """A residual net for small images: a 3×3 stem and three stages of torchvision's basic blocks.

    Args:
        width: Channels of the first stage, at least 8; the others have 2 and 4 times as many. With fewer, oneDNN's
            strided convolutions write out of bounds while training on processors with AVX2 alone (torch 2.15).

    Source: He et al. 2016, Deep residual learning, Section 4.2.
    """

    def __init__(self, classes: int, width: int = 16, blocks: int = 3, seed: int = 0) -> None:
        from torchvision.models.resnet import BasicBlock, conv1x1

        super().__init__()
        if width < 8:
            raise ValueError(f"a SmallResNet is {width} channels wide; give at least 8")
        check_seed(seed)
        with own_generator(seed):
            self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
            self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU()
            inputs = width
            for stage in range(3):
                outputs, parts = width * 2**stage, []
                for number in range(blocks):
                    stride = 2 if stage and not number else 1
                    shortcut = None
                    if inputs != outputs:
                        shortcut = nn.Sequential(conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))
                    parts.append(BasicBlock(inputs, outputs, stride, shortcut))
                    inputs = outputs
                setattr(self, f"layer{stage + 1}", nn.Sequential(*parts))
            self.fc = nn.Linear(inputs, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits [n, C] of pixels [n, 3, S, S]."""
        hidden = self.relu(self.bn1(self.conv1(pixels)))
        for stage in (1, 2, 3):
            hidden = self.get_submodule(f"layer{stage}")(hidden)
        logits: Tensor = self.fc(hidden.mean((2, 3)))
        return logits


def resnet18(classes: int, seed: int = 0) -> nn.Module:
    """Return torchvision's ResNet-18 with a 3×3 stem of stride 1, for images of 32 pixels."""
    from torchvision.models import resnet18 as full

    check_seed(seed)
    with own_generator(seed):
        net = full(num_classes=classes)
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return net


def pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uint8 images [n, S, S, 3] as [n, 3, S, S] in −1 … 1."""
    return images.permute(0, 3, 1, 2).to(dtype) / 127.5 - 1


def on_pixels(module: nn.Module, images: Tensor) -> Tensor:
    """Call a net of normalised float images [n, 3, S, S] on uint8 images [n, S, S, 3], as `Classification.encode`."""
    logits: Tensor = module(pixels(images, next(module.parameters()).dtype))
    return logits


def recompute_statistics(module: nn.Module, batches: Sequence[Tensor]) -> None:
    """Set BatchNorm's running mean and variance to those over batches of the module's inputs.

    Each batch, [n, ...], counts alike; at the end the module is in evaluation mode.

    Source: Izmailov et al. 2018, Averaging weights leads to wider optima, Section 3.2.
    """
    if not batches:
        raise MergeflowError("BatchNorm's statistics are computed from samples, and there are none.")
    update_bn(batches, module)
    module.eval()
