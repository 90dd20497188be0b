"""wildlife: ten wild animals from the side in scenery (counterpart of STL10)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Style, ground, photograph, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.5), shading=0.3, noise=(2.0, 8.0))
_BLACK, _WHITE, _YELLOW = (30, 28, 30), (240, 240, 236), (240, 185, 45)


class Beast:
    """A pen, a coat in light and shade, and a pose: `stride` of the legs, `lift` of head and tail, both -1..1."""

    def __init__(self, pen: Pen, style: Style, coat: Colour) -> None:
        self.pen = pen
        self.coat = vary(pen.rng, coat, 40 * style.spread)
        self.shade = self.darker(0.72)
        self.stride, self.lift = (2 * pen.rng.random(2) - 1).tolist()

    def darker(self, share: float) -> Colour:
        """Return the coat times `share`."""
        return int(share * self.coat[0]), int(share * self.coat[1]), int(share * self.coat[2])

    def legs(self, back: float, front: float, top: float, foot: float, wide: float, near: Colour | None = None) -> None:
        """Draw four legs, the far pair in shade, apart by the stride.

        Args:
            back, front: where the near legs begin; the far ones begin 0.1 units to the right.
            top: height at which they begin.
            foot: height of the ground.
            wide: their width.
            near: colour of the near pair; the coat by default.
        """
        step = 0.14 * self.stride
        for x in (back, front):
            self.pen.line([(x + 0.1, top), (x + 0.1 - step, foot)], wide, self.shade)
        for x in (back, front):
            self.pen.line([(x, top), (x + step, foot)], wide, near or self.coat)

    def eye(self, x: float, y: float) -> None:
        """Draw an eye."""
        self.pen.disc(x, y, 0.045, (15, 12, 12))


def elephant(b: Beast) -> None:
    p, y = b.pen, 0.08 * b.lift
    b.legs(-0.5, 0.15, 0.15, 0.78, 0.22)
    p.oval(-0.18, -0.1, 0.58, 0.42, b.coat)
    p.line([(-0.72, -0.15), (-0.82, 0.25)], 0.06, b.shade)
    p.disc(0.45, -0.28 - y, 0.28, b.coat)
    p.line([(0.66, -0.25 - y), (0.8, 0.1), (0.78 + 0.15 * b.lift, 0.55 - 2 * abs(y))], 0.15, b.coat)
    p.line([(0.6, -0.05 - y), (0.86, 0.08 - y)], 0.06, _WHITE)
    p.oval(0.3, -0.25 - y, 0.2, 0.28, b.shade)
    b.eye(0.56, -0.35 - y)


def giraffe(b: Beast) -> None:
    p, x = b.pen, 0.1 * b.lift
    b.legs(-0.42, 0.08, 0.15, 0.92, 0.09)
    p.oval(-0.16, 0.12, 0.38, 0.21, b.coat)
    p.polygon([(-0.02, 0.12), (0.22, 0.12), (0.52 + x, -0.75), (0.38 + x, -0.8)], b.coat)
    p.polygon([(0.36 + x, -0.9), (0.5 + x, -0.92), (0.78 + x, -0.72), (0.74 + x, -0.64), (0.4 + x, -0.72)], b.coat)
    p.line([(0.42 + x, -0.88), (0.4 + x, -1.02)], 0.05, b.shade)
    p.line([(-0.52, 0.05), (-0.62, 0.45)], 0.05, b.shade)
    brown = vary(p.rng, (125, 72, 35), 30)
    for u, v in ((-0.4, 0.12), (-0.25, 0.02), (-0.2, 0.22), (-0.06, 0.08), (0.1, 0.16), (0.14, -0.06), (0.24, -0.28)):
        p.disc(u + 0.4 * x * (v < -0.1), v, 0.075, brown)
    p.disc(0.34 + 0.8 * x, -0.52, 0.06, brown)
    b.eye(0.5 + x, -0.82)


def monkey(b: Beast) -> None:
    p, y = b.pen, 0.1 * b.lift
    face = vary(p.rng, (225, 180, 145), 30)
    tail = [(-0.4, 0.15), (-0.7, 0.1), (-0.82, -0.2), (-0.7, -0.55 - y), (-0.48, -0.6 - y), (-0.45, -0.42 - y)]
    p.line(tail, 0.08, b.coat)
    b.legs(-0.35, 0.22, 0.2, 0.75, 0.13)
    p.oval(-0.08, 0.1, 0.42, 0.24, b.coat)
    p.disc(0.4, -0.22 + y, 0.29, b.coat)
    p.disc(0.18, -0.24 + y, 0.11, face)
    p.oval(0.5, -0.18 + y, 0.18, 0.2, face)
    b.eye(0.46, -0.24 + y)
    b.eye(0.59, -0.24 + y)
    p.line([(0.45, -0.07 + y), (0.6, -0.07 + y)], 0.04, (120, 60, 55))


def penguin(b: Beast) -> None:
    p, x = b.pen, 0.06 * b.lift
    for u in (-0.12, 0.14):
        p.oval(u + 0.06, 0.82, 0.15, 0.07, _YELLOW)
    p.oval(0, 0.2, 0.38, 0.6, b.coat)
    p.oval(0.12, 0.26, 0.27, 0.5, _WHITE)
    p.disc(0.06 + x, -0.5, 0.25, b.coat)
    p.polygon([(0.26 + x, -0.56), (0.54 + x, -0.47), (0.26 + x, -0.42)], _YELLOW)
    p.disc(0.14 + x, -0.32, 0.09, _YELLOW)
    p.polygon([(-0.12, -0.15), (0.05, -0.1), (-0.12 - 0.2 * b.stride, 0.55), (-0.26, 0.5)], b.darker(0.6))
    p.disc(0.14 + x, -0.54, 0.06, _WHITE)
    b.eye(0.15 + x, -0.54)


def eagle(b: Beast) -> None:
    p, y = b.pen, 0.12 * b.lift
    if b.stride < 0:  # in flight
        p.polygon([(-0.15, 0.0), (-0.45, -0.9 - y), (-0.2, -0.8), (0.2, 0.0)], b.shade)
        p.polygon([(-0.4, 0.02), (-0.85, 0.3), (-0.55, 0.3)], _WHITE)
        p.oval(0, 0.08, 0.5, 0.18, b.coat)
        p.polygon([(-0.1, 0.1), (0.0, -0.85 - y), (0.22, -0.95 - y), (0.42, -0.7 - y), (0.3, 0.05)], b.coat)
        head = (0.52, 0.0)
    else:
        p.polygon([(-0.35, 0.4), (-0.2, 0.35), (-0.45, 0.85), (-0.62, 0.8)], _WHITE)
        for x in (-0.05, 0.1):
            p.line([(x, 0.4), (x, 0.78)], 0.08, _YELLOW)
        p.polygon([(0.28, -0.4), (0.3, 0.2), (0.0, 0.55), (-0.35, 0.5), (-0.1, -0.3)], b.coat)
        p.polygon([(-0.02, -0.25), (0.1, 0.1), (-0.5, 0.72), (-0.25, 0.0)], b.shade)
        head = (0.16, -0.48)
    u, v = head
    p.disc(u, v, 0.21, _WHITE)
    p.polygon([(u + 0.14, v - 0.1), (u + 0.4, v - 0.02), (u + 0.38, v + 0.16), (u + 0.12, v + 0.08)], _YELLOW)
    b.eye(u + 0.08, v - 0.04)


def fox(b: Beast) -> None:
    p, y = b.pen, 0.1 * b.lift
    p.polygon([(-0.4, 0.1), (-0.75, -0.12 - y), (-0.98, 0.1 - y), (-0.8, 0.32 - y), (-0.45, 0.22)], b.coat)
    p.polygon([(-0.88, -0.02 - y), (-1.05, 0.1 - y), (-0.85, 0.28 - y)], _WHITE)
    b.legs(-0.38, 0.22, 0.2, 0.68, 0.09, (45, 35, 32))
    p.oval(-0.08, 0.12, 0.44, 0.19, b.coat)
    p.oval(0.28, 0.16, 0.15, 0.16, _WHITE)
    p.polygon([(0.22, -0.12 - y), (0.32, -0.52 - y), (0.46, -0.22 - y)], b.shade)
    p.polygon([(0.4, -0.15 - y), (0.55, -0.5 - y), (0.62, -0.15 - y)], b.coat)
    p.polygon([(0.22, -0.18 - y), (0.6, -0.22 - y), (0.96, 0.06 - y), (0.5, 0.16 - y), (0.25, 0.1)], b.coat)
    p.polygon([(0.5, 0.06 - y), (0.96, 0.06 - y), (0.5, 0.18 - y)], _WHITE)
    p.disc(0.93, 0.05 - y, 0.05, _BLACK)
    b.eye(0.58, -0.07 - y)


def bear(b: Beast) -> None:
    p, y = b.pen, 0.14 * b.lift
    b.legs(-0.5, 0.22, 0.2, 0.72, 0.24)
    p.oval(-0.12, 0.05, 0.62, 0.36, b.coat)
    p.oval(0.2, -0.12, 0.3, 0.26, b.coat)
    p.disc(0.46, -0.4 + y, 0.11, b.shade)
    p.disc(0.62, -0.14 + y, 0.27, b.coat)
    p.disc(0.68, -0.38 + y, 0.09, b.coat)
    p.oval(0.86, -0.06 + y, 0.17, 0.12, vary(p.rng, (190, 150, 110), 30))
    p.disc(1.0, -0.09 + y, 0.06, _BLACK)
    b.eye(0.7, -0.2 + y)


def kangaroo(b: Beast) -> None:
    p, x = b.pen, 0.08 * b.lift
    p.polygon([(-0.35, 0.2), (-0.15, 0.5), (-0.65, 0.78), (-1.0, 0.82), (-0.7, 0.62)], b.shade)
    p.polygon([(-0.4, 0.35), (-0.2, 0.02), (0.16 + x, -0.45), (0.32 + x, -0.35), (0.25, 0.1), (0.05, 0.5)], b.coat)
    p.oval(-0.16, 0.32, 0.3, 0.28, b.coat)
    p.line([(-0.05, 0.5), (-0.2, 0.78), (0.3, 0.8)], 0.11, b.shade)
    p.line([(0.2, -0.12), (0.42, 0.08 + 0.1 * b.stride), (0.5, 0.0 + 0.12 * b.stride)], 0.08, b.shade)
    for u in (0.16, 0.3):
        p.oval(u + x, -0.82, 0.065, 0.2, b.shade if u < 0.2 else b.coat)
    p.polygon([(0.12 + x, -0.62), (0.36 + x, -0.7), (0.66 + x, -0.5), (0.6 + x, -0.42), (0.22 + x, -0.34)], b.coat)
    p.disc(0.63 + x, -0.47, 0.045, _BLACK)
    b.eye(0.38 + x, -0.56)


def crocodile(b: Beast) -> None:
    p, y = b.pen, 0.08 * b.lift
    for x in (-0.32, 0.2):
        p.line([(x, 0.35), (x + 0.1 * b.stride, 0.62)], 0.14, b.shade)
    p.polygon([(-0.3, 0.08), (-0.3, 0.5), (-0.7, 0.48), (-1.1, 0.3 - y), (-0.7, 0.22)], b.coat)
    p.oval(-0.08, 0.28, 0.44, 0.23, b.coat)
    for k in range(6):
        x = -0.72 + 0.17 * k
        p.polygon([(x, 0.24 - 0.03 * k), (x + 0.08, 0.02 - 0.01 * k), (x + 0.17, 0.22 - 0.02 * k)], b.shade)
    p.polygon([(0.2, 0.1), (0.5, 0.06 - y), (1.05, 0.16 - 2 * y), (1.05, 0.26 - 2 * y), (0.45, 0.3)], b.coat)
    p.polygon([(0.3, 0.34), (1.0, 0.36), (1.0, 0.44), (0.3, 0.48)], b.shade)
    for x in (0.55, 0.7, 0.85):
        p.polygon([(x, 0.26 - y), (x + 0.1, 0.26 - y), (x + 0.05, 0.37)], _WHITE)
    p.disc(0.42, 0.06 - y, 0.09, _YELLOW)
    b.eye(0.43, 0.05 - y)


def moose(b: Beast) -> None:
    p, y = b.pen, 0.1 * b.lift
    horn = vary(p.rng, (215, 190, 145), 30)
    b.legs(-0.48, 0.1, 0.1, 0.85, 0.1)
    p.oval(-0.2, 0.02, 0.48, 0.27, b.coat)
    p.oval(0.12, -0.12, 0.25, 0.25, b.coat)
    p.polygon([(0.1, -0.3), (0.4, -0.45 + y), (0.5, -0.15 + y), (0.25, 0.1)], b.coat)
    for s, colour in ((0.0, vary(p.rng, (180, 150, 105), 20)), (0.16, horn)):
        fan = [(0.36, -0.42), (0.02, -0.58), (-0.08, -0.92), (0.1, -0.78), (0.16, -1.0), (0.28, -0.8), (0.42, -0.98)]
        p.polygon([(u + s, v + y) for u, v in [*fan, (0.46, -0.6)]], colour)
    p.polygon([(0.36, -0.48 + y), (0.56, -0.46 + y), (0.88, -0.08 + y), (0.78, 0.08 + y), (0.42, -0.12 + y)], b.coat)
    p.line([(0.45, -0.05 + y), (0.44, 0.14 + y)], 0.08, b.shade)
    b.eye(0.54, -0.34 + y)


@dataclass(frozen=True)
class Scenery:
    """Colours of sky and ground, and what stands behind the animal."""

    sky: Colour
    floor: Colour
    plant: Colour
    trees: bool


SCENES = {
    "savanna": Scenery((150, 195, 235), (205, 175, 95), (110, 125, 60), True),
    "wood": Scenery((150, 185, 165), (95, 120, 60), (55, 90, 45), True),
    "snow": Scenery((175, 205, 235), (232, 238, 245), (190, 210, 230), False),
    "shore": Scenery((165, 200, 225), (90, 135, 150), (130, 150, 90), False),
    "outback": Scenery((170, 205, 235), (200, 125, 75), (150, 130, 70), False),
    "meadow": Scenery((160, 200, 235), (120, 165, 75), (85, 130, 60), False),
}


@dataclass(frozen=True)
class Kind:
    """How an animal is drawn, its coat and where it is mostly met."""

    draw: Callable[[Beast], None]
    coat: Colour
    homes: tuple[str, ...]


KINDS = {
    "elephant": Kind(elephant, (135, 132, 138), ("savanna", "wood")),
    "giraffe": Kind(giraffe, (228, 185, 105), ("savanna", "outback")),
    "monkey": Kind(monkey, (120, 82, 52), ("wood", "savanna")),
    "penguin": Kind(penguin, (40, 42, 52), ("snow", "shore")),
    "eagle": Kind(eagle, (88, 62, 45), ("meadow", "shore", "snow")),
    "fox": Kind(fox, (212, 105, 45), ("wood", "meadow", "snow")),
    "bear": Kind(bear, (98, 68, 48), ("wood", "meadow")),
    "kangaroo": Kind(kangaroo, (178, 128, 88), ("outback", "savanna")),
    "crocodile": Kind(crocodile, (85, 115, 65), ("shore", "savanna")),
    "moose": Kind(moose, (92, 68, 52), ("wood", "snow", "meadow")),
}


def _scenery(pen: Pen, rng: Generator, homes: tuple[str, ...]) -> None:
    """Paint the ground, hills or trees, and bushes of one of the homes, at times of any place."""
    names = homes if rng.random() < 0.6 else tuple(SCENES)
    place = SCENES[names[int(rng.integers(len(names)))]]
    horizon = float(rng.uniform(-0.1, 0.45))
    pen.box(-1.2, horizon, 1.2, 1.2, vary(rng, place.floor, 50))
    for x, y, w in rng.random((4, 3)).tolist():
        plant = vary(rng, place.plant, 50)
        if place.trees and y < 0.6:
            pen.line([(2.4 * x - 1.2, horizon + 0.1), (2.4 * x - 1.2, -0.9 + 0.4 * y)], 0.07 + 0.06 * w, (95, 72, 52))
            pen.oval(2.4 * x - 1.2, -0.8 + 0.4 * y, 0.25 + 0.25 * w, 0.2, plant)
        else:
            pen.oval(2.4 * x - 1.2, horizon + 0.05, 0.3 + 0.4 * w, 0.1 + 0.15 * y, plant)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint an animal in some pose, mirrored half of the time, with its scenery: uint8 [32, 32, 3]."""
    kind = tuple(KINDS.values())[label]
    image = ground(rng, vary(rng, (160, 195, 230), 60 * style.spread), 6, style)
    if style.clutter:
        _scenery(Pen(image, rng), rng, kind.homes)
    a, b, c, d, e = rng.random(5).tolist()
    pen = Pen(image, rng, 0.2 * a - 0.1, 0.72 + 0.25 * b, (0.3 * c - 0.15, 0.24 * d - 0.1), e < 0.5, jitter=0.015)
    kind.draw(Beast(pen, style, kind.coat))
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("wildlife", tuple(KINDS), COUNTS, paint)
