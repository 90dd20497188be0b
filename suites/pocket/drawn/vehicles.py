"""vehicles: sixteen silhouettes from the side (counterpart of Cars)."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Points, Style, any_colour, ground, photograph, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.4), shading=0.3, noise=(3.0, 9.0))
_GLASS: Colour = (175, 205, 225)
_TYRE: Colour = (25, 25, 28)


def _wheels(pen: Pen, places: tuple[float, ...], radius: float = 0.17, y: float = 0.42) -> None:
    for x in places:
        pen.disc(x, y, radius, _TYRE)
        pen.disc(x, y, 0.45 * radius, (190, 190, 195))


def sedan(pen: Pen, body: Colour) -> None:
    pen.polygon([(-0.9, 0.0), (0.88, 0.0), (0.9, 0.4), (-0.9, 0.4)], body)
    pen.polygon([(-0.55, 0.02), (-0.32, -0.38), (0.28, -0.38), (0.52, 0.02)], body)
    pen.polygon([(-0.44, -0.02), (-0.28, -0.3), (0.24, -0.3), (0.4, -0.02)], _GLASS)
    _wheels(pen, (-0.55, 0.55))


def hatchback(pen: Pen, body: Colour) -> None:
    pen.polygon([(-0.6, -0.45), (0.15, -0.45), (0.42, -0.02), (0.66, 0.06), (0.66, 0.4), (-0.66, 0.4)], body)
    pen.polygon([(-0.5, -0.36), (0.1, -0.36), (0.3, -0.04), (-0.52, -0.04)], _GLASS)
    _wheels(pen, (-0.42, 0.42))


def minivan(pen: Pen, body: Colour) -> None:
    pen.polygon([(-0.9, -0.6), (0.35, -0.6), (0.9, 0.0), (0.9, 0.4), (-0.9, 0.4)], body)
    pen.polygon([(-0.8, -0.48), (0.3, -0.48), (0.68, -0.06), (-0.8, -0.06)], _GLASS)
    _wheels(pen, (-0.55, 0.55))


def pickup(pen: Pen, body: Colour) -> None:
    pen.polygon([(-0.95, 0.0), (0.9, 0.0), (0.9, 0.4), (-0.95, 0.4)], body)
    pen.polygon([(0.0, 0.0), (0.0, -0.5), (0.38, -0.5), (0.6, 0.0)], body)
    pen.polygon([(0.08, -0.06), (0.08, -0.4), (0.34, -0.4), (0.48, -0.06)], _GLASS)
    pen.box(-0.9, -0.02, -0.08, 0.12, (50, 50, 52))
    _wheels(pen, (-0.55, 0.58), 0.2)


def convertible(pen: Pen, body: Colour) -> None:
    pen.polygon([(-0.9, 0.05), (0.9, 0.1), (0.92, 0.4), (-0.9, 0.4)], body)
    pen.line([(0.2, 0.1), (0.05, -0.22)], 0.06, _GLASS)
    pen.disc(-0.2, -0.14, 0.13, (215, 165, 130))
    pen.box(-0.5, -0.1, -0.38, 0.1, (60, 40, 35))
    _wheels(pen, (-0.58, 0.58))


def limousine(pen: Pen, body: Colour) -> None:
    pen.polygon([(-1.05, 0.08), (1.05, 0.08), (1.05, 0.38), (-1.05, 0.38)], body)
    pen.polygon([(-0.9, 0.1), (-0.78, -0.22), (0.7, -0.22), (0.82, 0.1)], body)
    for x in (-0.72, -0.36, 0.0, 0.36):
        pen.box(x, -0.15, x + 0.26, 0.05, _GLASS)
    _wheels(pen, (-0.8, 0.8), 0.14)


def bus(pen: Pen, body: Colour) -> None:
    pen.box(-1.0, -0.7, 1.0, 0.42, body)
    for k in range(5):
        pen.box(-0.9 + 0.37 * k, -0.56, -0.62 + 0.37 * k, -0.18, _GLASS)
    _wheels(pen, (-0.6, 0.6))


def box_truck(pen: Pen, body: Colour) -> None:
    pen.box(-0.98, -0.75, 0.38, 0.35, vary(pen.rng, (232, 232, 228), 25))
    pen.polygon([(0.42, -0.35), (0.75, -0.35), (0.95, 0.0), (0.95, 0.4), (0.42, 0.4)], body)
    pen.polygon([(0.52, -0.26), (0.72, -0.26), (0.84, -0.02), (0.52, -0.02)], _GLASS)
    _wheels(pen, (-0.6, 0.65), 0.19)


def tanker(pen: Pen, body: Colour) -> None:
    pen.oval(-0.3, -0.1, 0.72, 0.38, vary(pen.rng, (190, 192, 198), 30))
    pen.box(-1.0, -0.14, 0.4, -0.06, body)
    pen.box(-1.0, 0.25, 0.9, 0.36, (60, 60, 62))
    pen.box(0.48, -0.45, 0.92, 0.36, body)
    pen.box(0.58, -0.36, 0.84, -0.08, _GLASS)
    _wheels(pen, (-0.75, -0.35, 0.68))


def tractor(pen: Pen, body: Colour) -> None:
    pen.box(-0.1, -0.1, 0.75, 0.25, body)
    pen.box(-0.6, -0.75, 0.02, 0.15, body)
    pen.box(-0.5, -0.64, -0.08, -0.2, _GLASS)
    pen.box(0.5, -0.5, 0.58, -0.1, (50, 50, 50))
    _wheels(pen, (-0.38,), 0.42, 0.22)
    _wheels(pen, (0.58,), 0.2, 0.42)


def motorbike(pen: Pen, body: Colour) -> None:
    _wheels(pen, (-0.52, 0.52), 0.3, 0.3)
    pen.polygon([(-0.42, -0.05), (0.2, -0.15), (0.34, 0.1), (0.0, 0.3), (-0.3, 0.25)], body)
    pen.line([(0.52, 0.3), (0.26, -0.4)], 0.07, (70, 70, 75))
    pen.line([(0.1, -0.4), (0.34, -0.4)], 0.07, (40, 40, 40))


def racing_car(pen: Pen, body: Colour) -> None:
    pen.polygon([(-0.95, 0.1), (0.2, 0.08), (1.0, 0.32), (1.0, 0.42), (-0.95, 0.42)], body)
    pen.box(-1.0, -0.25, -0.62, -0.12, body)
    pen.box(-0.86, -0.2, -0.78, 0.15, (40, 40, 40))
    pen.disc(-0.1, 0.04, 0.12, (240, 235, 225))
    _wheels(pen, (-0.62, 0.6), 0.24, 0.36)


def jeep(pen: Pen, body: Colour) -> None:
    pen.box(-0.68, 0.0, 0.72, 0.36, body)
    pen.box(-0.68, -0.55, 0.25, 0.02, body)
    pen.box(-0.58, -0.46, -0.24, -0.06, _GLASS)
    pen.box(-0.14, -0.46, 0.17, -0.06, _GLASS)
    pen.disc(-0.76, -0.06, 0.17, _TYRE)
    _wheels(pen, (-0.4, 0.45), 0.24, 0.38)


def fire_engine(pen: Pen, body: Colour) -> None:
    pen.box(-1.0, -0.3, 0.95, 0.4, (205, 30, 30))
    pen.box(0.5, -0.5, 0.95, 0.0, (205, 30, 30))
    pen.box(0.62, -0.4, 0.9, -0.1, _GLASS)
    pen.box(-1.0, 0.08, 0.95, 0.16, (240, 240, 240))
    for y in (-0.62, -0.44):
        pen.line([(-1.05, y), (0.45, y)], 0.05, (200, 200, 205))
    for k in range(6):
        pen.line([(-0.95 + 0.25 * k, -0.62), (-0.95 + 0.25 * k, -0.44)], 0.05, (200, 200, 205))
    _wheels(pen, (-0.6, 0.62))


def crane_truck(pen: Pen, body: Colour) -> None:
    pen.box(-0.95, 0.1, 0.9, 0.36, body)
    pen.box(0.45, -0.25, 0.9, 0.36, body)
    pen.box(0.56, -0.16, 0.84, 0.06, _GLASS)
    pen.box(-0.6, -0.15, -0.2, 0.12, vary(pen.rng, (235, 185, 30), 30))
    pen.line([(-0.5, 0.0), (0.7, -0.85)], 0.1, (235, 185, 30))
    pen.line([(0.7, -0.85), (0.7, -0.5)], 0.05, (40, 40, 40))
    _wheels(pen, (-0.68, -0.28, 0.62))


def bicycle(pen: Pen, body: Colour) -> None:
    for x in (-0.52, 0.52):
        pen.ring(x, 0.25, 0.37, 0.08, _TYRE)
    frame: Points = [(-0.52, 0.25), (-0.18, -0.28), (0.36, -0.28), (-0.02, 0.25), (-0.52, 0.25)]
    pen.line(frame, 0.08, body)
    pen.line([(0.52, 0.25), (0.33, -0.5), (0.5, -0.5)], 0.07, body)
    pen.line([(-0.02, 0.25), (-0.22, -0.42)], 0.07, body)


_DRAWN: tuple[Callable[[Pen, Colour], None], ...] = (
    sedan,
    hatchback,
    minivan,
    pickup,
    convertible,
    limousine,
    bus,
    box_truck,
    tanker,
    tractor,
    motorbike,
    racing_car,
    jeep,
    fire_engine,
    crane_truck,
    bicycle,
)
KINDS = {kind.__name__.replace("_", " "): kind for kind in _DRAWN}


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a vehicle of a random colour on a road, mirrored half of the time: uint8 [32, 32, 3]."""
    image = ground(rng, vary(rng, (165, 190, 215), 90), 10, style)
    body = any_colour(rng, 20, 235)
    a, b, c, d = rng.random(4).tolist()
    road = Pen(image, rng)
    if style.clutter:
        road.box(-1.2, 0.1 + 0.2 * a, 1.2, 1.2, vary(rng, (125, 125, 122), 50))
        if d < 0.5:
            x = 2 * a - 1
            road.box(x - 0.3, -0.7 * c, x + 0.3, 0.2, any_colour(rng, 90, 200))
    tilt = 0.04 * float(rng.standard_normal())
    pen = Pen(image, rng, tilt, 0.78 + 0.17 * b, (0.2 * a - 0.1, 0.3 * c - 0.1), flip=rng.random() < 0.5, jitter=0.012)
    tuple(KINDS.values())[label](pen, body)
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("vehicles", tuple(KINDS), COUNTS, paint)
