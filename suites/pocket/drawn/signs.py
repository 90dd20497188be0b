"""signs: six shapes in four colours with pictograms (counterpart of GTSRB)."""

import math

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import (
    Camera,
    Colour,
    Pen,
    Points,
    Style,
    any_colour,
    ground,
    photograph,
    regular,
    vary,
)
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}
COLOURS: dict[str, Colour] = {
    "red": (205, 25, 30),
    "blue": (25, 75, 200),
    "yellow": (240, 200, 20),
    "green": (20, 140, 60),
}
_QUARTER = [(0.4, -1.0), (0.4, -0.4), (1.0, -0.4)]  # a cross, turned by quarters below
_CROSS: Points = [
    point
    for x, y in ((1, 1), (1, -1), (-1, -1), (-1, 1))
    for point in [(x * a, y * b) for a, b in (_QUARTER if x == y else _QUARTER[::-1])]
]
SHAPES: dict[str, Points] = {
    "round": regular(24),
    "triangular": regular(3, 1.15),
    "square": regular(4, 1.2, math.pi / 4),
    "diamond": regular(4, 1.1),
    "inverted": regular(3, 1.15, math.pi),
    "cross": _CROSS,
}
CLASSES = tuple(f"{colour} {shape} sign" for shape in SHAPES for colour in COLOURS)

_CAMERA = Camera(blur=(0.0, 0.5), shading=0.3, noise=(2.0, 7.0), light=(0.7, 1.1))


def _pictogram(pen: Pen, kind: int, ink: Colour) -> None:
    """Draw one of six small marks in the middle of the sign."""
    if kind == 0:
        pen.box(-0.3, -0.09, 0.3, 0.09, ink)
    elif kind == 1:
        pen.box(-0.08, -0.3, 0.08, 0.3, ink)
    elif kind == 2:
        pen.disc(0, 0, 0.2, ink)
    elif kind == 3:
        pen.polygon([(0, -0.32), (0.26, 0.22), (-0.26, 0.22)], ink)
    elif kind == 4:
        pen.disc(-0.17, 0, 0.11, ink)
        pen.disc(0.17, 0, 0.11, ink)
    else:
        pen.line([(-0.22, 0.24), (-0.22, -0.1), (0.24, -0.1)], 0.13, ink)


def _clutter(rng: Generator, image_pen: Pen) -> None:
    """Put a pole and two or three boxes behind the sign."""
    for x, y, w, h in (rng.random((3, 4)) * (2, 2, 0.9, 0.9)).tolist():
        image_pen.box(x - 1.2, y - 1.2, x - 1.2 + w, y - 1.2 + h, any_colour(rng, 50, 190))
    image_pen.box(-0.06, 0, 0.06, 1, any_colour(rng, 90, 150))


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a sign of radius 20 to 27 of 64 pixels with a white face or a full one: uint8 [32, 32, 3]."""
    shape, name = divmod(label, len(COLOURS))
    colour = vary(rng, tuple(COLOURS.values())[name], 50)
    grey = int(rng.integers(60, 200))
    image = ground(rng, vary(rng, (grey, grey, grey), 60), 12, style)
    if style.clutter:
        _clutter(rng, Pen(image, rng))
    a, b, c = rng.standard_normal(3).tolist()
    turn, shift = 0.07 * c, (0.07 * a, 0.07 * b)
    scale = float(rng.uniform(0.62, 0.84))
    points = tuple(SHAPES.values())[shape]
    rim = rng.random() < 0.6
    if rim:
        Pen(image, rng, turn, scale * 1.12, shift).polygon(points, (240, 240, 240))
    Pen(image, rng, turn, scale, shift).polygon(points, colour)
    face = rng.random() < 0.45
    if face:
        Pen(image, rng, turn, scale * 0.6, shift).polygon(points, (238, 238, 238))
    _pictogram(Pen(image, rng, turn, scale, shift), int(rng.integers(6)), (20, 20, 20) if face else (240, 240, 240))
    return photograph(image, rng, _CAMERA, style, hue=False)


TASK = SuiteTask("signs", CLASSES, COUNTS, paint)
