"""land: ten kinds of land cover seen from a satellite (counterpart of EuroSAT)."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Style, ground, photograph, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.2, 0.8), shading=0.2, noise=(2.0, 8.0))
_ROOFS: tuple[Colour, ...] = ((165, 80, 60), (150, 140, 135), (190, 120, 90), (120, 70, 60))
_FIELDS: tuple[Colour, ...] = ((195, 170, 110), (150, 130, 85), (120, 150, 70), (175, 180, 100), (140, 105, 75))


def _uniform(pen: Pen, count: int) -> list[tuple[float, float]]:
    return (pen.rng.random((count, 2)) * 2.3 - 1.15).tolist()


def forest(pen: Pen) -> None:
    for k, (x, y) in enumerate(_uniform(pen, 70)):
        pen.disc(x, y, 0.13, vary(pen.rng, (22, 62, 32) if k % 2 else (45, 95, 45), 25))


def _bend(pen: Pen, bow: float) -> list[tuple[float, float]]:
    a, b = (bow * pen.rng.standard_normal(2)).tolist()
    return [(-1.5, 0.0), (-0.75, a), (0.0, (a + b) / 2), (0.75, b), (1.5, 0.0)]


def river(pen: Pen) -> None:
    pen.line(_bend(pen, 0.35), float(pen.rng.uniform(0.4, 0.6)), vary(pen.rng, (45, 80, 120), 40))


def highway(pen: Pen) -> None:
    grey = vary(pen.rng, (150, 148, 145), 30)
    pen.line(_bend(pen, 0.06), 0.34, grey)
    pen.line([(-1.5, 0), (1.5, 0)], 0.05, (235, 235, 225))
    if pen.rng.random() < 0.6:
        x = float(pen.rng.uniform(-0.5, 0.5))
        pen.line([(x, -1.5), (x + 0.2, 1.5)], 0.2, grey)


def residential(pen: Pen) -> None:
    for x in (-0.9, -0.36, 0.18, 0.72):
        for y in (-0.9, -0.36, 0.18, 0.72):
            a, b, c = pen.rng.random(3).tolist()
            if c < 0.88:
                pen.box(x + 0.1 * a, y + 0.1 * b, x + 0.34, y + 0.3, vary(pen.rng, _ROOFS[int(4 * a)], 40))
    pen.line([(-1.5, 0.07), (1.5, 0.07)], 0.09, (150, 150, 145))


def industrial(pen: Pen) -> None:
    for x, y in ((-0.95, -0.9), (0.1, -0.85), (-0.9, 0.1), (0.15, 0.15)):
        a, b, c = pen.rng.random(3).tolist()
        roof = vary(pen.rng, (225, 225, 228) if c < 0.6 else (120, 140, 170), 40)
        pen.box(x, y, x + 0.55 + 0.35 * a, y + 0.45 + 0.35 * b, roof)
        pen.box(x, y + 0.4, x + 0.55, y + 0.45, (95, 95, 100))


def lake(pen: Pen) -> None:
    if pen.rng.random() < 0.5:
        shore = vary(pen.rng, (90, 115, 65), 40)
        pen.polygon([(-1.6, -1.6), (1.6, -1.6), (1.6, -0.85), (0, -0.75), (-1.6, -0.9)], shore)


def annual_crop(pen: Pen) -> None:
    x = -1.5
    while x < 1.5:
        wide = float(pen.rng.uniform(0.45, 0.9))
        cut = float(pen.rng.uniform(-0.6, 0.6))
        for top, bottom in ((-1.5, cut), (cut, 1.5)):
            pen.box(x, top, x + wide, bottom, vary(pen.rng, _FIELDS[pen.rng.integers(len(_FIELDS))], 30))
        x += wide


def pasture(pen: Pen) -> None:
    hedge = vary(pen.rng, (55, 90, 40), 25)
    x, y = pen.rng.uniform(-0.5, 0.5, 2).tolist()
    pen.line([(-1.5, y), (1.5, y + 0.2)], 0.07, hedge)
    if pen.rng.random() < 0.5:
        pen.line([(x, -1.5), (x, y)], 0.07, hedge)


def heath(pen: Pen) -> None:
    for k, (x, y) in enumerate(_uniform(pen, 26)):
        pen.oval(x, y, 0.22, 0.12, vary(pen.rng, (120, 92, 98) if k % 2 else (105, 100, 55), 30))


def orchard(pen: Pen) -> None:
    crown = vary(pen.rng, (50, 90, 40), 30)
    for row in range(-4, 5):
        for column in range(-4, 5):
            pen.disc(0.36 * column, 0.36 * row, 0.12, crown)


_GREEN, _DARK, _BLUE, _SOIL, _OLIVE = (105, 130, 70), (35, 75, 38), (35, 70, 125), (180, 155, 110), (128, 122, 72)
KINDS: dict[str, tuple[Callable[[Pen], None], Colour, float]] = {
    "forest": (forest, _DARK, 8),
    "river": (river, _GREEN, 14),
    "highway": (highway, (125, 130, 85), 14),
    "residential area": (residential, (110, 125, 85), 10),
    "industrial area": (industrial, (140, 138, 132), 8),
    "lake": (lake, _BLUE, 5),
    "annual crop": (annual_crop, _SOIL, 6),
    "pasture": (pasture, (125, 165, 75), 10),
    "heath": (heath, _OLIVE, 14),
    "orchard": (orchard, _SOIL, 8),
}


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a patch of land, turned at random: uint8 [32, 32, 3]."""
    kind, colour, rough = tuple(KINDS.values())[label]
    image = ground(rng, vary(rng, colour, 45 * style.spread), rough, style)
    a, b, c, d = rng.random(4).tolist()
    kind(Pen(image, rng, 6.2832 * a, 0.9 + 0.3 * b, (0.5 * c - 0.25, 0.5 * d - 0.25)))
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("land", tuple(KINDS), COUNTS, paint)
