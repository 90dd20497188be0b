"""textures: eighteen surface patterns in two random colours (counterpart of DTD).

A pattern is a function from image coordinates to the share of the second colour, computed straight at 32x32 pixels
with edges one pixel soft, so that nothing aliases and nothing has to be reduced.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import (
    COLUMNS,
    ROWS,
    SIZE,
    Camera,
    Style,
    any_colour,
    cloud,
    contrasting,
    photograph,
)
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.4), shading=0.35, noise=(3.0, 10.0), light=(0.85, 1.1))


@dataclass(frozen=True)
class Field:
    """Coordinates of one image after turning and warping, in pixels, and its generator."""

    x: np.ndarray
    y: np.ndarray
    rng: Generator

    def period(self, low: float, high: float) -> float:
        """Return a random period in pixels."""
        return float(self.rng.uniform(low, high))


def edge(distance: np.ndarray) -> np.ndarray:
    """Return 1 where the signed distance [...] in pixels is positive, 0 where negative, soft over one pixel."""
    return np.clip(distance + 0.5, 0, 1)


def saw(value: np.ndarray, period: float) -> np.ndarray:
    """Return the distance [...] to the nearest multiple of `period`, 0..period/2."""
    rest = value % period
    return np.minimum(rest, period - rest)


def striped(f: Field) -> np.ndarray:
    """Stripes every 5 to 10 pixels, half as wide, [32, 32]."""
    p = f.period(5, 10)
    return edge(saw(f.x, p) - p / 4)


def chequered(f: Field) -> np.ndarray:
    """A chequerboard whose pair of squares measures 9 to 15 pixels, [32, 32]."""
    p = f.period(9, 15)
    return 0.5 + 0.5 * np.clip(p / 3 * np.sin(2 * math.pi * f.x / p) * np.sin(2 * math.pi * f.y / p) * 2, -1, 1)


def dotted(f: Field) -> np.ndarray:
    """Dots on a square grid of 6.5 to 10 pixels, [32, 32]."""
    p = f.period(6.5, 10)
    return edge(p * 0.3 - np.hypot(saw(f.x, p), saw(f.y, p)))


def grid(f: Field) -> np.ndarray:
    """Thin lines that cross every 6.5 to 10.5 pixels, [32, 32]."""
    p = f.period(6.5, 10.5)
    return edge(0.9 - np.minimum(saw(f.x, p), saw(f.y, p)))


def zigzag(f: Field) -> np.ndarray:
    """Stripes that turn at sharp corners, [32, 32]."""
    p, q = f.period(6.5, 9), f.period(9, 13)
    return edge(saw(f.y + 1.6 * saw(f.x, q), p) - p / 4)


def wavy(f: Field) -> np.ndarray:
    """Stripes that follow a sine, [32, 32]."""
    p, q = f.period(6.5, 9), f.period(13, 18)
    return edge(saw(f.y + 3.0 * np.sin(2 * math.pi * f.x / q), p) - p / 4)


def ringed(f: Field) -> np.ndarray:
    """Rings around one point every 6 to 10 pixels, [32, 32]."""
    p = f.period(6, 10)
    return edge(saw(np.hypot(f.x, f.y), p) - p / 4)


def radial(f: Field) -> np.ndarray:
    """4 to 8 rays out of one point, [32, 32]."""
    rays = int(f.rng.integers(4, 9))
    return 0.5 + 0.5 * np.clip(np.sin(rays * np.arctan2(f.y, f.x)) * np.hypot(f.x, f.y) * 0.5, -1, 1)


def speckled(f: Field) -> np.ndarray:
    """Single bright pixels, about one in six, [32, 32]."""
    return edge(2.2 * (f.rng.standard_normal((SIZE, SIZE)) - 1.0))


def cloudy(f: Field) -> np.ndarray:
    """Smooth clouds in two sizes, [32, 32]."""
    return np.clip(0.5 + 0.3 * cloud(f.rng, 4, SIZE) + 0.12 * cloud(f.rng, 9, SIZE), 0, 1)


def marbled(f: Field) -> np.ndarray:
    """Dark veins that a smooth field bends, [32, 32]."""
    veins = np.abs(np.sin(0.16 * f.x + 2.2 * cloud(f.rng, 4, SIZE) + 0.5 * cloud(f.rng, 9, SIZE)))
    return np.exp(-4 * veins)


def bricked(f: Field) -> np.ndarray:
    """Rows of bricks 5 to 7.5 pixels high, each moved by half a brick, [32, 32]."""
    h = f.period(5, 7.5)
    row = np.floor(f.y / h)
    return edge(0.75 - np.minimum(saw(f.y, h), saw(f.x + row * h, 2 * h)))


def woven(f: Field) -> np.ndarray:
    """Threads that go over and under each other, [32, 32]."""
    p = f.period(9, 13)
    over = (np.floor(f.x / p) + np.floor(f.y / p)) % 2
    thread = np.where(over > 0.5, saw(f.x, p / 2), saw(f.y, p / 2))
    return edge(1.1 - thread) * 0.8 + 0.2 * over


def crosshatched(f: Field) -> np.ndarray:
    """Fine lines in two directions that are not at right angles, [32, 32]."""
    p, q = f.period(3.6, 4.8), f.period(3.6, 4.8)
    slanted = 0.45 * f.x + 0.9 * f.y
    return 0.5 * edge(0.6 - saw(f.x, p)) + 0.5 * edge(0.6 - saw(slanted, q)) + 0.25 * cloud(f.rng, 5, SIZE)


def scaly(f: Field) -> np.ndarray:
    """Scales that lie over the row below, [32, 32]."""
    p = f.period(8, 12)
    row = np.floor(2 * f.y / p)
    value = np.zeros_like(f.x)
    for k in (row + 1, row, row - 1):  # a scale lies over the ones below it
        distance = np.hypot((f.x + k * p / 2) % p - p / 2, f.y - k * p / 2) / (0.58 * p)
        value = np.where(distance < 1, distance**2, value)
    return value


def _voronoi(f: Field, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return distances to the nearest and second nearest of `count` random points."""
    points = f.rng.uniform(-19, 19, (2, count))
    distance = np.sqrt((f.x.ravel()[:, None] - points[0]) ** 2 + (f.y.ravel()[:, None] - points[1]) ** 2)
    two = np.partition(distance, 1, axis=1)
    return two[:, 0].reshape(f.x.shape), two[:, 1].reshape(f.x.shape)


def cracked(f: Field) -> np.ndarray:
    """The borders between 14 random cells, [32, 32]."""
    first, second = _voronoi(f, 14)
    return edge(1.0 - (second - first) * 0.7)


def honeycombed(f: Field) -> np.ndarray:
    """The borders of hexagons 7 to 10 pixels wide, [32, 32]."""
    p = f.period(7, 10)
    rows = p * math.sqrt(3) / 2
    best = np.full_like(f.x, 1e9)
    second = best
    for row in (0, 1):
        u = (f.x + row * p / 2) % p - p / 2
        v = (f.y + row * rows) % (2 * rows) - rows
        for du in (-p, 0, p):
            d = np.hypot(u - du, v)
            second = np.minimum(second, np.maximum(best, d))
            best = np.minimum(best, d)
    return edge(1.3 - (second - best))


def bubbly(f: Field) -> np.ndarray:
    """Nine rings filled with a light tone, of radius 2.5 to 6 pixels, [32, 32]."""
    value = np.zeros_like(f.x)
    for x, y, r in (f.rng.random((9, 3)) * (32, 32, 3.5) + (-16, -16, 2.5)).tolist():
        d = np.hypot(f.x - x, f.y - y)
        value = np.where(d < r, 0.25, value)
        value = np.maximum(value, edge(0.9 - np.abs(d - r)))
    return value


_DRAWN: tuple[Callable[[Field], np.ndarray], ...] = (
    striped,
    chequered,
    dotted,
    grid,
    zigzag,
    wavy,
    ringed,
    speckled,
    cloudy,
    marbled,
    bricked,
    woven,
    crosshatched,
    scaly,
    honeycombed,
    cracked,
    radial,
    bubbly,
)
PATTERNS = {p.__name__: p for p in _DRAWN}
_CENTRED = {"ringed", "radial"}
_UPRIGHT = {"bricked", "scaly"}


def _field(rng: Generator, name: str) -> Field:
    """Return the coordinates of one image: turned, slightly warped, with a random origin."""
    spread = 0.15 if name in _UPRIGHT else math.pi
    angle = spread * (2 * rng.random() - 1)
    sin, cos = math.sin(angle), math.cos(angle)
    half = SIZE / 2
    x, y = half * COLUMNS, half * ROWS
    warp = 0.5 * rng.random()
    x, y = x + warp * cloud(rng, 4, SIZE), y + warp * cloud(rng, 4, SIZE)
    a, b = ((rng.random(2) - 0.5) * (10 if name in _CENTRED else 40)).tolist()
    return Field(cos * x + sin * y + a, cos * y - sin * x + b, rng)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a pattern with a random turn, period and pair of colours: uint8 [32, 32, 3]."""
    name, pattern = tuple(PATTERNS.items())[label]
    share = pattern(_field(rng, name))[:, :, None]
    ground = any_colour(rng, 20, 235)
    ink = contrasting(rng, ground, 70 if style.clutter else 100)
    pixels = (1 - share) * np.asarray(ground, dtype=np.float64) + share * np.asarray(ink, dtype=np.float64)
    return photograph(pixels, rng, _CAMERA, style)


TASK = SuiteTask("textures", tuple(f"{name} texture" for name in PATTERNS), COUNTS, paint)
