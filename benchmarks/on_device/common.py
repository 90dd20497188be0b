"""What the sections share: clocks that wait for the device, synthetic images on disk, the device's speed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.modality import Network

Row = dict[str, Any]


def place(rehearse: bool) -> torch.device:
    return torch.device("cpu" if rehearse else "cuda:0")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float:
    """Return the most memory that tensors took on the device since `fresh`; 0 on the processor."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


@contextmanager
def fresh(device: torch.device, model: Network | None = None) -> Iterator[None]:
    """Begin with a device that holds a model's weights at most, so that a peak is this block's own."""
    if model is not None:
        model.module.zero_grad()
    if device.type == "cuda":
        torch.cuda.init()  # else there is no device yet whose peak could be set back
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield


def seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Shape:
    """A model with images to train on: `count` of them, at the model's size, in a memory map."""

    architecture: str
    batch_size: int
    steps: int
    count: int


def images(shape: Shape, side: int, folder: Path) -> torch.Tensor:
    """Return random images that lie in a file, as a prepared split's do.

    Args:
        shape: its `count` is the number of images.
        folder: where the file is and stays.

    Returns:
        uint8 [N, side, side, 3].
    """
    path = folder / f"{side}.npy"
    if not path.exists():
        made = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(shape.count, side, side, 3))
        made[:] = np.random.default_rng(0).integers(0, 256, made.shape, dtype=np.uint8)
        made.flush()
    return torch.from_numpy(np.load(path, mmap_mode="c"))


@contextmanager
def task(shape: Shape, device: torch.device) -> Iterator[tuple[Network, Classification]]:
    """Give a model with random weights on the device, and a task of random images with a frozen head."""
    clip = load_clip(shape.architecture, device=device)
    model, side, width = image_model(clip), clip.image_size, clip.model.visual.output_dim
    del clip  # and with it the tower for texts
    with TemporaryDirectory() as folder:
        pixels = images(shape, side, Path(folder))
        weight = nn.functional.normalize(torch.randn(10, width, generator=torch.Generator().manual_seed(0)), dim=1)
        head = Head(weight, 50.0, [str(label) for label in range(10)]).to(device)
        labels = (torch.arange(shape.count) % 10).to(device)
        yield model, Classification("random", pixels, labels, head)


def step_flops(model: Network, data: Classification) -> float:
    """Return the floating-point operations of a training step for one image, its backward pass among them."""
    with FlopCounterMode(display=False) as counter:
        data.loss(model, torch.arange(2)).backward()
    return counter.get_total_flops() / 2


def matmul_flops(device: torch.device, rehearse: bool) -> float:
    """Return the operations a second of a large bfloat16 product: the peak that a model can be held against."""
    side = 256 if rehearse else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product, count = torch.empty_like(a), 50
    for _ in range(count):  # until the device's clock is up
        torch.mm(a, b, out=product)
    took = seconds(lambda: [torch.mm(a, b, out=product) for _ in range(count)], device)
    return count * 2 * side**3 / took
