"""kana: ten brushed syllables in the cursive manner, white on black (counterpart of KMNIST).

A syllable is one to four strokes, each a spline through the points listed here. The brush presses and lifts along a
stroke, may not leave the paper between strokes, and the sheet is warped, so that no two are written alike.
"""

import math
from functools import cache

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw

from suites.pocket.canvas import CANVAS, Camera, Points, Style, cloud, photograph
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.7), shading=0.15, noise=(1.0, 8.0), light=(0.75, 1.0))
_STEPS = 7

STROKES: dict[str, tuple[Points, ...]] = {
    "o": (
        [(-0.7, -0.38), (-0.3, -0.42), (0.15, -0.5)],
        [(-0.28, -0.85), (-0.25, -0.2), (-0.3, 0.55), (-0.6, 0.6), (-0.6, 0.3), (0.1, -0.05), (0.65, 0.2), (0.3, 0.75)],
        [(0.45, -0.6), (0.6, -0.5), (0.75, -0.32)],
    ),
    "ki": (
        [(-0.55, -0.5), (0.0, -0.58), (0.5, -0.72)],
        [(-0.6, -0.1), (0.0, -0.18), (0.6, -0.34)],
        [(-0.2, -0.9), (0.1, -0.35), (0.48, 0.25)],
        [(0.45, 0.35), (-0.2, 0.25), (-0.55, 0.5), (-0.2, 0.82), (0.4, 0.8)],
    ),
    "su": (
        [(-0.85, -0.48), (0.0, -0.55), (0.85, -0.6)],
        [
            (0.15, -0.92),
            (0.18, -0.2),
            (0.05, 0.2),
            (-0.28, 0.1),
            (-0.15, -0.2),
            (0.2, -0.05),
            (0.22, 0.4),
            (-0.3, 0.92),
        ],
    ),
    "tsu": ([(-0.85, -0.25), (-0.2, -0.48), (0.5, -0.45), (0.78, -0.05), (0.5, 0.45), (-0.25, 0.7)],),
    "na": (
        [(-0.75, -0.45), (-0.4, -0.48), (0.0, -0.6)],
        [(-0.3, -0.88), (-0.45, -0.4), (-0.8, 0.15)],
        [(0.4, -0.62), (0.6, -0.52), (0.8, -0.32)],
        [(0.35, -0.15), (0.38, 0.35), (0.1, 0.8), (-0.2, 0.6), (0.1, 0.42), (0.45, 0.6), (0.75, 0.82)],
    ),
    "ha": (
        [(-0.7, -0.8), (-0.82, -0.1), (-0.75, 0.5), (-0.6, 0.75), (-0.5, 0.5)],
        [(-0.25, -0.38), (0.25, -0.4), (0.82, -0.48)],
        [(0.35, -0.85), (0.38, -0.1), (0.35, 0.55), (0.05, 0.75), (-0.15, 0.5), (0.2, 0.4), (0.8, 0.75)],
    ),
    "ma": (
        [(-0.65, -0.55), (0.0, -0.6), (0.65, -0.62)],
        [(-0.55, -0.15), (0.0, -0.2), (0.55, -0.22)],
        [(0.05, -0.92), (0.08, -0.1), (0.05, 0.5), (-0.3, 0.82), (-0.58, 0.6), (-0.2, 0.42), (0.3, 0.6), (0.65, 0.85)],
    ),
    "ya": (
        [(-0.9, -0.05), (-0.2, -0.42), (0.5, -0.5), (0.8, -0.2), (0.5, 0.1), (0.2, 0.02)],
        [(0.05, -0.92), (0.15, -0.78), (0.2, -0.62)],
        [(-0.5, -0.7), (-0.2, 0.1), (0.2, 0.92)],
    ),
    "re": (
        [(-0.5, -0.9), (-0.5, 0.0), (-0.5, 0.9)],
        [(-0.9, -0.4), (-0.45, -0.5), (-0.6, 0.0), (-0.92, 0.45)],
        [(-0.5, 0.05), (0.0, -0.45), (0.3, -0.4), (0.22, 0.2), (0.35, 0.75), (0.65, 0.7), (0.92, 0.35)],
    ),
    "wo": (
        [(-0.6, -0.58), (0.0, -0.62), (0.5, -0.72)],
        [(0.05, -0.95), (-0.2, -0.4), (-0.7, 0.15), (-0.2, -0.08), (0.05, 0.1), (0.05, 0.4)],
        [(0.75, -0.15), (0.1, 0.15), (-0.4, 0.5), (-0.2, 0.82), (0.55, 0.82)],
    ),
}


@cache
def _spline(points: int) -> np.ndarray:
    """Return the matrix [samples, points] from the points of a stroke to samples of its Catmull-Rom spline."""
    ends = np.zeros((points + 2, points))
    ends[1:-1] = np.eye(points)
    ends[0, :2], ends[-1, -2:] = (2, -1), (-1, 2)  # the ends run on straight
    t = np.arange(_STEPS)[:, None] / _STEPS
    weights = 0.5 * np.hstack([-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2])
    rows = [weights @ ends[k : k + 4] for k in range(points - 1)]
    return np.vstack([*rows, ends[-2:-1]])


def _brush(rng: Generator, strokes: tuple[Points, ...], wobble: float) -> Image.Image:
    """Return a 64x64 mask with the strokes brushed, turned, slanted and stretched at random."""
    mask = Image.new("L", (CANVAS, CANVAS))
    pen = ImageDraw.Draw(mask)
    a, b, c, d, e, f = rng.standard_normal(6).tolist()
    turn, slant, half = 0.1 * a, 0.15 * b, CANVAS / 2
    frame = np.array([[1 + 0.08 * c, slant + turn], [-turn, 1 + 0.06 * d]]) * 0.76 * half
    origin = np.array([half + 2.5 * e - 0.5, half + 2.5 * f - 0.5])
    thick, flow = float(rng.uniform(2.2, 3.8)), float(rng.random())
    last: list[float] = []
    for stroke in strokes:
        points = np.asarray(stroke) + wobble * rng.standard_normal((len(stroke), 2))
        path = (_spline(len(stroke)) @ points @ frame.T + origin).tolist()
        if last and flow < 0.35:  # the brush trails over the paper to the next stroke
            pen.line((*last, *path[0]), fill=190, width=2)
        phase, swing = rng.random(2).tolist()
        for k, (x, y) in enumerate(path):
            along = k / len(path)
            radius = thick * (1.15 - 0.45 * along + 0.35 * swing * math.sin(2 * math.pi * (along + phase)))
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        last = path[-1]
    return mask


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Brush a syllable, white on black, and warp the sheet: uint8 [32, 32, 3]."""
    strokes = tuple(STROKES.values())[label]
    mask = np.asarray(_brush(rng, strokes, 0.06 if style.clutter else 0.04))
    rows, columns = np.indices(mask.shape)
    bend = float(rng.uniform(1.0, 3.0))
    dx, dy = np.rint(bend * cloud(rng, 4)).astype(int), np.rint(bend * cloud(rng, 4)).astype(int)
    mask = mask[np.clip(rows + dy, 0, CANVAS - 1), np.clip(columns + dx, 0, CANVAS - 1)]
    small = np.asarray(Image.fromarray(mask).reduce(2), dtype=np.float32)
    return photograph(np.repeat(small[:, :, None], 3, axis=2), rng, _CAMERA, style, hue=False)


TASK = SuiteTask("kana", tuple(f"kana {name}" for name in STROKES), COUNTS, paint)
