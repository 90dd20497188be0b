"""Prints, drawings in a style that no task has: other typefaces, palettes, strokes and noise; imports no torch."""

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageFilter

from suites.pocket import get_suite
from suites.pocket.canvas import CANVAS, CLIP_ART, SIZE, any_colour, contrasting, reduce_canvas
from suites.pocket.core import generator
from suites.pocket.fonts import glyph, turned

FACES = (
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif-BoldItalic",
    "STIXGeneralBolIta",
)  # of matplotlib's, those in which no task of the suite is written
_WRITTEN = ("digits", "street")
_LEVELS = 5  # of each colour channel
_GREY = 0.5  # how far every colour is moved towards grey: hues stay in their order, so names stay right
_OUTLINE = 0.6  # how dark an edge of full contrast is drawn over
_HATCH = 16.0  # amplitude of the hatching, in grey values


def draw_chunk(suite: str, task: str, start: int, stop: int, seed: int) -> np.ndarray:
    """Draw prints `start` to `stop` of a task's classes, uint8 [stop - start, 32, 32, 3].

    Args:
        start: first index; the label of picture i is i modulo the number of classes.
        stop: index after the last.

    Example:
        >>> draw_chunk("pocket8", "street", 0, 2, 0).shape
        (2, 32, 32, 3)
    """
    drawn = get_suite(suite).tasks[task]
    pictures = []
    for index in range(start, stop):
        rng, label = generator(task, "another style", seed, index), index % len(drawn.class_names)
        plain = _written(rng, label, task) if task in _WRITTEN else drawn.paint(rng, label, CLIP_ART)
        pictures.append(restyled(rng, plain))
    return np.stack(pictures)


def _written(rng: Generator, label: int, task: str) -> np.ndarray:
    """Return a number in one of the other typefaces: white on black, or in two colours on a street."""
    back = any_colour(rng, 20, 235) if task == "street" else (0, 0, 0)
    ink = contrasting(rng, back, 85) if task == "street" else (255, 255, 255)
    a, b, c, d = rng.standard_normal(4).tolist()
    image, full = (Image.new("RGB", (CANVAS, CANVAS), colour) for colour in (back, ink))
    face = FACES[rng.integers(len(FACES))]
    image.paste(full, mask=turned(glyph(face, label), 0.1 * a, 0.98 + 0.08 * b, (2 * c, 2 * d)))
    return reduce_canvas(image).astype(np.uint8)


def restyled(rng: Generator, picture: np.ndarray) -> np.ndarray:
    """Return a picture as a print: pale colours on tinted paper, dark outlines, hatching, few levels of colour.

    Args:
        picture: uint8 [32, 32, 3].
    """
    image = Image.fromarray(picture).convert("L")
    light, dark = (
        np.asarray(image.filter(kind(3)), dtype=np.float32) for kind in (ImageFilter.MaxFilter, ImageFilter.MinFilter)
    )
    pixels = picture.astype(np.float32)
    pale = (1 - _GREY) * pixels + _GREY * pixels.mean(axis=2, keepdims=True)
    paper = rng.uniform((0.85, 0.8, 0.65), (1.0, 0.95, 0.85))
    inked = pale * paper * (1 - _OUTLINE * (light - dark) / 255)[:, :, None]
    period, angle, phase = rng.uniform((2.5, 0.0, 0.0), (5.0, np.pi, 2 * np.pi))
    rows, columns = np.indices((SIZE, SIZE))
    waves = np.sin(2 * np.pi / period * (np.cos(angle) * columns + np.sin(angle) * rows) + phase)
    hatched = np.clip(inked + _HATCH * waves[:, :, None], 0, 255)
    step = 255 / (_LEVELS - 1)
    levels: np.ndarray = (np.round(hatched / step) * step).astype(np.uint8)
    return levels
