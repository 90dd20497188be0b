"""scenes: eighteen views seen by a person (counterpart of SUN397)."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from PIL import Image

from suites.pocket.canvas import CANVAS, Camera, Colour, Pen, Points, Style, any_colour, photograph, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.7), shading=0.25, noise=(4.0, 12.0))


class View:
    """A pen with a palette whose colours vary from image to image, and a horizon."""

    def __init__(self, pen: Pen, style: Style) -> None:
        self.pen = pen
        self.rng = pen.rng
        self.style = style
        self.horizon = float(pen.rng.uniform(-0.25, 0.2))

    def hue(self, colour: Colour) -> Colour:
        """Return the colour varied."""
        return vary(self.rng, colour, 55 * self.style.spread)

    def ground(self, upper: Colour, lower: Colour) -> float:
        """Paint what is above and below the horizon; return the horizon."""
        self.pen.box(-1.5, -1.5, 1.5, self.horizon, self.hue(upper))
        self.pen.box(-1.5, self.horizon, 1.5, 1.5, self.hue(lower))
        return self.horizon

    def some(self, count: int) -> list[list[float]]:
        """Return `count` triples of uniform numbers."""
        return self.rng.random((count, 3)).tolist()


SKY, NIGHT, GRASS, SAND, STONE = (140, 190, 235), (18, 20, 50), (95, 150, 65), (225, 200, 150), (120, 115, 110)


def beach(v: View) -> None:
    h = v.ground(SKY, (40, 120, 175))
    edge = h + 0.45
    v.pen.polygon([(-1.5, edge + 0.1), (1.5, edge - 0.1), (1.5, 1.5), (-1.5, 1.5)], v.hue(SAND))
    v.pen.line([(-1.5, edge + 0.1), (1.5, edge - 0.1)], 0.08, (245, 245, 245))


def desert(v: View) -> None:
    h = v.ground((165, 200, 230), (215, 165, 95))
    for x, y, w in v.some(3):
        v.pen.oval(2.4 * x - 1.2, h + 0.3 + 0.9 * y, 0.6 + 0.4 * w, 0.18, v.hue((190, 135, 70)))


def mountain(v: View) -> None:
    h = v.ground(SKY, GRASS)
    for x, y, w in v.some(3):
        top, centre, wide = h - 0.5 - 0.3 * y, 2 * x - 1, 0.6 + 0.3 * w
        v.pen.polygon([(centre - wide, h + 0.1), (centre, top), (centre + wide, h + 0.1)], v.hue((105, 100, 115)))
        v.pen.polygon([(centre - 0.2, top + 0.22), (centre, top), (centre + 0.2, top + 0.22)], (245, 245, 250))


def _towers(v: View, h: float, wall: Colour, window: Colour, lit: float) -> None:
    x = -1.3
    while x < 1.2:
        wide, high, _ = v.rng.random(3).tolist()
        wide, top = 0.28 + 0.2 * wide, h - 0.25 - 0.7 * high
        v.pen.box(x, top, x + wide, h + 0.6, v.hue(wall))
        for k in range(6):
            if v.rng.random() < lit:
                y = top + 0.1 + 0.2 * k
                v.pen.box(x + 0.06, y, x + wide - 0.08, y + 0.07, window)
        x += wide + 0.05


def skyline(v: View) -> None:
    h = v.ground(SKY, (130, 130, 128))
    _towers(v, h + 0.3, (125, 130, 145), (85, 105, 140), 0.9)


def night_city(v: View) -> None:
    h = v.ground(NIGHT, (30, 28, 40))
    _towers(v, h + 0.3, (45, 42, 60), (250, 220, 110), 0.6)


def forest_path(v: View) -> None:
    v.ground((70, 120, 60), (75, 95, 45))
    v.pen.polygon([(-0.06, v.horizon), (0.06, v.horizon), (0.55, 1.5), (-0.55, 1.5)], v.hue((175, 145, 100)))
    for x in (-0.95, -0.6, -0.3, 0.3, 0.6, 0.95):
        v.pen.line([(x * 1.1, -1.5), (x * 1.1, v.horizon + 0.5 * abs(x) + 0.1)], 0.14, v.hue((70, 48, 32)))


def snowfield(v: View) -> None:
    h = v.ground((185, 205, 225), (240, 244, 250))
    for x, y, w in v.some(4):
        cx, top, size = 2 * x - 1, h - 0.15 + 0.25 * y, 0.18 + 0.12 * w
        v.pen.polygon([(cx - size, top + 0.45), (cx, top - 0.2), (cx + size, top + 0.45)], v.hue((40, 75, 55)))


def corridor(v: View) -> None:
    wall = v.hue((200, 190, 170))
    v.pen.box(-1.5, -1.5, 1.5, 1.5, wall)
    v.pen.polygon([(-1.3, 1.3), (-0.3, 0.3), (0.3, 0.3), (1.3, 1.3)], v.hue((125, 95, 75)))
    v.pen.polygon([(-1.3, -1.3), (-0.3, -0.3), (0.3, -0.3), (1.3, -1.3)], v.hue((235, 232, 225)))
    v.pen.box(-0.3, -0.3, 0.3, 0.3, v.hue((95, 85, 80)))
    for sign in (-1, 1):
        door = [(0.5 * sign, 0.5), (0.5 * sign, -0.35), (0.75 * sign, -0.5), (0.75 * sign, 0.75)]
        v.pen.polygon(door, v.hue((110, 70, 45)))


def bedroom(v: View) -> None:
    v.ground((215, 200, 185), (150, 115, 85))
    v.pen.box(-0.85, -0.9, -0.25, -0.35, v.hue((165, 205, 240)))
    v.pen.box(-0.3, 0.05, 0.95, 0.75, v.hue((150, 60, 80)))
    v.pen.box(-0.25, -0.05, 0.15, 0.25, (245, 245, 240))
    v.pen.box(0.85, -0.35, 1.0, 0.75, v.hue((85, 55, 40)))


def sea_sunset(v: View) -> None:
    h = v.ground((240, 130, 60), (95, 55, 85))
    x = float(v.rng.uniform(-0.5, 0.5))
    v.pen.disc(x, h - 0.12, 0.3, (255, 225, 120))
    v.pen.box(-1.5, h, 1.5, 1.5, v.hue((90, 50, 85)))
    for k in range(4):
        v.pen.box(x - 0.22 + 0.04 * k, h + 0.12 + 0.2 * k, x + 0.22 - 0.04 * k, h + 0.19 + 0.2 * k, (245, 180, 100))


def country_road(v: View) -> None:
    h = v.ground(SKY, GRASS)
    x = float(v.rng.uniform(-0.3, 0.3))
    v.pen.polygon([(x - 0.05, h), (x + 0.05, h), (0.8, 1.5), (-0.8, 1.5)], v.hue((95, 95, 98)))
    for k in range(3):
        y = h + 0.2 + 0.35 * k
        v.pen.box(x * (1 - 0.3 * k) - 0.04, y, x * (1 - 0.3 * k) + 0.04, y + 0.15, (245, 240, 200))


def barn(v: View) -> None:
    v.ground(SKY, GRASS)
    v.pen.box(-0.6, -0.25, 0.6, 0.55, v.hue((165, 40, 35)))
    v.pen.polygon([(-0.7, -0.25), (-0.4, -0.7), (0.4, -0.7), (0.7, -0.25)], v.hue((95, 85, 85)))
    v.pen.box(-0.2, 0.05, 0.2, 0.55, (245, 240, 235))


def cave(v: View) -> None:
    v.pen.box(-1.5, -1.5, 1.5, 1.5, v.hue((55, 45, 40)))
    x, y, w = v.rng.random(3).tolist()
    cx, cy = 0.6 * x - 0.3, 0.5 * y - 0.2
    v.pen.oval(cx, cy, 0.45 + 0.2 * w, 0.5, v.hue((200, 215, 225)))
    for a, b, _ in v.some(6):
        v.pen.polygon([(2 * a - 1.1, -1.5), (2 * a - 0.9, -1.5), (2 * a - 1, -0.5 + 0.3 * b)], v.hue((35, 28, 25)))


def garden(v: View) -> None:
    v.ground((150, 195, 230), (80, 145, 55))
    v.pen.box(-1.5, v.horizon - 0.25, 1.5, v.horizon + 0.05, v.hue((40, 95, 40)))
    for x, y, _ in v.some(16):
        v.pen.disc(2.2 * x - 1.1, v.horizon + 0.2 + 0.8 * y, 0.1, any_colour(v.rng, 130, 255))


def bridge_view(v: View) -> None:
    h = v.ground(SKY, (60, 105, 140))
    steel = v.hue((170, 70, 55))
    v.pen.line([(-1.5, h), (1.5, h)], 0.12, steel)
    for x in (-0.5, 0.5):
        v.pen.box(x - 0.06, h - 0.65, x + 0.06, h + 0.35, steel)
    cable: Points = [(-1.4, h), (-0.5, h - 0.6), (0, h - 0.1), (0.5, h - 0.6), (1.4, h)]
    v.pen.line(cable, 0.06, steel)


def library(v: View) -> None:
    v.pen.box(-1.5, -1.5, 1.5, 1.5, v.hue((105, 70, 45)))
    for row in range(4):
        top = -0.95 + 0.52 * row
        for k in range(13):
            x, high, _ = -1.05 + 0.165 * k, float(v.rng.random()), 0
            v.pen.box(x, top + 0.12 * high, x + 0.12, top + 0.4, any_colour(v.rng, 40, 210))


def waterfall(v: View) -> None:
    v.ground((120, 165, 190), (60, 100, 110))
    v.pen.box(-1.5, -0.75, 1.5, 0.65, v.hue((85, 90, 70)))
    x, w = v.rng.uniform(-0.35, 0.35), v.rng.uniform(0.2, 0.32)
    v.pen.box(x - w, -0.75, x + w, 0.7, (225, 238, 245))
    v.pen.oval(x, 0.75, w + 0.25, 0.16, (245, 250, 252))


def stage(v: View) -> None:
    v.pen.box(-1.5, -1.5, 1.5, 1.5, v.hue((35, 25, 40)))
    v.pen.box(-1.5, 0.45, 1.5, 1.5, v.hue((125, 85, 55)))
    curtain = v.hue((160, 25, 40))
    v.pen.polygon([(-1.5, -1.5), (-0.55, -1.5), (-0.8, 0.5), (-1.5, 0.5)], curtain)
    v.pen.polygon([(1.5, -1.5), (0.55, -1.5), (0.8, 0.5), (1.5, 0.5)], curtain)
    x = float(v.rng.uniform(-0.3, 0.3))
    v.pen.polygon([(x, -1.2), (x - 0.3, 0.6), (x + 0.3, 0.6)], (245, 235, 180))


_DRAWN: tuple[Callable[[View], None], ...] = (
    beach,
    desert,
    mountain,
    skyline,
    night_city,
    forest_path,
    snowfield,
    corridor,
    bedroom,
    sea_sunset,
    country_road,
    barn,
    cave,
    garden,
    bridge_view,
    library,
    waterfall,
    stage,
)
KINDS = {kind.__name__.replace("_", " "): kind for kind in _DRAWN}


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a view, mirrored half of the time, scaled and moved a little: uint8 [32, 32, 3]."""
    image = Image.new("RGB", (CANVAS, CANVAS))
    a, b, c, d = rng.random(4).tolist()
    pen = Pen(image, rng, 0.0, 1.0 + 0.25 * a, (0.3 * b - 0.15, 0.2 * c - 0.1), flip=d < 0.5, jitter=0.02)
    tuple(KINDS.values())[label](View(pen, style))
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("scenes", tuple(KINDS), COUNTS, paint)
