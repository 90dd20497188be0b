"""pets: fourteen breeds of cats and dogs, head and chest from the front (counterpart of OxfordIIITPet)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from suites.pocket.animal import Animal
from suites.pocket.canvas import Camera, Colour, Pen, Style, any_colour, ground, photograph
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.5), shading=0.3, noise=(2.0, 8.0))
_BLACK, _WHITE, _PINK, _CREAM = (28, 26, 28), (240, 238, 234), (225, 150, 150), (235, 220, 195)
_GREY, _BROWN, _TAN, _GINGER = (135, 135, 140), (110, 68, 40), (205, 155, 95), (215, 130, 60)


def siamese(p: Animal) -> None:
    dark = p.hue((72, 52, 45))
    p.chest(p.coat, 0.42)
    p.upright_ears(0.36, 0.85, 0.26, dark, p.hue((110, 80, 75)))
    p.head(0.48, 0.5)
    p.muzzle(0.27, 0.36, dark, 0.16)
    p.eyes((85, 160, 235), 0.23, -0.08, 0.1)
    p.nose((40, 30, 30), 0.26, 0.08)


def persian(p: Animal) -> None:
    p.chest(p.shade, 0.75)
    p.upright_ears(0.5, 0.62, 0.2, p.coat, _PINK)
    p.fringe(0.78, 0.7, p.shade)
    p.head(0.62, 0.52)
    p.muzzle(0.24, 0.15, p.hue(_CREAM), 0.22)
    p.eyes((240, 150, 40), 0.27, -0.04, 0.13)
    p.nose(_PINK, 0.1, 0.07)


def sphynx(p: Animal) -> None:
    p.chest(p.coat, 0.34)
    p.upright_ears(0.42, 0.95, 0.38, p.shade, p.hue(_PINK))
    p.pen.polygon([(-0.44, -0.25), (0.44, -0.25), (0.36, 0.15), (0.14, 0.52), (-0.14, 0.52), (-0.36, 0.15)], p.coat)
    for y in (-0.36, -0.28, -0.2):
        p.pen.line([(p.turn - 0.16, y), (p.turn + 0.16, y)], 0.03, p.shade)
    p.eyes((150, 205, 160), 0.23, 0.0, 0.12)
    p.nose((190, 105, 105), 0.28, 0.07)


def tabby(p: Animal) -> None:
    dark = (int(0.38 * p.coat[0]), int(0.35 * p.coat[1]), int(0.35 * p.coat[2]))
    p.chest(p.coat)
    p.upright_ears(0.38, 0.8, 0.25, p.coat, _PINK)
    p.head(0.56, 0.5)
    for x in (-0.22, 0.0, 0.22):
        p.pen.line([(p.turn * 0.6 + 0.6 * x, -0.14), (p.turn * 0.6 + x, -0.46)], 0.08, dark)
    for s in (-1, 1):
        for y in (0.06, 0.22):
            p.pen.line([(0.3 * s, y), (0.55 * s, y - 0.06)], 0.08, dark)
        for y in (0.66, 0.84):
            p.pen.line([(0.15 * s, y + 0.08), (0.55 * s, y - 0.02)], 0.08, dark)
    p.muzzle(0.2, 0.14, _WHITE, 0.28)
    p.eyes((125, 190, 80))
    p.nose(_PINK, 0.2, 0.07)


def bengal(p: Animal) -> None:
    p.chest(p.coat)
    p.upright_ears(0.4, 0.68, 0.22, p.coat, (90, 60, 45))
    p.head(0.5, 0.5)
    p.spots(26, 0.075, (62, 38, 22))
    p.muzzle(0.22, 0.17, p.hue(_CREAM), 0.28)
    p.eyes((175, 195, 90))
    p.nose((140, 65, 55), 0.2, 0.08)


def bombay(p: Animal) -> None:
    p.chest(p.shade)
    p.upright_ears(0.38, 0.8, 0.26, p.coat, p.hue((70, 55, 58)))
    p.head(0.54, 0.48)
    p.eyes((250, 205, 50), 0.24, -0.05, 0.13)
    p.nose((75, 68, 72), 0.22, 0.07)


def beagle(p: Animal) -> None:
    p.chest(_WHITE, 0.5)
    p.head(0.44, 0.5)
    p.pen.polygon([(-0.07, -0.5), (0.07, -0.5), (0.12 + p.turn, 0.2), (p.turn - 0.12, 0.2)], _WHITE)
    p.hanging_ears(0.52, 0.12, 0.19, 0.46, p.shade)
    p.muzzle(0.26, 0.24, _WHITE, 0.32)
    p.eyes((75, 45, 25), 0.22, -0.08, 0.07)
    p.nose(_BLACK, 0.24, 0.12)


def poodle(p: Animal) -> None:
    p.chest(p.coat, 0.5)
    curls = [(-0.62, 0.15), (0.62, 0.15), (-0.6, 0.42), (0.6, 0.42), (-0.66, -0.1), (0.66, -0.1)]
    curls += [(0.5 * math.sin(k), -0.42 - 0.32 * math.cos(k)) for k in (-1.6, -0.95, -0.3, 0.3, 0.95, 1.6)]
    for k, (x, y) in enumerate(curls):
        p.pen.disc(x, y, 0.22 * p.size, p.shade if k % 2 else p.coat)
    p.pen.oval(0, -0.42, 0.45, 0.3, p.coat)
    p.head(0.34, 0.5)
    p.muzzle(0.16, 0.3, p.coat, 0.32)
    p.eyes((20, 18, 18), 0.17, -0.08, 0.075)
    p.nose((20, 18, 20), 0.38, 0.1)


def dachshund(p: Animal) -> None:
    p.chest(p.coat, 0.34)
    p.hanging_ears(0.42, 0.05, 0.16, 0.52, p.shade)
    p.head(0.34, 0.46)
    for s in (-1, 1):
        p.pen.disc(0.7 * p.turn + 0.16 * s, -0.22 + p.nod, 0.07, (215, 150, 85))
    p.muzzle(0.2, 0.4, (195, 130, 75), 0.42)
    p.muzzle(0.13, 0.4, p.coat, 0.34)
    p.eyes((35, 25, 20), 0.17, -0.08, 0.06)
    p.nose(_BLACK, 0.68, 0.12)


def dalmatian(p: Animal) -> None:
    p.chest(_WHITE, 0.48)
    p.head(0.44, 0.52, p.hue(_WHITE))
    p.spots(22, 0.075, p.coat)
    p.hanging_ears(0.5, 0.0, 0.15, 0.36, p.coat)
    p.muzzle(0.24, 0.25, _WHITE, 0.34)
    p.eyes((60, 45, 35), 0.2, -0.06, 0.07)
    p.nose(_BLACK, 0.26, 0.13)


def husky(p: Animal) -> None:
    p.chest(_WHITE, 0.6)
    p.upright_ears(0.36, 0.82, 0.22, p.coat, _CREAM)
    p.fringe(0.6, 0.56, p.coat, 12)
    for s in (-1, 1):
        p.pen.oval(0.7 * p.turn + 0.22 * s, 0.1, 0.23, 0.32, _WHITE)
    p.muzzle(0.27, 0.28, _WHITE, 0.34)
    p.pen.polygon([(p.turn - 0.1, -0.4), (p.turn + 0.1, -0.4), (p.turn, 0.15)], p.coat)
    p.eyes((110, 185, 245), 0.24, -0.06, 0.085)
    p.nose(_BLACK, 0.28, 0.1)


def pug(p: Animal) -> None:
    mask = p.hue((45, 38, 36))
    p.chest(p.coat, 0.65)
    p.head(0.6, 0.52)
    for s in (-1, 1):
        p.pen.polygon([(0.3 * s, -0.46), (0.66 * s, -0.38), (0.6 * s, 0.06)], mask)
    for y in (-0.32, -0.24):
        p.pen.line([(p.turn - 0.2, y), (p.turn, y + 0.06), (p.turn + 0.2, y)], 0.04, p.shade)
    p.muzzle(0.34, 0.27, mask, 0.24)
    p.eyes((90, 60, 45), 0.32, -0.04, 0.13)
    p.nose((20, 18, 18), 0.14, 0.09)


def corgi(p: Animal) -> None:
    p.chest(_WHITE, 0.55)
    for s in (-1, 1):
        p.pen.oval(0.46 * s, -0.5, 0.22, 0.46 * p.size, p.coat)
        p.pen.oval(0.46 * s, -0.46, 0.12, 0.3 * p.size, _PINK)
    p.head(0.55, 0.46)
    p.pen.polygon([(-0.06, -0.46), (0.06, -0.46), (p.turn + 0.15, 0.3), (p.turn - 0.15, 0.3)], _WHITE)
    p.muzzle(0.24, 0.22, _WHITE, 0.32)
    p.eyes((60, 35, 25), 0.25, -0.04, 0.075)
    p.nose(_BLACK, 0.28, 0.1)


def schnauzer(p: Animal) -> None:
    light, x, y = p.hue((222, 220, 215)), p.turn, p.nod
    p.chest(p.shade, 0.5)
    for s in (-1, 1):
        p.pen.polygon([(0.12 * s, -0.5), (0.4 * s, -0.78), (0.62 * s, -0.3), (0.42 * s, -0.1)], p.shade)
    p.pen.box(-0.4, -0.52, 0.4, 0.3, p.coat)
    beard = ((-0.3, 0.14), (0.3, 0.14), (0.44, 0.6), (0.22, 0.86), (0, 0.74), (-0.22, 0.86), (-0.44, 0.6))
    p.pen.polygon([(x + u, y + v) for u, v in beard], light)
    p.eyes((30, 24, 22), 0.2, -0.02, 0.08)
    for s in (-1, 1):
        brow = ((0.05, -0.1), (0.1, -0.26), (0.44, -0.36), (0.4, -0.2))
        p.pen.polygon([(0.7 * x + s * u, y + v) for u, v in brow], light)
    p.nose(_BLACK, 0.22, 0.13)


@dataclass(frozen=True)
class Breed:
    """How a breed is drawn, and the coats it comes in."""

    draw: Callable[[Animal], None]
    coats: tuple[Colour, ...]


BREEDS = {
    "siamese": Breed(siamese, (_CREAM, (222, 208, 190))),
    "persian": Breed(persian, (_WHITE, (225, 165, 105), (165, 165, 172))),
    "sphynx": Breed(sphynx, ((225, 180, 165), (200, 160, 150))),
    "tabby": Breed(tabby, ((165, 150, 130), (160, 160, 162), _GINGER)),
    "bengal": Breed(bengal, ((215, 165, 85), (200, 150, 95))),
    "bombay": Breed(bombay, ((38, 36, 40),)),
    "beagle": Breed(beagle, ((180, 115, 60), (150, 92, 50))),
    "poodle": Breed(poodle, (_WHITE, (60, 56, 58), (205, 150, 105), (140, 138, 142))),
    "dachshund": Breed(dachshund, ((130, 66, 36), (45, 36, 34))),
    "dalmatian": Breed(dalmatian, (_BLACK, (70, 45, 35))),
    "husky": Breed(husky, ((70, 72, 80), (115, 115, 122), (125, 88, 65))),
    "pug": Breed(pug, ((220, 185, 140), (200, 180, 155))),
    "corgi": Breed(corgi, ((215, 140, 70), (190, 115, 60))),
    "schnauzer": Breed(schnauzer, ((118, 118, 124), (85, 84, 90))),
}


def _room(rng: Generator, pen: Pen, style: Style) -> None:
    """Put a floor, and cushions, boxes or bushes behind the animal."""
    if not style.clutter:
        return
    rows = rng.random((3, 5)).tolist()
    pen.box(-1.2, 0.1 + 0.7 * rows[0][4], 1.2, 1.2, any_colour(rng, 60, 220))
    for x, y, w, h, kind in rows:
        colour = any_colour(rng, 40, 225)
        if kind < 0.5:
            pen.box(2 * x - 1.3, 2 * y - 1.3, 2 * x - 0.9 + 0.5 * w, 2 * y - 0.9 + 0.5 * h, colour)
        else:
            pen.oval(2 * x - 1, 2 * y - 1, 0.2 + 0.3 * w, 0.2 + 0.3 * h, colour)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a breed's head and chest, tilted, turned and scaled, in a room or outdoors: uint8 [32, 32, 3]."""
    breed = tuple(BREEDS.values())[label]
    image = ground(rng, any_colour(rng, 50, 225), 10, style)
    _room(rng, Pen(image, rng), style)
    a, b, c, d, e = rng.random(5).tolist()
    pen = Pen(image, rng, 0.6 * a - 0.3, 0.68 + 0.34 * b, (0.4 * c - 0.2, 0.3 * d - 0.14), e < 0.5, jitter=0.015)
    breed.draw(Animal(pen, style, breed.coats))
    return photograph(image, rng, _CAMERA, style, hue=False)  # the coat is part of the label


TASK = SuiteTask("pets", tuple(BREEDS), COUNTS, paint)
