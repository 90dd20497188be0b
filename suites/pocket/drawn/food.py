"""food: sixteen dishes on plates and boards, from above or from the side (counterpart of Food101)."""

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Style, any_colour, ground, photograph, regular, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.5), shading=0.35, noise=(3.0, 9.0), light=(0.8, 1.1))
_TABLES: tuple[Colour, ...] = ((150, 105, 70), (95, 65, 45), (190, 185, 178), (110, 130, 150), (60, 60, 66))
_BUN, _CRUST, _GREEN, _TOMATO, _CHEESE, _CREAM, _MEAT = (
    (210, 145, 75),
    (185, 125, 65),
    (95, 165, 60),
    (205, 50, 35),
    (250, 200, 75),
    (248, 240, 220),
    (110, 60, 40),
)


def _tone(pen: Pen, colour: Colour, spread: float = 35) -> Colour:
    return vary(pen.rng, colour, spread)


def _within(pen: Pen, count: int, radius: float) -> list[tuple[float, float]]:
    """Return random points of a disc in the middle, evenly spread."""
    draws = pen.rng.random((count, 2)).tolist()
    return [
        (radius * math.sqrt(a) * math.cos(6.283 * b), radius * math.sqrt(a) * math.sin(6.283 * b)) for a, b in draws
    ]


def _strip(pen: Pen, y: float, height: float, half: float, fill: Colour) -> None:
    """Draw one layer of a stack, `half` wide to both sides."""
    pen.box(-half, y, half, y + height, fill)


def pizza(pen: Pen) -> None:
    pen.disc(0, 0, 0.82, _tone(pen, _CRUST))
    pen.disc(0, 0, 0.7, _tone(pen, (225, 120, 50)))
    pen.disc(0, 0, 0.66, _tone(pen, _CHEESE))
    for k, (x, y) in enumerate(regular(6, 0.42, float(pen.rng.uniform(0, 1)))):
        pen.disc(x, y, 0.15, _tone(pen, (185, 45, 35) if k % 2 == 0 or pen.rng.random() < 0.6 else _GREEN))
    for x, y in regular(8, 0.85)[:4]:
        pen.line([(-x, -y), (x, y)], 0.04, (190, 110, 50))


def hamburger(pen: Pen) -> None:
    bun = _tone(pen, _BUN)
    pen.oval(0, -0.12, 0.72, 0.56, bun)
    for x, y in ((-0.35, -0.4), (0.0, -0.52), (0.35, -0.4), (-0.15, -0.3), (0.18, -0.3)):
        pen.oval(x, y, 0.07, 0.05, _CREAM)
    _strip(pen, -0.05, 0.6, 0.85, _tone(pen, _GREEN))
    _strip(pen, 0.04, 0.13, 0.74, _tone(pen, _TOMATO))
    _strip(pen, 0.14, 0.24, 0.78, _tone(pen, (85, 48, 32)))
    pen.polygon([(-0.6, 0.12), (0.6, 0.12), (0.2, 0.3), (-0.3, 0.14)], _CHEESE)
    pen.polygon([(-0.74, 0.38), (0.74, 0.38), (0.62, 0.68), (-0.62, 0.68)], bun)


def sushi(pen: Pen) -> None:
    for x, y in ((-0.45, -0.32), (0.45, -0.32), (-0.45, 0.42), (0.45, 0.42)):
        if pen.rng.random() < 0.92:
            pen.disc(x, y, 0.36, (28, 42, 36))
            pen.disc(x, y, 0.28, _tone(pen, (244, 242, 235), 15))
            pen.disc(x, y, 0.14, _tone(pen, (240, 120, 80) if pen.rng.random() < 0.7 else _GREEN))


def salad(pen: Pen) -> None:
    pen.disc(0, 0, 0.74, _tone(pen, (60, 105, 45)))
    for x, y in _within(pen, 22, 0.62):
        pen.oval(x, y, 0.2, 0.13, _tone(pen, (110, 170, 65), 70))
    for k, (x, y) in enumerate(_within(pen, 7, 0.55)):
        pen.disc(x, y, 0.13, _tone(pen, _TOMATO if k % 3 else (235, 225, 235)))


def soup(pen: Pen) -> None:
    broth = ((200, 75, 35), (225, 165, 70), (150, 155, 70), (235, 215, 165))[int(pen.rng.integers(4))]
    pen.disc(0, 0, 0.86, _tone(pen, any_colour(pen.rng, 60, 230)))
    pen.disc(0, 0, 0.68, _tone(pen, broth))
    pen.line([(-0.25, 0.12), (-0.05, -0.15), (0.2, 0.1), (0.3, -0.12)], 0.08, _CREAM)
    for x, y in _within(pen, 4, 0.5):
        pen.disc(x, y, 0.06, (60, 130, 50))
    if pen.rng.random() < 0.6:
        pen.line([(0.3, 0.3), (1.05, 1.05)], 0.12, (190, 192, 198))


def spaghetti(pen: Pen) -> None:
    pasta = _tone(pen, (238, 205, 115), 25)
    pen.disc(0, 0, 0.68, (195, 150, 70))
    for x, y in _within(pen, 9, 0.42):
        pen.ring(x, y, float(pen.rng.uniform(0.18, 0.34)), 0.06, pasta)
    pen.disc(0, 0, 0.32, _tone(pen, (180, 45, 25)))
    for x, y in _within(pen, 4, 0.22):
        pen.disc(x, y, 0.1, _tone(pen, _MEAT))


def pancakes(pen: Pen) -> None:
    for k in range(4):
        y = 0.52 - 0.26 * k
        pen.oval(0.03 * (-1) ** k, y, 0.78, 0.25, _tone(pen, (150, 90, 40), 20))
        pen.oval(0.03 * (-1) ** k, y - 0.07, 0.78, 0.24, _tone(pen, (228, 175, 100), 20))
    pen.oval(0.05, -0.32, 0.45, 0.14, (150, 75, 20))
    pen.box(0.3, -0.3, 0.42, 0.2, (150, 75, 20))
    pen.box(-0.16, -0.52, 0.14, -0.32, (252, 232, 130))


def ice_cream(pen: Pen) -> None:
    pen.polygon([(-0.42, -0.05), (0.42, -0.05), (0.0, 0.95)], _tone(pen, (215, 160, 90)))
    for x in (-0.22, 0.0):
        pen.line([(x, 0.0), (x + 0.2, 0.45)], 0.05, (165, 110, 55))
    for x, y in ((-0.27, -0.22), (0.27, -0.22), (0.0, -0.6)):
        scoop = ((250, 235, 200), (235, 140, 165), (110, 68, 45), (165, 215, 165))[int(pen.rng.integers(4))]
        pen.disc(x, y, 0.34, _tone(pen, scoop))


def hot_dog(pen: Pen) -> None:
    bun = _tone(pen, _BUN)
    pen.line([(-0.62, 0.0), (0.62, 0.0)], 0.66, bun)
    for x in (-0.62, 0.62):
        pen.disc(x, 0, 0.33, bun)
    pen.line([(-0.8, 0.0), (0.8, 0.0)], 0.28, _tone(pen, (175, 65, 40)))
    for x in (-0.84, 0.84):
        pen.disc(x, 0, 0.14, (165, 60, 38))
    wave = [(-0.7 + 0.2 * k, 0.08 * (-1) ** k) for k in range(8)]
    pen.line(wave, 0.08, (250, 205, 40))


def fried_egg(pen: Pen) -> None:
    radii = (0.62 + 0.09 * pen.rng.standard_normal(11)).tolist()
    white = [(r * x, r * y) for r, (x, y) in zip(radii, regular(11), strict=True)]
    pen.polygon([(1.09 * x, 1.09 * y) for x, y in white], (205, 165, 110))
    pen.polygon(white, (250, 249, 244))
    x, y = (0.12 * pen.rng.standard_normal(2)).tolist()
    pen.disc(x, y, 0.27, _tone(pen, (250, 180, 35), 30))
    pen.disc(x - 0.08, y - 0.08, 0.07, (255, 230, 150))


def doughnut(pen: Pen) -> None:
    glaze = ((240, 145, 180), (95, 55, 35), (250, 240, 230), (150, 200, 235))[int(pen.rng.integers(4))]
    pen.disc(0, 0, 0.74, _tone(pen, (205, 145, 80)))
    pen.disc(0, 0, 0.66, _tone(pen, glaze))
    for x, y in regular(9, 0.46, float(pen.rng.uniform(0, 1))):
        a, b = (0.09 * pen.rng.standard_normal(2)).tolist()
        pen.line([(x, y), (x + a, y + b)], 0.06, any_colour(pen.rng))
    pen.disc(0, 0, 0.27, (205, 145, 80))
    pen.disc(0, 0, 0.2, (70, 50, 40))


def sandwich(pen: Pen) -> None:
    for k, x in enumerate((-0.15, 0.15)):
        lift = 0.32 * k - 0.08
        bread = _tone(pen, (232, 200, 145))
        pen.polygon([(x - 0.8, lift + 0.3), (x, lift - 0.62), (x + 0.8, lift + 0.3)], _tone(pen, (165, 105, 55)))
        pen.polygon([(x - 0.62, lift + 0.22), (x, lift - 0.48), (x + 0.62, lift + 0.22)], bread)
        for j, layer in enumerate((_GREEN, (235, 150, 150), _CHEESE)):
            y = lift + 0.22 + 0.08 * j
            pen.box(x - 0.76, y, x + 0.76, y + 0.09, _tone(pen, layer))
        pen.box(x - 0.78, lift + 0.46, x + 0.78, lift + 0.56, bread)


def steak(pen: Pen) -> None:
    meat = _tone(pen, (120, 58, 40))
    edge = [
        (-0.7, 0.1),
        (-0.5, -0.42),
        (0.05, -0.5),
        (0.6, -0.3),
        (0.75, 0.15),
        (0.3, 0.3),
        (-0.1, 0.55),
        (-0.55, 0.45),
    ]
    pen.polygon([(1.1 * x, 1.1 * y) for x, y in edge], (228, 195, 160))
    pen.polygon(edge, meat)
    for x in (-0.4, -0.12, 0.16, 0.44):
        pen.line([(x - 0.14, 0.3), (x + 0.14, -0.32)], 0.07, (55, 28, 22))
    pen.disc(0.62, 0.62, 0.13, _tone(pen, _GREEN))
    pen.disc(0.42, 0.74, 0.13, _tone(pen, _GREEN))


def cake_slice(pen: Pen) -> None:
    icing = ((248, 235, 235), (240, 150, 175), (85, 48, 35), (190, 225, 190))[int(pen.rng.integers(4))]
    icing, sponge = _tone(pen, icing), _tone(pen, (235, 200, 120))
    pen.polygon([(-0.85, -0.15), (0.35, -0.6), (0.8, -0.22)], icing)
    pen.polygon([(-0.85, -0.15), (0.8, -0.22), (0.8, 0.55), (-0.85, 0.6)], sponge)
    for y in (-0.2, 0.12):
        pen.polygon([(-0.85, y + 0.03), (0.8, y - 0.03), (0.8, y + 0.09), (-0.85, y + 0.15)], icing)
    pen.disc(0.3, -0.5, 0.17, (205, 25, 40))


def taco(pen: Pen) -> None:
    for k, (x, y) in enumerate(regular(17, 0.74, -1.4)[:8]):
        fill = (_GREEN, _TOMATO, _CHEESE)[k % 3]
        pen.disc(x * 1.08, 0.4 + y * 1.02, 0.18, _tone(pen, fill))
    shell = _tone(pen, (232, 185, 85))
    half = [(0.85 * math.cos(math.pi * k / 12), 0.52 - 0.85 * math.sin(math.pi * k / 12)) for k in range(13)]
    pen.polygon([(0.95 * x, 0.06 + 0.92 * y) for x, y in half], shell)
    for x, y in _within(pen, 6, 0.4):
        pen.disc(x, 0.22 + 0.5 * y, 0.05, (185, 125, 45))


def dumplings(pen: Pen) -> None:
    for x, y in ((-0.42, -0.4), (0.42, -0.34), (-0.4, 0.4), (0.42, 0.44)):
        dough = _tone(pen, (238, 224, 190), 20)
        pen.oval(x, y + 0.04, 0.37, 0.27, (150, 120, 80))
        pen.oval(x, y, 0.36, 0.25, dough)
        for k in range(4):
            pen.line([(x - 0.24 + 0.16 * k, y - 0.22), (x - 0.16 + 0.1 * k, y - 0.02)], 0.05, (185, 155, 110))


# Whether a dish is seen from above, then it may be turned by any angle.
KINDS: dict[str, tuple[Callable[[Pen], None], bool]] = {
    "pizza": (pizza, True),
    "hamburger": (hamburger, False),
    "sushi": (sushi, True),
    "salad": (salad, True),
    "soup": (soup, True),
    "spaghetti": (spaghetti, True),
    "pancakes": (pancakes, False),
    "ice cream": (ice_cream, False),
    "hot dog": (hot_dog, True),
    "fried egg": (fried_egg, True),
    "doughnut": (doughnut, True),
    "sandwich": (sandwich, False),
    "steak": (steak, True),
    "cake slice": (cake_slice, False),
    "taco": (taco, False),
    "dumplings": (dumplings, True),
}


def _serve(pen: Pen, above: bool) -> None:
    """Put a plate, a board or nothing under the dish."""
    kind = float(pen.rng.random())
    wood, china = _tone(pen, (190, 140, 90), 50), _tone(pen, (232, 232, 230), 40)
    if kind < 0.25:
        top = -0.88 if above else 0.45
        pen.box(-0.98, top, 0.98, 0.88, wood)
    elif kind < 0.85 and above:
        pen.disc(0, 0, 1.0, (china[0] * 3 // 4, china[1] * 3 // 4, china[2] * 3 // 4))
        pen.disc(0, 0, 0.97, china)
    elif kind < 0.85:
        pen.oval(0, 0.62, 1.05, 0.26, china)


def _clutter(pen: Pen) -> None:
    """Put a napkin, a glass or crumbs at the borders of the table."""
    for x, y, size, angle in (pen.rng.random((3, 4)) * (1, 1, 0.3, 6.283)).tolist():
        colour = any_colour(pen.rng, 50, 230)
        cx, cy = 1.05 * math.cos(angle), 1.05 * math.sin(angle)
        if x < 0.5:
            pen.disc(cx, cy, 0.12 + size, colour)
        else:
            pen.polygon([(cx + (0.2 + size) * a, cy + 0.3 * b) for a, b in regular(4, 1.2, y)], colour)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Serve a dish on a table, turned, scaled and moved: uint8 [32, 32, 3]."""
    dish, above = tuple(KINDS.values())[label]
    table = _TABLES[int(rng.integers(len(_TABLES)))]
    image = ground(rng, vary(rng, table, 70 * style.spread), 12, style)
    if style.clutter:
        _clutter(Pen(image, rng))
    a, b, c = rng.standard_normal(3).tolist()
    angle = 2 * math.pi * float(rng.random()) if above else 0.07 * a
    scale, shift = float(rng.uniform(0.74, 1.0)), (0.08 * b, 0.07 * c)
    _serve(Pen(image, rng, 0.0, scale, shift), above)
    inner = 0.86 if above else 1.0
    dish(Pen(image, rng, angle, inner * scale, shift, flip=rng.random() < 0.5, jitter=0.02))
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("food", tuple(KINDS), COUNTS, paint)
