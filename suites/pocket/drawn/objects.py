"""objects: twenty everyday things in any colour, in a room (counterpart of CIFAR-100)."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import (
    Camera,
    Colour,
    Pen,
    Style,
    any_colour,
    clip_byte,
    contrasting,
    ground,
    photograph,
    vary,
)
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.1, 0.7), shading=0.3, noise=(3.0, 10.0))
_DARK: Colour = (35, 33, 36)
_PALE: Colour = (238, 236, 228)
_WOOD: Colour = (130, 90, 55)


def _tone(colour: Colour, factor: float) -> Colour:
    """Return the colour made darker (below 1) or lighter (above 1)."""
    return (clip_byte(colour[0] * factor), clip_byte(colour[1] * factor), clip_byte(colour[2] * factor))


def bottle(pen: Pen, body: Colour) -> None:
    wide, neck = pen.rng.uniform(0.24, 0.34), pen.rng.uniform(0.08, 0.12)
    shoulder = pen.rng.uniform(-0.35, -0.15)
    sides = [(neck, -0.8), (neck, shoulder - 0.2), (wide, shoulder), (wide, 0.85)]
    pen.polygon([*sides, *((-x, y) for x, y in reversed(sides))], body)
    pen.box(-neck - 0.03, -0.92, neck + 0.03, -0.76, _tone(body, 0.5))
    pen.box(-wide, 0.1, wide, 0.5, vary(pen.rng, _PALE, 60))


def bowl(pen: Pen, body: Colour) -> None:
    deep = pen.rng.uniform(0.5, 0.75)
    pen.polygon(
        [(-0.85, -0.1), (0.85, -0.1), (0.65, deep - 0.25), (0.3, deep), (-0.3, deep), (-0.65, deep - 0.25)], body
    )
    pen.oval(0, -0.1, 0.85, 0.25, _tone(body, 1.25))
    pen.oval(0, -0.07, 0.72, 0.17, _tone(body, 0.5))
    pen.box(-0.3, deep - 0.03, 0.3, deep + 0.09, _tone(body, 0.7))


def candle(pen: Pen, body: Colour) -> None:
    top, wide = pen.rng.uniform(-0.35, 0.0), pen.rng.uniform(0.13, 0.22)
    pen.oval(0, 0.75, 0.55, 0.16, vary(pen.rng, (170, 150, 90), 60))
    pen.box(-wide, top, wide, 0.75, body)
    pen.line([(0, top), (0, top - 0.12)], 0.05, _DARK)
    pen.polygon([(0, top - 0.62), (0.16, top - 0.22), (0, top - 0.06), (-0.16, top - 0.22)], (250, 165, 40))
    pen.oval(0, top - 0.2, 0.07, 0.12, (255, 240, 170))


def castle(pen: Pen, body: Colour) -> None:
    pen.box(-0.7, -0.05, 0.7, 0.8, body)
    for x in (-0.42, -0.1, 0.22):
        pen.box(x, -0.2, x + 0.2, 0.0, body)
    roof = any_colour(pen.rng, 40, 200)
    for x in (-0.72, 0.72):
        pen.box(x - 0.22, -0.4, x + 0.22, 0.8, _tone(body, 0.85))
        pen.polygon([(x - 0.3, -0.38), (x, -0.92), (x + 0.3, -0.38)], roof)
        pen.box(x - 0.06, -0.15, x + 0.06, 0.1, _DARK)
    pen.box(-0.17, 0.4, 0.17, 0.8, _DARK)
    pen.disc(0, 0.4, 0.17, _DARK)


def chair(pen: Pen, body: Colour) -> None:
    back = pen.rng.uniform(-0.95, -0.7)
    leg = _tone(body, 0.65)
    for x, y in ((-0.42, 0.95), (0.5, 0.95), (-0.2, 0.75), (0.68, 0.75)):
        pen.line([(x, 0.1), (x, y)], 0.1, leg)
    pen.polygon([(-0.5, 0.2), (0.56, 0.2), (0.74, 0.0), (-0.28, 0.0)], body)
    pen.polygon([(-0.5, 0.2), (-0.5, back + 0.15), (-0.28, back), (-0.28, 0.0)], _tone(body, 0.8))


def clock(pen: Pen, body: Colour) -> None:
    pen.disc(0, 0, 0.82, body)
    face = vary(pen.rng, _PALE, 40)
    pen.disc(0, 0, 0.64, face)
    for x, y in ((0, 0.54), (0, -0.54), (0.54, 0), (-0.54, 0)):
        pen.disc(x, y, 0.07, _DARK)
    for length in (0.34, 0.5):
        a, b = pen.rng.standard_normal(2).tolist()
        norm = max(0.05, (a * a + b * b) ** 0.5)
        pen.line([(0, 0), (length * a / norm, length * b / norm)], 0.09, _DARK)


def couch(pen: Pen, body: Colour) -> None:
    pen.box(-0.85, -0.4, 0.85, 0.3, body)
    pen.line([(0, -0.4), (0, 0.1)], 0.05, _tone(body, 0.5))
    pen.box(-0.75, 0.08, 0.75, 0.34, _tone(body, 1.25))
    pen.box(-0.8, 0.34, 0.8, 0.5, _tone(body, 0.75))
    for x in (-0.88, 0.88):
        pen.box(x - 0.14, -0.1, x + 0.14, 0.5, _tone(body, 0.65))
        pen.box(x * 0.9 - 0.06, 0.5, x * 0.9 + 0.06, 0.62, _DARK)
    if pen.rng.random() < 0.5:
        pen.box(-0.62, -0.2, -0.24, 0.1, any_colour(pen.rng, 40, 255))


def cup(pen: Pen, body: Colour) -> None:
    slope = pen.rng.uniform(0.0, 0.14)
    pen.ring(0.55, 0.05, 0.32, 0.12, _tone(body, 0.8))
    pen.polygon([(-0.52, -0.55), (0.52, -0.55), (0.52 - slope, 0.65), (-0.52 + slope, 0.65)], body)
    pen.oval(0, -0.55, 0.52, 0.16, _tone(body, 1.25))
    pen.oval(0, -0.53, 0.42, 0.1, vary(pen.rng, (75, 45, 30), 30))


def guitar(pen: Pen, body: Colour) -> None:
    pen.line([(0, 0.2), (0, -0.85)], 0.12, _tone(_WOOD, 0.6))
    pen.polygon([(-0.14, -0.98), (0.14, -0.98), (0.1, -0.72), (-0.1, -0.72)], _tone(_WOOD, 0.5))
    pen.oval(0, 0.08, 0.32, 0.28, body)
    pen.oval(0, 0.54, 0.44, 0.38, body)
    pen.disc(0, 0.28, 0.14, _DARK)
    pen.box(-0.18, 0.62, 0.18, 0.7, _DARK)
    pen.line([(0, 0.66), (0, -0.85)], 0.03, _PALE)


def hammer(pen: Pen, body: Colour) -> None:
    pen.box(-0.1, -0.5, 0.1, 0.95, vary(pen.rng, _WOOD, 60))
    steel = _tone(body, 0.8)
    pen.box(-0.35, -0.78, 0.3, -0.42, steel)
    pen.box(0.28, -0.86, 0.52, -0.34, _tone(body, 0.6))
    pen.polygon([(-0.34, -0.78), (-0.75, -0.52), (-0.7, -0.42), (-0.34, -0.5)], steel)


def key(pen: Pen, body: Colour) -> None:
    pen.disc(-0.55, 0, 0.36, body)
    pen.box(-0.3, -0.1, 0.9, 0.1, body)
    for x, length in zip((0.42, 0.62, 0.8), pen.rng.uniform(0.28, 0.42, 3).tolist(), strict=True):
        pen.box(x, 0, x + 0.12, length, body)
    pen.disc(-0.6, 0, 0.15, _DARK)


def keyboard(pen: Pen, body: Colour) -> None:
    pen.box(-0.95, -0.42, 0.95, 0.42, _tone(body, 0.55))
    cap = _tone(body, 1.35)
    for row, y in enumerate((-0.34, -0.15, 0.04)):
        for k in range(8):
            x = -0.88 + 0.22 * k + 0.03 * row
            pen.box(x, y, x + 0.15, y + 0.13, cap)
    pen.box(-0.45, 0.23, 0.45, 0.35, cap)


def ladder(pen: Pen, body: Colour) -> None:
    low, high = pen.rng.uniform(0.34, 0.46), pen.rng.uniform(0.22, 0.34)
    for sign in (-1, 1):
        pen.line([(sign * low, 0.95), (sign * high, -0.95)], 0.1, body)
    for k in range(6):
        y = 0.75 - 0.3 * k
        wide = high + (low - high) * (y + 0.95) / 1.9
        pen.line([(-wide, y), (wide, y)], 0.09, _tone(body, 0.8))


def lamp(pen: Pen, body: Colour) -> None:
    base = vary(pen.rng, _WOOD, 80)
    pen.line([(0, -0.2), (0, 0.8)], 0.1, base)
    pen.oval(0, 0.82, 0.36, 0.12, base)
    top = pen.rng.uniform(0.2, 0.34)
    pen.polygon([(-top, -0.85), (top, -0.85), (0.62, -0.08), (-0.62, -0.08)], body)
    pen.polygon([(-top * 0.4, -0.85), (top * 0.4, -0.85), (0.2, -0.08), (-0.2, -0.08)], _tone(body, 1.35))


def scissors(pen: Pen, body: Colour) -> None:
    gape = pen.rng.uniform(0.16, 0.36)
    steel = vary(pen.rng, (190, 192, 198), 30)
    for sign in (-1, 1):
        pen.polygon([(-0.09 * sign, 0.22), (0.09 * sign, 0.12), (sign * gape, -0.95)], _tone(steel, 0.9 + 0.1 * sign))
        pen.line([(0, 0.12), (-sign * 0.3, 0.42)], 0.12, body)
        pen.ring(-sign * 0.36, 0.62, 0.29, 0.11, body)
    pen.disc(0, 0.12, 0.07, _DARK)


def table(pen: Pen, body: Colour) -> None:
    for x, y in ((-0.75, 0.8), (0.75, 0.8), (-0.5, 0.5), (0.5, 0.5)):
        pen.line([(x, -0.1), (x, y)], 0.11, _tone(body, 0.6))
    pen.polygon([(-0.95, 0.02), (0.95, 0.02), (0.62, -0.36), (-0.62, -0.36)], body)
    pen.box(-0.95, 0.02, 0.95, 0.12, _tone(body, 0.75))


def telephone(pen: Pen, body: Colour) -> None:
    pen.polygon([(-0.36, -0.2), (0.36, -0.2), (0.8, 0.65), (-0.8, 0.65)], body)
    pen.disc(0, 0.24, 0.3, _PALE)
    pen.disc(0, 0.24, 0.13, _tone(body, 0.6))
    receiver = _tone(body, 0.6)
    pen.box(-0.8, -0.55, 0.8, -0.34, receiver)
    for x in (-0.7, 0.7):
        pen.oval(x, -0.28, 0.24, 0.2, receiver)


def television(pen: Pen, body: Colour) -> None:
    for sign in (-1, 1):
        pen.line([(0, -0.4), (sign * 0.4, -0.95)], 0.06, _DARK)
        pen.line([(sign * 0.5, 0.6), (sign * 0.6, 0.8)], 0.1, _DARK)
    pen.box(-0.85, -0.5, 0.85, 0.62, body)
    pen.box(-0.7, -0.36, 0.4, 0.48, vary(pen.rng, (70, 95, 110), 90))
    pen.polygon([(-0.6, -0.28), (-0.2, -0.28), (-0.6, 0.2)], (190, 205, 210))
    for y in (-0.2, 0.12):
        pen.disc(0.62, y, 0.1, _DARK)


def umbrella(pen: Pen, body: Colour) -> None:
    pen.line([(0, -0.4), (0, 0.75), (0.08, 0.88), (0.22, 0.85), (0.26, 0.7)], 0.08, _tone(_WOOD, 0.7))
    dome = [(-0.92, 0.02), (-0.8, -0.4), (-0.5, -0.7), (0, -0.85), (0.5, -0.7), (0.8, -0.4), (0.92, 0.02)]
    pen.polygon([*dome, (0.6, -0.1), (0.3, 0.02), (0, -0.1), (-0.3, 0.02), (-0.6, -0.1)], body)
    second = _tone(body, 0.6) if pen.rng.random() < 0.5 else any_colour(pen.rng)
    pen.polygon([(0, -0.85), (0.3, 0.02), (0, -0.1), (-0.3, 0.02)], second)


def wardrobe(pen: Pen, body: Colour) -> None:
    pen.box(-0.62, -0.92, 0.62, 0.85, body)
    pen.box(-0.7, -0.95, 0.7, -0.82, _tone(body, 0.6))
    for x in (-0.29, 0.29):
        pen.box(x - 0.23, -0.7, x + 0.23, 0.48, _tone(body, 1.25))
        pen.disc(x * 0.4, -0.05, 0.06, _DARK)
    pen.box(-0.52, 0.58, 0.52, 0.76, _tone(body, 1.25))
    for x in (-0.5, 0.5):
        pen.box(x - 0.08, 0.85, x + 0.08, 0.97, _tone(body, 0.5))


_DRAWN: tuple[Callable[[Pen, Colour], None], ...] = (
    bottle,
    bowl,
    candle,
    castle,
    chair,
    clock,
    couch,
    cup,
    guitar,
    hammer,
    key,
    keyboard,
    ladder,
    lamp,
    scissors,
    table,
    telephone,
    television,
    umbrella,
    wardrobe,
)
KINDS = {kind.__name__: kind for kind in _DRAWN}


def _room(rng: Generator, pen: Pen, back: Colour) -> None:
    """Paint a floor and up to three boxes, all near the wall in colour so that the thing stands out."""
    if rng.random() < 0.7:
        pen.box(-1.2, float(rng.uniform(0.2, 0.7)), 1.2, 1.2, vary(rng, back, 70))
    for x, y, w, h in (rng.random((int(rng.integers(4)), 4)) * (2, 2, 0.7, 0.7)).tolist():
        pen.box(x - 1.2, y - 1.2, x - 1.0 + w, y - 1.0 + h, vary(rng, back, 70))


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a thing of a random colour, tilted, scaled, moved and mirrored half of the time: uint8 [32, 32, 3]."""
    grey = int(rng.integers(50, 215))
    back = vary(rng, (grey, grey, grey), 110 * style.spread)
    image = ground(rng, back, 9, style)
    if style.clutter:
        _room(rng, Pen(image, rng), back)
    body = contrasting(rng, back, 70)
    a, b, c = rng.standard_normal(3).tolist()
    shift, scale = (0.07 * a, 0.07 * b), float(rng.uniform(0.76, 1.0))
    pen = Pen(image, rng, 0.12 * c, scale, shift, flip=rng.random() < 0.5, jitter=0.015)
    tuple(KINDS.values())[label](pen, body)
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("objects", tuple(KINDS), COUNTS, paint)
