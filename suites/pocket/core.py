"""What a suite is: named tasks, each a list of classes and a pure function from (split, index) to an image."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from PIL import Image

from mergeflow.data.task import Example
from mergeflow.errors import unknown_name
from suites.pocket.canvas import PHOTO, Style

TEMPLATES = ("a photo of {}", "an image of {}", "{}", "a picture of {}")

Painter = Callable[[Generator, int, Style], np.ndarray]
"""Draws one image of a task.

Args:
    rng: the image's own generator, from which all chance comes.
    label: the class, 0 … in order of the task's class names.
    style: how the image is rendered.

Returns:
    uint8 [32, 32, 3].
"""


def generator(*path: str | int) -> Generator:
    """Return the random generator of one thing, named by its path; the same on every machine and in any order.

    Example:
        >>> bool(generator("signs", "train", 3).random() == generator("signs", "train", 3).random())
        True
    """
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return Generator(PCG64(SeedSequence(words)))


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Args:
        name: the task's name, which also seeds its images.
        class_names: one name per label, in label order.
        counts: number of images of each split (train, validation, test).
        paint: draws an image uint8 [32, 32, 3] of a label, given a generator and a style.
        real: gives (image, label) of (split, index) where the images are data, not drawings.
        templates: prompts, `{}` stands for the class name.
    """

    name: str
    class_names: tuple[str, ...]
    counts: Mapping[str, int]
    paint: Painter
    real: Callable[[str, int], tuple[np.ndarray, int]] | None = None
    templates: tuple[str, ...] = TEMPLATES

    def sample(self, split: str, index: int) -> tuple[np.ndarray, int]:
        """Return image uint8 [32, 32, 3] and label number `index` of a split.

        Example:
            >>> from suites.pocket import get_suite
            >>> image, label = get_suite("pocket8").tasks["signs"].sample("test", 25)
            >>> image.shape, label
            ((32, 32, 3), 1)
        """
        if split not in self.counts:
            raise unknown_name("split", split, self.counts)
        if not 0 <= index < self.counts[split]:
            raise IndexError(f"{self.name} {split} has {self.counts[split]} images, no index {index}")
        if self.real is not None:
            return self.real(split, index)
        label = index % len(self.class_names)
        return self.paint(generator(self.name, split, index), label, PHOTO), label

    def arrays(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return all images uint8 [N, 32, 32, 3] and labels int64 [N] of a split."""
        pairs = [self.sample(split, index) for index in range(self.counts[split])]
        return np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs], dtype=np.int64)

    def draw(self, split: str) -> Iterator[Example]:
        """Yield the examples of a split; an image is drawn when it is read, as a Pillow image."""
        for index in range(self.counts[split]):
            label = index % len(self.class_names) if self.real is None else self.real(split, index)[1]
            yield Example(partial(self._picture, split, index), f"{self.name}/{split}/{index:05d}.png", label)

    def _picture(self, split: str, index: int) -> Image.Image:
        return Image.fromarray(self.sample(split, index)[0])


@dataclass(frozen=True)
class Suite:
    """A named list of tasks with disjoint class names."""

    name: str
    tasks: Mapping[str, SuiteTask]
