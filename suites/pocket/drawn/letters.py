"""letters: twenty-six handwritten letters (counterpart of EMNIST Letters).

As in EMNIST Letters a class holds the upper and the lower case of its letter, half each, and a letter is scaled to
its frame, so size does not tell the case. A letter is written along a skeleton: no typeface, unlike `digits`.
"""

import math
from functools import cache

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw

from suites.pocket.canvas import CANVAS, Camera, Style, photograph
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.2, 0.8), shading=0.0, noise=(0.0, 5.0), light=(0.8, 1.0))
_STEPS = 5  # points on the curve between two of a skeleton's

# Ways to write each letter, upper case then lower case. A word is a stroke, two digits of it a point (column, row);
# a smooth curve runs through the points, and a point written twice is a corner.
_UPPER = {
    "a": ("08303068 1555", "0830303068 0565"),
    "b": ("0008 0040523404 0444664808",),
    "c": ("61301104173867",),
    "d": ("0008 00305264563808",),
    "e": ("600000080868 0454", "6130123434063867"),
    "f": ("60000008 0454",),
    "g": ("6130043867 67646434",),
    "h": ("0008 6068 0464",),
    "i": ("3038 1050 1858",),
    "j": ("6065481806", "6065481806 3080"),
    "k": ("0008 60040468",),
    "l": ("00080868",),
    "m": ("080000444480 8088",),
    "n": ("080000686860",),
    "o": ("301104173857645130",),
    "p": ("0008 0040624404",),
    "q": ("301104173857645130 4578",),
    "r": ("0008 0040624404 2468",),
    "s": ("61300234663807",),
    "t": ("0060 3038",),
    "u": ("0005386560",),
    "v": ("00383860",),
    "w": ("0028284242686880",),
    "x": ("0068 6008",),
    "y": ("0034 6034 3438",),
    "z": ("006060080868", "006060080868 1454"),
}
_LOWER = {
    "a": ("6130033665 606576", "1030515156 5323052655"),
    "b": ("0008 0533563807",),
    "c": ("5120022655",),
    "d": ("6068 6433063867",),
    "e": ("03636330033665",),
    "f": ("51402228 0444",),
    "g": ("5120022453 50563807",),
    "h": ("0008 05335558",),
    "i": ("1318 1010", "131728 1010"),
    "j": ("33362807 3030",),
    "k": ("0008 53060658",),
    "l": ("000728", "063230111738"),
    "m": ("0006 02204246 42608286",),
    "n": ("0006 02305256",),
    "o": ("301103153655635130",),
    "p": ("0008 0130523504",),
    "q": ("5120022554 505876",),
    "r": ("0006 022041",),
    "s": ("51300133553605",),
    "t": ("20264857 0353",),
    "u": ("0004265450 505667",),
    "v": ("00363660",),
    "w": ("0003264242668380",),
    "x": ("0066 6006",),
    "y": ("0034 6018", "0003254350 50563807"),
    "z": ("006060060666",),
}
CLASSES = tuple(f"letter {name}" for name in _UPPER)


@cache
def _curve(points: int) -> np.ndarray:
    """Return the matrix [samples, points] of a Catmull-Rom curve from its points to samples along it."""
    rows = []
    for k in range(points - 1):
        near = [max(k - 1, 0), k, k + 1, min(k + 2, points - 1)]
        for t in np.arange(_STEPS + (k == points - 2)) / _STEPS:
            row = np.zeros(points)
            weights = (-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2)
            np.add.at(row, near, np.array(weights) / 2)
            rows.append(row)
    return np.array(rows)


@cache
def _strokes(skeleton: str) -> tuple[np.ndarray, ...]:
    """Return the points [n, 2] of each stroke of a skeleton."""
    return tuple(
        np.array([(int(word[k]), int(word[k + 1])) for k in range(0, len(word), 2)], dtype=float)
        for word in skeleton.split()
    )


def _hand(rng: Generator, points: np.ndarray, wild: float) -> np.ndarray:
    """Return points [n, 2] under a smooth warp, slant, turn and uneven stretch, fitted to the frame."""
    a, b, c, *phases = rng.standard_normal(7).tolist()
    waves = 0.85 * points[:, ::-1] + 0.3 * points + np.array(phases[:2]) * 3
    points = points + wild * np.array([phases[2], phases[3]]) * np.sin(waves)
    turn, slant = 0.07 * a, 0.16 * b - 0.08
    matrix = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    points = points @ (matrix @ np.array([[math.exp(0.1 * c), slant], [0, 1]])).T
    low, high = points.min(axis=0), points.max(axis=0)
    size = float(rng.uniform(44, 52))
    shift = 0.8 * rng.standard_normal(2)
    return (points - (low + high) / 2) * (size / (high - low).max()) + (CANVAS - 1) / 2 + shift


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Write a letter by hand, white on black; clip art has the steadier hand: uint8 [32, 32, 3]."""
    letter = CLASSES[label][-1]
    ways = (_UPPER if rng.random() < 0.5 else _LOWER)[letter]
    strokes = _strokes(ways[int(rng.integers(len(ways)))])
    wild = 1.0 if style.clutter else 0.6
    curves = [_curve(len(s)) @ (s + 0.12 * wild * rng.standard_normal(s.shape)) for s in strokes]
    ends = np.cumsum([len(curve) for curve in curves])[:-1]
    points = _hand(rng, np.concatenate(curves), 0.18 * wild)
    width = float(rng.uniform(4.5, 8))
    image = Image.new("L", (CANVAS, CANVAS))
    pen = ImageDraw.Draw(image)
    for stroke in np.split(points, ends):
        pen.line([(x, y) for x, y in stroke.tolist()], fill=255, width=round(width), joint="curve")
        for x, y in stroke[[0, -1]].tolist():
            pen.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=255)
    return photograph(image.convert("RGB"), rng, _CAMERA, style, hue=False)


TASK = SuiteTask("letters", CLASSES, COUNTS, paint)
