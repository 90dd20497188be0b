"""digits: scikit-learn's real handwritten digits (counterpart of MNIST).

The images of the task are data. `paint` writes digits in printed typefaces, distorted: for pre-training, and for the
suite pocket-digits, which has as many as it takes to train a network from nothing.
"""

from functools import cache

import numpy as np
from numpy.random import Generator
from PIL import Image

from suites.pocket.canvas import SIZE, Camera, Style, cloud, photograph
from suites.pocket.core import SuiteTask
from suites.pocket.fonts import FACES, glyph, turned

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTS = {"train": 1097, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.6), shading=0.0, noise=(0.0, 4.0), light=(0.8, 1.0))


@cache
def _scanned() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return the 1797 scans uint8 [N, 8, 8], labels, and the indices of each split in a fixed shuffled order."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    order = np.random.Generator(np.random.PCG64(8)).permutation(len(scans.images))
    starts = np.cumsum([0, *COUNTS.values()])
    parts = {split: order[starts[k] : starts[k + 1]] for k, split in enumerate(COUNTS)}
    return np.round(scans.images * (255 / 16)).astype(np.uint8), scans.target, parts


def real(split: str, index: int) -> tuple[np.ndarray, int]:
    """Return scan number `index` of a split, 8x8 enlarged, grey as RGB uint8 [32, 32, 3], and its label."""
    images, labels, parts = _scanned()
    which = parts[split][index]
    return _enlarge(Image.fromarray(images[which])), int(labels[which])


def _enlarge(small: Image.Image) -> np.ndarray:
    large = np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return np.repeat(large[:, :, None], 3, axis=2)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Write a digit, white on black, sheared, waved and mostly reduced to 8x8 and back: uint8 [32, 32, 3]."""
    a, b, c, d, e = rng.standard_normal(5).tolist()
    mask = turned(
        glyph(FACES[rng.integers(len(FACES))], label), 0.12 * a, 1.02 + 0.08 * b, (2 * c, 2 * d), shear=0.12 * e
    )
    pixels = np.asarray(mask, dtype=np.float32)
    rows, columns = np.indices(pixels.shape)
    dx, dy = np.rint(2.5 * cloud(rng, 4)).astype(int), np.rint(2.5 * cloud(rng, 4)).astype(int)
    pixels = pixels[np.clip(rows + dy, 0, 63), np.clip(columns + dx, 0, 63)]
    side = 8 if rng.random() < 0.7 else 16
    small = Image.fromarray(pixels.astype(np.uint8)).reduce(64 // side)
    if side == 8 and rng.random() < 0.8:  # the scans have strong strokes
        small = small.point([min(255, int(v * 1.6)) for v in range(256)])
    return photograph(_enlarge(small).astype(np.float32), rng, _CAMERA, style, hue=False)


CLASSES = tuple(f"handwritten digit {n}" for n in NUMBERS)
TASK = SuiteTask("digits", CLASSES, COUNTS, paint, real)
# Drawn, because 1 097 scans are too few to train a network from nothing.
DRAWN = SuiteTask("pocket-digits", CLASSES, {"train": 12_000, "validation": 1_000, "test": 2_000}, paint)
