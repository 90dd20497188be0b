"""aerial: eighteen objects and layouts seen from above (counterpart of RESISC45)."""

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Style, any_colour, ground, photograph, regular, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.7), shading=0.25, noise=(3.0, 10.0))
_GREEN, _GREY, _BLUE, _SAND = (95, 125, 70), (140, 140, 140), (40, 90, 140), (205, 185, 140)
_WHITE: Colour = (235, 235, 235)


def airplane(pen: Pen) -> None:
    pen.polygon([(-0.75, 0.15), (0.0, -0.2), (0.75, 0.15), (0.75, 0.28), (0.0, 0.12), (-0.75, 0.28)], _WHITE)
    pen.oval(0, 0, 0.13, 0.8, _WHITE)
    pen.polygon([(-0.28, 0.75), (0, 0.5), (0.28, 0.75)], _WHITE)


def baseball_diamond(pen: Pen) -> None:
    pen.polygon([(0, 0.75), (-0.85, -0.1), (-0.5, -0.7), (0.5, -0.7), (0.85, -0.1)], (75, 145, 65))
    pen.polygon([(0, 0.75), (-0.45, 0.28), (0, -0.2), (0.45, 0.28)], (190, 140, 95))
    pen.polygon([(0, 0.5), (-0.22, 0.28), (0, 0.04), (0.22, 0.28)], (75, 145, 65))


def tennis_court(pen: Pen) -> None:
    court = vary(pen.rng, (170, 85, 65) if pen.rng.random() < 0.5 else (50, 100, 160), 30)
    pen.box(-0.55, -0.85, 0.55, 0.85, court)
    for y in (-0.7, -0.35, 0.35, 0.7):
        pen.line([(-0.4, y), (0.4, y)], 0.05, _WHITE)
    for x in (-0.4, 0.4):
        pen.line([(x, -0.7), (x, 0.7)], 0.05, _WHITE)
    pen.line([(-0.5, 0), (0.5, 0)], 0.08, (30, 30, 30))


def bridge(pen: Pen) -> None:
    pen.line([(-1.6, 0), (1.6, 0)], 0.75, vary(pen.rng, _BLUE, 40))
    pen.line([(0, -1.6), (0, 1.6)], 0.26, vary(pen.rng, (190, 185, 175), 30))
    pen.line([(0, -1.6), (0, 1.6)], 0.04, (90, 90, 90))


def circular_field(pen: Pen) -> None:
    pen.disc(0, 0, 0.8, vary(pen.rng, (70, 140, 60), 50))
    pen.polygon([(0, 0), (0.8, 0), (0.55, 0.55)], vary(pen.rng, (120, 160, 80), 40))


def roundabout(pen: Pen) -> None:
    grey = vary(pen.rng, (120, 120, 122), 30)
    pen.line([(-1.6, 0), (1.6, 0)], 0.24, grey)
    pen.line([(0, -1.6), (0, 1.6)], 0.24, grey)
    pen.disc(0, 0, 0.58, grey)
    pen.disc(0, 0, 0.3, vary(pen.rng, (80, 140, 70), 30))


def crossroads(pen: Pen) -> None:
    grey = vary(pen.rng, (120, 120, 122), 30)
    pen.line([(-1.6, 0), (1.6, 0)], 0.36, grey)
    pen.line([(0, -1.6), (0, 1.6)], 0.36, grey)
    for sign in (-1, 1):
        pen.line([(0.3 * sign, 0), (1.5 * sign, 0)], 0.05, _WHITE)
        pen.line([(0, 0.3 * sign), (0, 1.5 * sign)], 0.05, _WHITE)


def car_park(pen: Pen) -> None:
    pen.box(-0.95, -0.95, 0.95, 0.95, (105, 105, 108))
    for row in (-0.72, -0.02, 0.68):
        for k, full in enumerate((pen.rng.random(7) < 0.75).tolist()):
            if full:
                x = -0.9 + 0.26 * k
                pen.box(x, row - 0.17, x + 0.16, row + 0.17, any_colour(pen.rng, 60, 255))


def stadium(pen: Pen) -> None:
    pen.oval(0, 0, 0.92, 0.72, vary(pen.rng, (205, 205, 210), 30))
    pen.oval(0, 0, 0.72, 0.52, vary(pen.rng, (180, 90, 70), 30))
    pen.oval(0, 0, 0.56, 0.37, vary(pen.rng, (70, 150, 65), 30))


def storage_tanks(pen: Pen) -> None:
    for x in (-0.5, 0.5):
        for y in (-0.5, 0.5):
            pen.disc(x + 0.08, y + 0.08, 0.36, (75, 75, 75))
            pen.disc(x, y, 0.36, vary(pen.rng, (225, 225, 220), 30))


def swimming_pool(pen: Pen) -> None:
    pen.box(-0.75, -0.55, 0.75, 0.55, (215, 205, 190))
    pen.box(-0.58, -0.38, 0.58, 0.38, vary(pen.rng, (60, 180, 215), 30))


def harbour(pen: Pen) -> None:
    pen.box(-1.6, -1.6, 1.6, 1.6, vary(pen.rng, _BLUE, 40))
    for y in (-0.55, 0.35):
        pen.line([(-1.0, y), (1.0, y)], 0.1, (170, 150, 120))
        for x in (-0.75, -0.35, 0.05, 0.45, 0.85):
            pen.oval(x, y + 0.26, 0.09, 0.2, vary(pen.rng, _WHITE, 40))


def island(pen: Pen) -> None:
    pen.box(-1.6, -1.6, 1.6, 1.6, vary(pen.rng, _BLUE, 40))
    radii = (0.62 + 0.12 * pen.rng.standard_normal(9)).tolist()
    coast = [(r * x, r * y) for r, (x, y) in zip(radii, regular(9), strict=True)]
    pen.polygon(coast, _SAND)
    pen.polygon([(0.72 * x, 0.72 * y) for x, y in coast], vary(pen.rng, (70, 120, 55), 30))


def railway(pen: Pen) -> None:
    pen.line([(0, -1.6), (0, 1.6)], 1.0, vary(pen.rng, (130, 118, 105), 20))
    for x in (-0.3, 0.3):
        for y in range(-8, 9):
            pen.line([(x - 0.2, 0.2 * y), (x + 0.2, 0.2 * y)], 0.07, (80, 62, 50))
        for rail in (-0.1, 0.1):
            pen.line([(x + rail, -1.6), (x + rail, 1.6)], 0.04, (200, 200, 205))


def golf_course(pen: Pen) -> None:
    pen.box(-1.6, -1.6, 1.6, 1.6, vary(pen.rng, (65, 115, 50), 25))
    pen.oval(-0.1, 0.1, 0.85, 0.4, vary(pen.rng, (135, 195, 95), 25))
    for x, y in ((-0.55, -0.5), (0.65, 0.62), (0.5, -0.45)):
        pen.oval(x, y, 0.22, 0.15, (235, 220, 175))


def runway(pen: Pen) -> None:
    pen.line([(0, -1.6), (0, 1.6)], 0.75, vary(pen.rng, (85, 85, 90), 20))
    for y in range(-4, 5):
        pen.line([(0, 0.36 * y - 0.1), (0, 0.36 * y + 0.1)], 0.07, _WHITE)
    for x in (-0.24, -0.12, 0.12, 0.24):
        pen.line([(x, 0.55), (x, 0.9)], 0.06, _WHITE)


def terrace_field(pen: Pen) -> None:
    for k in range(9):
        colour = vary(pen.rng, (150, 165, 80) if k % 2 else (95, 115, 55), 20)
        pen.oval(0.2, 1.4, 2.4 - 0.27 * k, 2.5 - 0.27 * k, colour)


def church(pen: Pen) -> None:
    roof = vary(pen.rng, (150, 65, 50), 40)
    pen.box(-0.2, -0.8, 0.2, 0.8, roof)
    pen.box(-0.6, -0.4, 0.6, 0.0, roof)
    pen.line([(0, -0.8), (0, 0.8)], 0.05, (90, 40, 30))
    pen.disc(0, 0.72, 0.15, (210, 205, 195))


KINDS: dict[str, tuple[Callable[[Pen], None], Colour]] = {
    "airplane": (airplane, _GREY),
    "baseball diamond": (baseball_diamond, _GREEN),
    "tennis court": (tennis_court, _GREEN),
    "bridge": (bridge, _GREEN),
    "circular field": (circular_field, _SAND),
    "roundabout": (roundabout, _GREEN),
    "crossroads": (crossroads, _GREEN),
    "car park": (car_park, _GREY),
    "stadium": (stadium, _GREY),
    "storage tanks": (storage_tanks, _SAND),
    "swimming pool": (swimming_pool, _GREEN),
    "harbour": (harbour, _BLUE),
    "island": (island, _BLUE),
    "railway": (railway, _GREEN),
    "golf course": (golf_course, _GREEN),
    "runway": (runway, _GREEN),
    "terrace field": (terrace_field, _GREEN),
    "church": (church, _GREEN),
}


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a layout turned by a quarter and a little, scaled and moved: uint8 [32, 32, 3]."""
    kind, colour = tuple(KINDS.values())[label]
    image = ground(rng, vary(rng, colour, 60 * style.spread), 10, style)
    a, b, c = (rng.standard_normal(3) * (0.35, 0.08, 0.08)).tolist()
    scale = float(rng.uniform(0.72, 1.1))
    kind(Pen(image, rng, a + math.pi / 2 * int(rng.integers(4)), scale, (b, c), jitter=0.02))
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("aerial", tuple(KINDS), COUNTS, paint)
