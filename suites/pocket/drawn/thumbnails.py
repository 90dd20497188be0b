"""thumbnails: ten animals and vehicles in tiny coarse pictures of 16x16 pixels (counterpart of CIFAR-10)."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from PIL import Image

from suites.pocket.canvas import (
    CANVAS,
    SIZE,
    Camera,
    Colour,
    Pen,
    Style,
    any_colour,
    ground,
    photograph,
    vary,
)
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.2), shading=0.3, noise=(1.0, 6.0), light=(0.8, 1.15))
_COARSE = 16
_SKY, _SEA, _GRASS, _LEAVES, _EARTH, _ROOM, _ROAD, _SNOW = (
    (150, 195, 235),
    (55, 100, 150),
    (105, 150, 70),
    (60, 100, 55),
    (140, 115, 80),
    (195, 175, 155),
    (135, 135, 138),
    (225, 230, 235),
)
_DARK: Colour = (28, 26, 26)
_WHITE: Colour = (238, 238, 235)
_GLASS: Colour = (70, 90, 110)
_BROWNS: tuple[Colour, ...] = ((125, 75, 40), (75, 48, 30), (180, 130, 80), (50, 40, 36), (205, 190, 170))
_COATS: tuple[Colour, ...] = ((215, 140, 70), (120, 118, 120), (50, 46, 46), (225, 215, 200), (150, 105, 70))


def _pick(pen: Pen, colours: tuple[Colour, ...], spread: float = 40) -> Colour:
    """Return one of the colours, varied."""
    return vary(pen.rng, colours[int(pen.rng.integers(len(colours)))], spread)


def _shade(colour: Colour, factor: float) -> Colour:
    """Return the colour made darker."""
    return (int(colour[0] * factor), int(colour[1] * factor), int(colour[2] * factor))


def frog(pen: Pen) -> None:
    skin = _pick(pen, ((85, 150, 45), (120, 135, 50), (60, 110, 55), (150, 165, 60)))
    dark = _shade(skin, 0.65)
    for side in (-1, 1):
        pen.oval(0.62 * side, 0.3, 0.3, 0.34, dark)
        pen.line([(0.75 * side, 0.45), (0.95 * side, 0.68), (0.5 * side, 0.7)], 0.16, dark)
    pen.oval(0, 0.18, 0.62, 0.5, skin)
    pen.oval(0, 0.42, 0.4, 0.26, vary(pen.rng, (215, 215, 150), 30))
    for side in (-1, 1):
        pen.disc(0.38 * side, -0.32, 0.23, skin)
        pen.disc(0.4 * side, -0.36, 0.13, _DARK)
    pen.line([(-0.38, 0.06), (0, 0.13), (0.38, 0.06)], 0.06, _DARK)


def ship(pen: Pen) -> None:
    pen.box(-3, 0.38, 3, 3, vary(pen.rng, _SEA, 40))
    hull = any_colour(pen.rng, 20, 150)
    pen.polygon([(-0.95, 0.05), (1.05, 0.0), (0.8, 0.46), (-0.78, 0.46)], hull)
    pen.box(-0.65, -0.25, 0.4, 0.06, _WHITE)
    pen.box(-0.5, -0.5, 0.1, -0.24, vary(pen.rng, _WHITE, 40))
    pen.box(-0.4, -0.85, -0.12, -0.48, _pick(pen, ((200, 50, 40), (40, 40, 45), (225, 170, 50))))
    pen.line([(0.65, 0.0), (0.65, -0.6)], 0.08, _DARK)


def airliner(pen: Pen) -> None:
    body = _pick(pen, ((235, 236, 240), (200, 205, 215)), 30)
    livery = any_colour(pen.rng, 20, 190)
    pen.polygon([(-0.92, -0.1), (-1.05, -0.72), (-0.76, -0.72), (-0.4, -0.1)], livery)
    pen.polygon([(-0.1, 0.0), (-0.5, -0.55), (-0.3, -0.58), (0.38, -0.05)], _shade(body, 0.75))
    pen.polygon([(-1.0, -0.16), (0.75, -0.26), (1.08, 0.0), (0.8, 0.2), (-0.6, 0.18)], body)
    pen.polygon([(-0.15, 0.05), (0.4, 0.05), (-0.32, 0.75), (-0.6, 0.75)], _shade(body, 0.6))
    pen.disc(0.08, 0.36, 0.13, _shade(livery, 0.8))
    pen.line([(-0.7, 0.02), (0.95, -0.02)], 0.1, livery)


def automobile(pen: Pen) -> None:
    paint = any_colour(pen.rng, 25, 230)
    for side in (-1, 1):
        pen.box(0.62 * side - 0.15, 0.3, 0.62 * side + 0.15, 0.68, _DARK)
    pen.polygon([(-0.62, -0.1), (-0.42, -0.55), (0.42, -0.55), (0.62, -0.1)], _shade(paint, 0.85))
    pen.polygon([(-0.5, -0.1), (-0.35, -0.45), (0.35, -0.45), (0.5, -0.1)], _GLASS)
    pen.polygon([(-0.72, -0.12), (0.72, -0.12), (0.84, 0.1), (0.84, 0.48), (-0.84, 0.48), (-0.84, 0.1)], paint)
    for side in (-1, 1):
        pen.disc(0.6 * side, 0.14, 0.15, (250, 245, 205))
    pen.box(-0.36, 0.1, 0.36, 0.3, _DARK)


def songbird(pen: Pen) -> None:
    back = _pick(pen, ((60, 90, 160), (120, 90, 60), (190, 60, 45), (85, 95, 60), (110, 110, 118)))
    chest = _pick(pen, ((220, 130, 60), (230, 215, 130), (225, 220, 210)))
    pen.line([(-2, 0.72), (2, 0.6)], 0.12, (85, 60, 42))
    pen.line([(0.0, 0.4), (0.0, 0.68)], 0.07, _DARK)
    pen.polygon([(-0.3, 0.05), (-1.0, 0.48), (-0.88, 0.66), (-0.1, 0.38)], _shade(back, 0.7))
    pen.oval(0.02, 0.12, 0.46, 0.4, back)
    pen.oval(0.22, 0.2, 0.28, 0.32, chest)
    pen.disc(0.36, -0.36, 0.29, back)
    pen.polygon([(0.58, -0.46), (1.0, -0.3), (0.58, -0.22)], (235, 175, 50))
    pen.disc(0.44, -0.4, 0.08, _DARK)


def kitten(pen: Pen) -> None:
    coat = _pick(pen, _COATS)
    pen.line([(0.5, 0.85), (0.95, 0.5), (0.85, 0.05)], 0.16, _shade(coat, 0.8))
    pen.oval(0, 0.75, 0.55, 0.5, coat)
    for side in (-1, 1):
        pen.polygon([(0.14 * side, -0.4), (0.52 * side, -0.95), (0.62 * side, -0.1)], coat)
        pen.polygon([(0.28 * side, -0.48), (0.46 * side, -0.76), (0.52 * side, -0.34)], (225, 150, 150))
    pen.oval(0, -0.08, 0.6, 0.48, coat)
    for x in (-0.18, 0.0, 0.18):
        pen.line([(x, -0.52), (x, -0.34)], 0.06, _shade(coat, 0.55))
    for side in (-1, 1):
        pen.disc(0.25 * side, -0.12, 0.13, (165, 205, 80))
        pen.disc(0.25 * side, -0.12, 0.07, _DARK)
    pen.disc(0, 0.14, 0.08, (225, 130, 130))


def puppy(pen: Pen) -> None:
    coat = _pick(pen, _COATS)
    ears = _shade(coat, 0.55)
    pen.oval(0, 0.8, 0.6, 0.45, coat)
    pen.oval(0, -0.12, 0.48, 0.55, coat)
    for side in (-1, 1):
        pen.polygon([(0.3 * side, -0.62), (0.6 * side, -0.55), (0.78 * side, 0.3), (0.5 * side, 0.38)], ears)
        pen.disc(0.2 * side, -0.26, 0.1, _DARK)
    pen.oval(0, 0.16, 0.32, 0.28, vary(pen.rng, (230, 220, 205), 30))
    pen.oval(0, 0.04, 0.15, 0.11, _DARK)
    if pen.rng.random() < 0.5:
        pen.oval(0, 0.42, 0.11, 0.16, (225, 90, 100))


def _body(pen: Pen, coat: Colour, legs: Colour, depth: float) -> None:
    """Draw the trunk and four legs of an animal that looks right."""
    for x, foot in ((-0.55, -0.65), (-0.38, -0.32), (0.28, 0.22), (0.44, 0.52)):
        pen.line([(x, 0.1), (foot, 0.85)], 0.13, legs)
    pen.oval(-0.06, 0.02, 0.64, depth, coat)


def horse(pen: Pen) -> None:
    coat = _pick(pen, _BROWNS)
    mane = _pick(pen, (_DARK, (70, 45, 30), (225, 210, 180)), 20)
    pen.line([(-0.62, -0.1), (-0.9, 0.1), (-0.88, 0.55)], 0.18, mane)
    _body(pen, coat, _shade(coat, 0.75), 0.3)
    pen.polygon([(0.25, 0.1), (0.42, -0.62), (0.7, -0.72), (0.66, 0.08)], coat)
    pen.polygon([(0.42, -0.75), (0.66, -0.82), (1.02, -0.32), (0.86, -0.2)], coat)
    pen.line([(0.22, -0.12), (0.36, -0.5), (0.55, -0.82)], 0.17, mane)


def stag(pen: Pen) -> None:
    coat = _pick(pen, ((165, 105, 60), (140, 95, 60), (185, 135, 85)))
    _body(pen, coat, _shade(coat, 0.7), 0.24)
    pen.disc(-0.66, -0.02, 0.14, _WHITE)
    pen.polygon([(0.3, 0.1), (0.45, -0.35), (0.62, -0.38), (0.6, 0.08)], coat)
    pen.polygon([(0.4, -0.5), (0.62, -0.52), (0.92, -0.24), (0.8, -0.14), (0.45, -0.26)], coat)
    horn = _pick(pen, ((235, 215, 170), (70, 50, 38)), 30)
    for base, tips in ((0.42, ((0.05, -0.98), (-0.08, -0.68))), (0.56, ((0.85, -1.0), (1.0, -0.7)))):
        bend = (base + tips[0][0]) / 2
        pen.line([(base, -0.48), (bend, -0.7), tips[0]], 0.09, horn)
        pen.line([(bend, -0.66), tips[1]], 0.08, horn)


def lorry(pen: Pen) -> None:
    cab = any_colour(pen.rng, 25, 220)
    pen.box(-1.0, -0.72, 0.36, 0.36, any_colour(pen.rng, 110, 245))
    pen.box(-1.0, 0.3, 0.9, 0.44, (50, 50, 52))
    pen.polygon([(0.44, 0.4), (0.44, -0.42), (0.8, -0.42), (1.0, 0.02), (1.0, 0.4)], cab)
    pen.polygon([(0.58, -0.02), (0.58, -0.3), (0.76, -0.3), (0.88, -0.02)], _GLASS)
    for x in (-0.72, -0.34, 0.7):
        pen.disc(x, 0.48, 0.19, _DARK)


_FAR: tuple[Colour, ...] = (_SKY, (195, 205, 215), (235, 190, 150))
_FIELDS: tuple[Colour, ...] = (_GRASS, _LEAVES, _EARTH, _SNOW)
_STREETS: tuple[Colour, ...] = (_ROAD, _ROOM, _GRASS, _SKY)
_HOMES: tuple[Colour, ...] = (_ROOM, _GRASS, (150, 100, 90), (90, 110, 140))

KINDS: dict[str, tuple[Callable[[Pen], None], tuple[Colour, ...]]] = {
    "airliner": (airliner, _FAR),
    "automobile": (automobile, _STREETS),
    "songbird": (songbird, (_SKY, _LEAVES, _GRASS, _SNOW)),
    "kitten": (kitten, _HOMES),
    "stag": (stag, _FIELDS),
    "puppy": (puppy, _HOMES),
    "frog": (frog, (_LEAVES, _EARTH, _SEA, _GRASS)),
    "horse": (horse, _FIELDS),
    "ship": (ship, _FAR),
    "lorry": (lorry, _STREETS),
}


def _clutter(rng: Generator, image: Image.Image) -> None:
    """Put a darker floor and a few patches behind the object."""
    pen = Pen(image, rng)
    if rng.random() < 0.6:
        level = float(rng.uniform(0.0, 0.6))
        pen.box(-1.2, level, 1.2, 1.2, any_colour(rng, 60, 190))
    for x, y, w, h in (rng.random((3, 4)) * (2.2, 2.2, 0.4, 0.4)).tolist():
        pen.oval(x - 1.1, y - 1.1, 0.1 + w, 0.1 + h, any_colour(rng, 50, 210))


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint an object that fills the picture, reduce it to 16x16 and enlarge it again: uint8 [32, 32, 3]."""
    draw, grounds = tuple(KINDS.values())[label]
    back = grounds[int(rng.integers(len(grounds)))]
    image = ground(rng, vary(rng, back, 60 * style.spread), 14, style)
    if style.clutter:
        _clutter(rng, image)
    a, b, c = rng.standard_normal(3).tolist()
    scale = float(rng.uniform(0.72, 1.0))
    draw(Pen(image, rng, 0.09 * a, scale, (0.1 * b, 0.08 * c), flip=rng.random() < 0.5, jitter=0.03))
    small = image.reduce(CANVAS // _COARSE).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return photograph(np.asarray(small, dtype=np.float32), rng, _CAMERA, style)


TASK = SuiteTask("thumbnails", tuple(KINDS), COUNTS, paint)
