"""flowers: sixteen garden flowers told apart by their form, each in several colours (counterpart of Flowers102)."""

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Points, Style, clip_byte, ground, photograph, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.5), shading=0.3, noise=(2.0, 8.0))
_WHITE, _PINK, _RED, _ORANGE = (242, 240, 235), (235, 135, 175), (205, 35, 45), (240, 130, 35)
_YELLOW, _PURPLE, _BLUE, _MAROON = (245, 210, 50), (140, 70, 175), (85, 100, 210), (150, 35, 70)
_ANY: tuple[Colour, ...] = (_WHITE, _PINK, _RED, _ORANGE, _YELLOW, _PURPLE, _BLUE, _MAROON)
_LEAF: Colour = (60, 125, 50)
_GOLD: Colour = (225, 170, 40)
_DARK: Colour = (45, 28, 25)


def _tone(colour: Colour, factor: float) -> Colour:
    """Return the colour made darker (below 1) or lighter (above 1)."""
    return (clip_byte(colour[0] * factor), clip_byte(colour[1] * factor), clip_byte(colour[2] * factor))


_BLADE = ((0.0, 0.35), (0.35, 0.85), (0.65, 1.0), (0.88, 0.6), (1.0, 0.0))  # along, half width: a round petal
_SPIKE = ((0.0, 0.4), (0.35, 1.0), (0.7, 0.65), (1.0, 0.0))  # a pointed one


def _petal(
    pen: Pen, root: tuple[float, float], angle: float, length: float, width: float, fill: Colour, form: Points = _BLADE
) -> None:
    """Draw a petal from `root` in the direction `angle`, clockwise from the top, `width` at its widest."""
    sin, cos = math.sin(angle), math.cos(angle)
    sides = [(length * t, 0.5 * width * w) for t, w in form] + [(length * t, -0.5 * width * w) for t, w in form[::-1]]
    pen.polygon([(root[0] + sin * t + cos * w, root[1] - cos * t + sin * w) for t, w in sides], fill)


def _wheel(
    pen: Pen, count: int, length: float, width: float, fill: Colour, form: Points = _BLADE, turn: float = 0.0
) -> None:
    """Draw `count` petals around the middle, every other one a little darker."""
    other = _tone(fill, 0.82)
    for k in range(count):
        _petal(pen, (0, 0), turn + 2 * math.pi * k / count, length, width, other if k % 2 else fill, form)


def _stem(pen: Pen, top: float, leaves: bool = True) -> None:
    """Draw a stem down from `top`, with two long leaves."""
    green = vary(pen.rng, _LEAF, 40)
    pen.line([(0, top), (0, 1.3)], 0.09, green)
    if leaves:
        for sign in (-1, 1):
            angle = sign * float(pen.rng.uniform(0.4, 0.8))
            _petal(pen, (0, 0.95), angle, 0.85, 0.2, _tone(green, 0.85), _SPIKE)


def daisy(pen: Pen, petal: Colour) -> None:
    _wheel(pen, int(pen.rng.integers(11, 15)), 0.9, 0.22, petal)
    pen.disc(0, 0, 0.24, vary(pen.rng, (_GOLD, _GOLD, _DARK, _MAROON)[pen.rng.integers(4)], 40))


def sunflower(pen: Pen, petal: Colour) -> None:
    _wheel(pen, 16, 0.95, 0.3, _tone(petal, 0.85), _SPIKE, 0.2)
    _wheel(pen, 16, 0.85, 0.28, petal, _SPIKE)
    pen.disc(0, 0, 0.52, vary(pen.rng, (75, 45, 25), 30))
    for x, y in pen.rng.uniform(-0.28, 0.28, (7, 2)).tolist():
        pen.disc(x, y, 0.05, (140, 95, 45))


def rose(pen: Pen, petal: Colour) -> None:
    for k in range(5):
        _petal(pen, (0, 0), 2 * math.pi * k / 5, 0.85, 0.95, _tone(petal, 0.85 if k % 2 else 0.95))
    for radius, tone in ((0.58, 0.65), (0.5, 1.05), (0.36, 0.6), (0.28, 1.1), (0.15, 0.5)):
        x, y = pen.rng.uniform(-0.07, 0.07, 2).tolist()
        pen.oval(x, y, radius, radius * 0.9, _tone(petal, tone))


def marigold(pen: Pen, petal: Colour) -> None:
    for ring, (radius, count) in enumerate(((0.9, 13), (0.68, 11), (0.46, 8), (0.25, 5))):
        for k in range(count):
            angle = 2 * math.pi * (k + 0.5 * (ring % 2)) / count
            x, y = 0.78 * radius * math.sin(angle), 0.78 * radius * math.cos(angle)
            pen.disc(x, y, 0.2, _tone(petal, (0.6, 1.0, 0.75, 1.1)[(ring + k) % 4]))


def lily(pen: Pen, petal: Colour) -> None:
    for turn in (0.0, math.pi / 3):
        for k in range(3):
            _petal(pen, (0, 0), turn + 2 * math.pi * k / 3, 1.0, 0.38, _tone(petal, 1.0 - 0.2 * turn), _SPIKE)
    for k in range(6):
        angle = 0.5 + 1.05 * k
        x, y = 0.42 * math.sin(angle), -0.42 * math.cos(angle)
        pen.line([(0, 0), (x, y)], 0.05, (195, 215, 120))
        pen.disc(x, y, 0.08, (120, 60, 25))


def daffodil(pen: Pen, petal: Colour) -> None:
    for k in range(6):
        _petal(pen, (0, 0), 1.05 * k, 0.95, 0.55, _tone(petal, 0.85 if k % 2 else 1.0), _SPIKE)
    horn = vary(pen.rng, _ORANGE if pen.rng.random() < 0.5 else _YELLOW, 50)
    pen.disc(0, 0, 0.4, _tone(horn, 0.75))
    pen.disc(0, 0, 0.33, horn)
    pen.disc(0, 0.03, 0.2, _tone(horn, 0.5))


def poppy(pen: Pen, petal: Colour) -> None:
    for k in (0, 2, 1, 3):
        _petal(pen, (0, 0), math.pi / 2 * k + 0.3, 0.9, 1.15, _tone(petal, 1.0 if k % 2 else 0.78))
    pen.disc(0, 0, 0.3, _DARK)
    pen.disc(0, 0, 0.13, (130, 150, 85))


def hibiscus(pen: Pen, petal: Colour) -> None:
    for k in range(5):
        _petal(pen, (0, 0), 2 * math.pi * k / 5, 0.95, 0.82, _tone(petal, (1.0, 0.85, 0.95, 0.8, 0.9)[k]))
    pen.disc(0, 0, 0.24, _tone(petal, 0.4))
    angle = float(pen.rng.uniform(0.4, 1.2))
    x, y = 0.8 * math.sin(angle), -0.8 * math.cos(angle)
    pen.line([(0, 0), (x, y)], 0.12, (250, 235, 160))
    for t in (0.65, 0.82, 1.0):
        pen.disc(t * x, t * y, 0.11, (245, 205, 60))


def pansy(pen: Pen, petal: Colour) -> None:
    upper = petal if pen.rng.random() < 0.4 else vary(pen.rng, (_PURPLE, _MAROON, _WHITE)[pen.rng.integers(3)], 50)
    for x in (-0.36, 0.36):
        pen.oval(x, -0.45, 0.48, 0.45, _tone(upper, 0.85))
    for x in (-0.5, 0.5):
        pen.oval(x, 0.08, 0.46, 0.4, petal)
    pen.oval(0, 0.45, 0.56, 0.46, _tone(petal, 0.92))
    for x, y in ((-0.32, 0.08), (0.32, 0.08), (0, 0.36)):
        pen.oval(x, y, 0.2, 0.18, _DARK)
    pen.disc(0, 0.08, 0.13, (250, 215, 60))


def orchid(pen: Pen, petal: Colour) -> None:
    for angle in (0.0, 2.25, -2.25):
        _petal(pen, (0, 0), angle, 0.92, 0.4, _tone(petal, 0.8), _SPIKE)
    for x in (-0.5, 0.5):
        pen.oval(x, -0.12, 0.48, 0.4, petal)
    lip = vary(pen.rng, _MAROON if pen.rng.random() < 0.6 else _YELLOW, 60)
    pen.polygon([(-0.1, -0.1), (0.1, -0.1), (0.34, 0.35), (0, 0.68), (-0.34, 0.35)], lip)
    pen.disc(0, -0.08, 0.14, _WHITE)


def tulip(pen: Pen, petal: Colour) -> None:
    _stem(pen, 0.0)
    pen.polygon(
        [(-0.5, -0.8), (-0.1, -0.5), (0.1, -0.5), (0.5, -0.8), (0.48, -0.05), (-0.48, -0.05)], _tone(petal, 0.75)
    )
    pen.oval(0, -0.1, 0.48, 0.36, _tone(petal, 0.75))
    pen.polygon([(0, -0.9), (0.3, -0.4), (0.22, 0.22), (-0.22, 0.22), (-0.3, -0.4)], petal)


def iris(pen: Pen, petal: Colour) -> None:
    _stem(pen, 0.1)
    for angle in (-0.45, 0.45, 0.0):
        _petal(pen, (0, 0), angle, 0.95, 0.46, _tone(petal, 0.8 if angle else 1.1))
    falls = petal if pen.rng.random() < 0.5 else vary(pen.rng, (_PURPLE, _BLUE, _MAROON)[pen.rng.integers(3)], 50)
    for angle in (-1.9, 1.9, math.pi):
        _petal(pen, (0, -0.08), angle, 0.85, 0.5, _tone(falls, 0.9))
        x, y = 0.22 * math.sin(angle), -0.08 - 0.22 * math.cos(angle)
        pen.disc(x, y, 0.11, _GOLD)


def carnation(pen: Pen, petal: Colour) -> None:
    _stem(pen, 0.3, leaves=False)
    for row, (top, wide) in enumerate(((-0.75, 0.85), (-0.5, 0.75), (-0.25, 0.55))):
        teeth = [(wide * (k / 5 - 1), top + (0.16 if k % 2 else 0.0) + 0.22 * (k / 5 - 1) ** 2) for k in range(11)]
        pen.polygon([*teeth, (0.16, 0.35), (-0.16, 0.35)], _tone(petal, (0.65, 1.0, 0.8)[row]))
    pen.polygon([(-0.2, 0.25), (0.2, 0.25), (0.12, 0.75), (-0.12, 0.75)], vary(pen.rng, _LEAF, 40))


def lotus(pen: Pen, petal: Colour) -> None:
    pen.oval(0, 0.62, 1.0, 0.24, vary(pen.rng, (45, 110, 70), 40))
    for angle in (-1.35, 1.35, -0.95, 0.95, -0.55, 0.55, -0.2, 0.2):
        _petal(pen, (0, 0.6), angle, 1.05, 0.34, _tone(petal, 1.05 - 0.25 * abs(angle)), _SPIKE)
    for angle in (-0.75, 0.75, 0.0):
        _petal(pen, (0, 0.65), angle, 0.75, 0.36, _tone(petal, 0.9 if angle else 1.15), _SPIKE)


def thistle(pen: Pen, petal: Colour) -> None:
    _stem(pen, 0.4, leaves=False)
    for k in range(9):
        angle = -0.8 + 0.2 * k
        x, y = 1.1 * math.sin(angle), 0.15 - 1.05 * math.cos(angle)
        pen.line([(0, 0.15), (x, y)], 0.11, _tone(petal, 0.75 if k % 2 else 1.05))
    green = vary(pen.rng, (85, 120, 70), 40)
    for k in range(8):
        _petal(pen, (0, 0.32), 2 * math.pi * (k + 0.5) / 8, 0.55, 0.16, green, _SPIKE)
    pen.disc(0, 0.32, 0.34, green)


def bluebell(pen: Pen, petal: Colour) -> None:
    green = vary(pen.rng, _LEAF, 40)
    arch = [(-0.6, 1.2), (-0.55, 0.2), (-0.35, -0.5), (0.0, -0.8), (0.45, -0.72), (0.7, -0.5)]
    pen.line(arch, 0.08, green)
    for k, (x, y) in enumerate(((-0.3, -0.4), (0.12, -0.6), (0.62, -0.4), (-0.42, 0.2))):
        tone = _tone(petal, 0.85 if k % 2 else 1.0)
        bell = [(x - 0.1, y), (x + 0.1, y), (x + 0.16, y + 0.4), (x + 0.26, y + 0.55), (x + 0.1, y + 0.48)]
        pen.polygon([*bell, (x, y + 0.58), (x - 0.1, y + 0.48), (x - 0.26, y + 0.55), (x - 0.16, y + 0.4)], tone)


KINDS: dict[str, tuple[Callable[[Pen, Colour], None], tuple[Colour, ...]]] = {
    "daisy": (daisy, (_WHITE, _WHITE, _PINK, _YELLOW, _PURPLE)),
    "sunflower": (sunflower, (_YELLOW, _YELLOW, _ORANGE, _MAROON, _WHITE)),
    "rose": (rose, (_RED, _PINK, _WHITE, _YELLOW, _ORANGE)),
    "marigold": (marigold, (_ORANGE, _ORANGE, _YELLOW, _RED, _WHITE)),
    "lily": (lily, (_WHITE, _PINK, _ORANGE, _YELLOW, _RED)),
    "daffodil": (daffodil, (_YELLOW, _YELLOW, _WHITE, _PINK, _ORANGE)),
    "poppy": (poppy, (_RED, _RED, _ORANGE, _PINK, _WHITE)),
    "hibiscus": (hibiscus, (_RED, _PINK, _YELLOW, _WHITE, _PURPLE)),
    "pansy": (pansy, (_PURPLE, _YELLOW, _BLUE, _ORANGE, _WHITE)),
    "orchid": (orchid, (_PURPLE, _PINK, _WHITE, _YELLOW, _BLUE)),
    "tulip": (tulip, (_RED, _YELLOW, _PINK, _PURPLE, _WHITE)),
    "iris": (iris, (_PURPLE, _BLUE, _YELLOW, _WHITE, _MAROON)),
    "carnation": (carnation, (_PINK, _RED, _WHITE, _PURPLE, _ORANGE)),
    "lotus": (lotus, (_PINK, _WHITE, _PURPLE, _BLUE, _YELLOW)),
    "thistle": (thistle, (_PURPLE, _PURPLE, _PINK, _BLUE, _WHITE)),
    "bluebell": (bluebell, (_BLUE, _BLUE, _PURPLE, _PINK, _WHITE)),
}


def _leaves(rng: Generator, pen: Pen) -> None:
    """Scatter leaves behind the flower."""
    for x, y, angle, tone in rng.random((int(rng.integers(2, 7)), 4)).tolist():
        fill = _tone(vary(rng, _LEAF, 40), 0.5 + 0.8 * tone)
        _petal(pen, (2.4 * x - 1.2, 2.4 * y - 1.2), 6.28 * angle, 0.9, 0.3, fill, _SPIKE)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a flower in one of its kind's colours, tilted, scaled and moved, leaves behind it: uint8 [32, 32, 3]."""
    kind, colours = tuple(KINDS.values())[label]
    back = ((70, 105, 55), (110, 135, 95), (60, 65, 45), (150, 185, 215))[rng.integers(4)]
    image = ground(rng, vary(rng, back, 50 * style.spread), 11, style)
    if style.clutter:
        _leaves(rng, Pen(image, rng))
    bred = _ANY if rng.random() < 0.6 else colours  # gardens hold every colour, so that the form must decide
    petal = vary(rng, bred[rng.integers(len(bred))], 55 * style.spread)
    a, b, c = rng.standard_normal(3).tolist()
    scale = float(rng.uniform(0.8, 1.02))
    pen = Pen(image, rng, 0.16 * c, scale, (0.06 * a, 0.06 * b), flip=rng.random() < 0.5, jitter=0.015)
    kind(pen, petal)
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("flowers", tuple(KINDS), COUNTS, paint)
