"""fashion: ten kinds of clothes, shoes and bags, grey on black (counterpart of FashionMNIST)."""

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from PIL import Image

from suites.pocket.canvas import (
    CANVAS,
    COLUMNS,
    ROWS,
    SIZE,
    Camera,
    Colour,
    Pen,
    Points,
    Style,
    cloud,
    photograph,
    reduce_canvas,
)
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

BLACK: Colour = (0, 0, 0)

_CAMERA = Camera(blur=(0.0, 0.8), shading=0.3, noise=(2.0, 12.0))


class Piece:
    """A pen with a cloth's grey, darker and lighter shades of it, and proportions that vary from image to image."""

    def __init__(self, pen: Pen) -> None:
        self.pen = pen
        self.tone = float(pen.rng.uniform(75, 235))
        self.a, self.b, self.c = pen.rng.random(3).tolist()
        self.cloth = self.shade(1.0)
        self.dark = self.shade(0.55)
        self.light = self.shade(1.3)

    def shade(self, factor: float) -> Colour:
        """Return the cloth's grey times a factor."""
        grey = min(255, int(self.tone * factor))
        return (grey, grey, grey)

    def both(self, points: Points, fill: Colour) -> None:
        """Fill a polygon and its mirror image; corners on the axis cross it, so that no gap opens between the two."""
        half = [(x or -0.08, y) for x, y in points]
        self.pen.polygon(half, fill)
        self.pen.polygon([(-x, y) for x, y in half], fill)

    def torso(self, wide: float, top: float, bottom: float, neck: float) -> None:
        """Fill a trunk from shoulders to hem.

        Args:
            wide: half the width of the shoulders; the hem is a little narrower or wider.
        """
        low = wide * (0.95 + 0.15 * self.a)
        self.both([(0, top + 0.1), (neck, top), (wide, top + 0.12), (low, bottom), (0, bottom)], self.cloth)

    def sleeves(self, wide: float, top: float, length: float, spread: float) -> None:
        """Fill two sleeves hanging from the shoulders.

        Args:
            length: from shoulder to cuff, downwards.
            spread: how far the cuffs stand out from the shoulders.
        """
        x, y = wide + spread, top + 0.12 + length
        self.both(
            [(wide - 0.08, top + 0.06), (x + 0.06, y), (x - 0.14, y + 0.05), (wide - 0.05, top + 0.5)], self.cloth
        )


def t_shirt(p: Piece) -> None:
    p.sleeves(0.46, -0.7, 0.25 + 0.35 * p.b, 0.4 - 0.1 * p.b)
    p.torso(0.46, -0.7, 0.55 + 0.25 * p.c, 0.22)
    p.pen.oval(0, -0.68, 0.2, 0.08 + 0.12 * p.a, BLACK)


def trousers(p: Piece) -> None:
    wide, hem = 0.3 + 0.08 * p.a, 0.14 + 0.1 * p.b
    p.both([(0, -0.9), (wide, -0.9), (wide + 0.06, -0.4), (0.14 + hem, 0.92), (0.12, 0.92), (0.01, -0.25)], p.cloth)
    p.pen.box(-wide, -0.92, wide, -0.8, p.dark)


def pullover(p: Piece) -> None:
    p.sleeves(0.4, -0.7, 1.05 + 0.15 * p.b, 0.3)
    p.torso(0.42, -0.7, 0.7, 0.2)
    p.pen.oval(0, -0.66, 0.2, 0.05 + 0.08 * p.c, p.dark)
    if p.a < 0.7:
        p.pen.box(-0.43, 0.58, 0.43, 0.74, p.dark)


def dress(p: Piece) -> None:
    waist, hem = 0.17 + 0.05 * p.a, 0.38 + 0.22 * p.b
    p.both(
        [(0.08, -0.62), (0.13, -0.92), (0.2, -0.92), (0.28, -0.55), (waist, -0.2), (hem, 0.92), (0, 0.95), (0, -0.55)],
        p.cloth,
    )
    if p.c < 0.5:
        p.pen.line([(-waist, -0.2), (waist, -0.2)], 0.07, p.dark)


def coat(p: Piece) -> None:
    p.sleeves(0.4, -0.85, 1.2 + 0.15 * p.b, 0.3)
    p.torso(0.43, -0.85, 0.75 + 0.2 * p.c, 0.18)
    open_at = -0.55 + 0.4 * p.c
    p.both([(0, open_at + 0.15), (0.0, open_at), (0.14, -0.86), (0.26, -0.72)], p.dark)
    p.pen.line([(0, open_at), (0, 0.95)], 0.06, p.dark if p.a < 0.5 else BLACK)
    if p.b < 0.5:
        for side in (-1, 1):
            p.pen.line([(side * 0.15, 0.3), (side * 0.33, 0.24)], 0.06, p.dark)


def sandal(p: Piece) -> None:
    heel = 0.05 + 0.35 * p.a
    ball, back = 0.5, 0.5 - heel
    upper = [(-0.9, 0.45), (-0.1, 0.42), (0.55, back - 0.06), (0.88, back - 0.06), (0.8, 0.68), (0.62, 0.68)]
    p.pen.polygon([*upper, (0.5, back + 0.16), (-0.05, 0.64), (-0.88, 0.62)], p.cloth)
    p.pen.polygon([(-0.68, ball), (-0.5, 0.12), (-0.32 + 0.2 * p.b, 0.08), (-0.22 + 0.2 * p.b, ball)], p.light)
    p.pen.line([(0.35, back - 0.5), (0.82, back - 0.45), (0.82, back)], 0.11, p.light)
    if p.c < 0.5:
        p.pen.line([(-0.35, 0.15), (0.35, back - 0.5)], 0.09, p.light)
    else:
        p.pen.line([(0.1, 0.4), (0.35, back - 0.5), (0.6, back)], 0.09, p.light)


def shirt(p: Piece) -> None:
    p.sleeves(0.4, -0.76, 0.55 + 0.55 * p.b, 0.32)
    p.torso(0.4, -0.76, 0.6 + 0.25 * p.c, 0.16)
    p.both([(0, -0.5), (0.0, -0.74), (0.12, -0.88), (0.24, -0.7), (0.1, -0.48)], p.light if p.a < 0.5 else p.cloth)
    p.pen.polygon([(-0.08, -0.8), (0.08, -0.8), (0, -0.56)], BLACK)
    if p.a < 0.6:
        for k in range(4):
            p.pen.disc(0, -0.32 + 0.28 * k, 0.05, p.dark)
    else:
        p.pen.line([(0, -0.5), (0, 0.8)], 0.05, p.dark)


def sneaker(p: Piece) -> None:
    top = -0.15 - 0.12 * p.a
    p.pen.polygon(
        [
            (-0.92, 0.42),
            (-0.88, 0.2),
            (-0.45, 0.08),
            (0.0, top),
            (0.2, top),
            (0.4, 0.0),
            (0.72, top - 0.05),
            (0.88, top),
            (0.9, 0.42),
        ],
        p.cloth,
    )
    p.pen.polygon([(-0.95, 0.4), (0.93, 0.4), (0.93, 0.56), (-0.92, 0.56)], p.light if p.b < 0.6 else p.dark)
    for k in range(3):
        p.pen.line([(-0.38 + 0.17 * k, 0.0 - 0.06 * k), (-0.26 + 0.17 * k, 0.22 - 0.06 * k)], 0.05, p.dark)


def handbag(p: Piece) -> None:
    low, high, top = 0.62 + 0.2 * p.a, 0.5 + 0.2 * p.b, -0.15 + 0.1 * p.c
    p.pen.ring(0, top, 0.36 + 0.12 * p.c, 0.11, p.light)
    p.pen.polygon([(-high, top), (high, top), (low, 0.7), (-low, 0.7)], p.cloth)
    if p.b < 0.5:
        p.pen.polygon([(-high, top), (high, top), (0, top + 0.4)], p.dark)
    else:
        p.pen.line([(-high, top + 0.15), (high, top + 0.15)], 0.08, p.dark)


def ankle_boot(p: Piece) -> None:
    top = -0.75 + 0.2 * p.a
    p.pen.polygon(
        [(-0.85, 0.55), (-0.8, 0.3), (-0.3, 0.12), (-0.1, -0.1), (-0.12, top), (0.62, top), (0.62, 0.55)], p.cloth
    )
    p.pen.box(0.25, 0.5, 0.64, 0.62 + 0.22 * p.b, p.dark)
    p.pen.box(-0.85, 0.5, 0.3, 0.62, p.dark)
    if p.c < 0.5:
        p.pen.line([(-0.1, top + 0.06), (0.6, top + 0.06)], 0.12, p.light)
    else:
        p.pen.line([(0.26, top), (0.26, 0.1)], 0.09, p.dark)


_DRAWN: dict[str, Callable[[Piece], None]] = {
    "t-shirt": t_shirt,
    "trousers": trousers,
    "pullover": pullover,
    "dress": dress,
    "coat": coat,
    "sandal": sandal,
    "shirt": shirt,
    "sneaker": sneaker,
    "handbag": handbag,
    "ankle boot": ankle_boot,
}


def _fabric(rng: Generator, style: Style) -> np.ndarray:
    """Return factors [32, 32] of the cloth's brightness: folds, and stripes or checks on some pieces."""
    a, b, c, d = rng.random(4).tolist()
    light = 1 + (0.17 if style.clutter else 0.07) * cloud(rng, 5, SIZE)
    if a < 0.5 and style.clutter:
        wave, depth = 9 + 12 * b, 0.15 + 0.35 * c
        light = light * (1 + depth * np.sin(wave * (COLUMNS if d < 0.4 else ROWS) + 7 * d))
        if d > 0.75:
            light = light * (1 + depth * np.sin(wave * COLUMNS + 7 * b))
    return np.asarray(light)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a piece in the middle; shoes and bags are mirrored half of the time: uint8 [32, 32, 3]."""
    image = Image.new("RGB", (CANVAS, CANVAS))
    a, b, c = rng.standard_normal(3).tolist()
    scale = 0.78 + 0.2 * float(rng.random())
    jitter = 0.04 if style.clutter else 0.015
    pen = Pen(image, rng, math.radians(4) * a, scale, (0.06 * b, 0.06 * c), flip=rng.random() < 0.5, jitter=jitter)
    tuple(_DRAWN.values())[label](Piece(pen))
    pixels = np.clip(reduce_canvas(image) * _fabric(rng, style)[:, :, None], 0, 255)
    return photograph(pixels, rng, _CAMERA, style)


TASK = SuiteTask("fashion", tuple(_DRAWN), COUNTS, paint)
