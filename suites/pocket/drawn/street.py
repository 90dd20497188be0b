"""street: house numbers in many typefaces and colours, neighbours at the borders (counterpart of SVHN)."""

import numpy as np
from numpy.random import Generator
from PIL import Image

from suites.pocket.canvas import CANVAS, Camera, Style, any_colour, contrasting, ground, photograph
from suites.pocket.core import SuiteTask
from suites.pocket.drawn.digits import NUMBERS
from suites.pocket.fonts import FACES, glyph, turned

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.7), shading=0.4, noise=(2.0, 8.0), light=(0.8, 1.1))


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a number in the middle, parts of others beside it when the style has clutter: uint8 [32, 32, 3]."""
    back = any_colour(rng, 20, 235)
    ink = contrasting(rng, back, 85)
    image = ground(rng, back, 8, style)
    face = FACES[rng.integers(len(FACES))]
    a, b, c, d = rng.standard_normal(4).tolist()
    angle, scale, shift = 0.1 * a, 0.95 + 0.09 * b, (2.5 * c, 2 * d)
    full = Image.new("RGB", (CANVAS, CANVAS), ink)
    image.paste(full, mask=turned(glyph(face, label), angle, scale, shift))
    if style.clutter:
        for side in (-1, 1):
            if rng.random() < 0.6:
                neighbour = (shift[0] + side * rng.uniform(36, 42) * scale, shift[1])
                image.paste(full, mask=turned(glyph(face, int(rng.integers(10))), angle, scale, neighbour))
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("street", tuple(f"street number {n}" for n in NUMBERS), COUNTS, paint)
