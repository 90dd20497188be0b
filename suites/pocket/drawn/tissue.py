"""tissue: stained cells, healthy or tumor in the middle of the patch (counterpart of PCAM).

As in PCAM the middle alone decides: the cells around it are healthy or not by chance. Stain, density and the tissue's
own structure vary in both classes, so that mean colour says little; nuclei of a tumor are large, uneven and crowded.
"""

import math

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Style, clip_byte, ground, photograph, vary
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}
MIDDLE = 0.62  # radius of the deciding disc, in units of half the image
REACH = 1.3  # cells farther out, in the corners, are left away

_CAMERA = Camera(blur=(0.1, 0.5), shading=0.15, noise=(2.0, 8.0), light=(0.85, 1.08))
_CORNERS = [(a, math.sin(a), math.cos(a)) for a in (math.pi * k / 4 for k in range(8))]


class Stain:
    """The two dyes of one image: eosin colours the ground, haematoxylin the nuclei."""

    def __init__(self, rng: Generator, style: Style) -> None:
        a, b = rng.random(2).tolist()
        strength = 0.6 + 0.4 * a
        self.eosin = vary(rng, (232, 165 + int(40 * b), 205), 40 * style.spread)
        deep = vary(rng, (88, 48, 130), 45 * style.spread)
        mixed = [strength * d + (1 - strength) * e for d, e in zip(deep, self.eosin, strict=True)]
        self.nucleus: Colour = (clip_byte(mixed[0]), clip_byte(mixed[1]), clip_byte(mixed[2]))

    def faded(self, share: float) -> Colour:
        """Return the nuclear colour with `share` of the ground's colour, negative for darker."""
        r, g, b = (n + share * (e - n) for n, e in zip(self.nucleus, self.eosin, strict=True))
        return clip_byte(r), clip_byte(g), clip_byte(b)


def _places(rng: Generator, step: float) -> list[list[float]]:
    """Return points on a jittered lattice that covers the image however turned, each with four uniform numbers."""
    side = np.arange(-1.4, 1.4, step) + step * rng.random()
    x, y = (part.ravel() for part in np.meshgrid(side, side))
    x, y = x + 0.85 * step * (rng.random(x.size) - 0.5), y + 0.85 * step * (rng.random(x.size) - 0.5)
    rows = np.stack([x, y, *rng.random((4, x.size))], axis=1)
    return rows[x**2 + y**2 < REACH**2].tolist()


def _healthy(pen: Pen, stain: Stain, x: float, y: float, size: float, draws: list[float]) -> None:
    """Draw a small, even, round or slightly oval nucleus."""
    a, b, c, _ = draws
    wide, high = size * (0.8 + 0.3 * a), size * (0.8 + 0.3 * b)
    pen.polygon([(x + wide * u, y + high * v) for _, u, v in _CORNERS], stain.faded(0.25 * c))


def _tumor(pen: Pen, stain: Stain, x: float, y: float, size: float, draws: list[float]) -> None:
    """Draw a large nucleus of uneven outline and stain, most with a dark nucleolus."""
    a, b, c, d = draws
    large, phase = size * (0.7 + 0.6 * a), 6.28 * b
    outline = []
    for angle, u, v in _CORNERS:
        radius = large * (1 + 0.25 * math.sin(2 * angle + phase) + 0.15 * math.sin(3 * angle + 5 * phase))
        outline.append((x + radius * u, y + radius * v))
    pen.polygon(outline, stain.faded(0.45 * c))
    if d < 0.6:
        pen.disc(x, y, 0.3 * large, stain.faded(-0.25))


def _fibres(pen: Pen, stain: Stain) -> None:
    """Draw wavy connective fibres and, now and then, pale spaces."""
    rng = pen.rng
    for x, y, a, b in (rng.random((7, 4)) * 2 - 1).tolist():
        pen.line([(x - 0.6, y + 0.3 * a), (x, y), (x + 0.6, y + 0.3 * b)], 0.06, vary(rng, stain.eosin, 40))
    if rng.random() < 0.4:
        x, y, size = (rng.random(3) * (2, 2, 0.2) + (-1, -1, 0.15)).tolist()
        pen.disc(x, y, size, (240, 232, 238))


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a patch whose middle is healthy (0) or tumor (1), and whose border is either: uint8 [32, 32, 3]."""
    stain = Stain(rng, style)
    image = ground(rng, stain.eosin, 7, style)
    a, b, c, d = rng.random(4).tolist()
    pen = Pen(image, rng, 6.2832 * a)
    if style.clutter:
        _fibres(pen, stain)
    border = label if not style.clutter or b < 0.5 else 1 - label
    crowded = rng.random(2).tolist()
    for kind in sorted({border, label}):
        size = 0.17 + 0.06 * d if kind else 0.09 + 0.04 * c
        step = size * (2.1 + 0.8 * crowded[1] if kind else 2.8 + 1.4 * crowded[0])
        for x, y, *draws in _places(rng, step):
            if kind == (label if math.hypot(x, y) < MIDDLE else border):
                (_tumor if kind else _healthy)(pen, stain, x, y, size, draws)
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("tissue", ("healthy tissue", "tumor tissue"), COUNTS, paint)
