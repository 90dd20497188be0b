"""reviews: a few printed words that praise or blame a film (counterpart of RenderedSST2).

One word carries the sentiment, the others say what is judged. Typefaces, sizes, colours, the order of the lines and
the words themselves are drawn per image, so that the class can be told by reading alone.
"""

from functools import cache

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFont

from suites.pocket.canvas import CANVAS, Camera, Style, any_colour, contrasting, ground, photograph
from suites.pocket.core import SuiteTask
from suites.pocket.fonts import FACES, _face

COUNTS = {"train": 1500, "validation": 200, "test": 500}

POSITIVE = ("good", "great", "fun", "love", "best")
NEGATIVE = ("bad", "dull", "awful", "hate", "worst")
NEUTRAL = ("film", "plot", "this", "cast", "very", "the", "its", "is", "so")

_CAMERA = Camera(blur=(0.0, 0.3), shading=0.2, noise=(1.0, 5.0), light=(0.85, 1.1))
_HEIGHT = 48


@cache
def _word(face: str, word: str) -> Image.Image:
    """Return a word as a mask (mode L) 48 pixels high, from the top of tall letters to the bottom of hanging ones."""
    # Pillow's own layout: the other one is not in every build of it
    font = ImageFont.truetype(str(_face(face)), _HEIGHT, layout_engine=ImageFont.Layout.BASIC)
    _, top, _, bottom = font.getbbox("lyg", anchor="ls")
    left, _, right, _ = font.getbbox(word, anchor="ls")
    drawn = Image.new("L", (round(right - left), round(bottom - top)))
    ImageDraw.Draw(drawn).text((-left, -top), word, fill=255, font=font, anchor="ls")
    return drawn.resize((round(drawn.width * _HEIGHT / drawn.height), _HEIGHT), Image.Resampling.BOX)


def _lines(rng: Generator, label: int) -> list[tuple[str, float]]:
    """Return the lines from top to bottom, each with its height in pixels of the 64-pixel canvas."""
    words = (POSITIVE, NEGATIVE)[label]
    telling = (words[rng.integers(len(words))], float(rng.uniform(29, 32)))
    others = rng.permutation(len(NEUTRAL))[: int(rng.integers(1, 3))].tolist()
    lines = [(NEUTRAL[k], float(rng.uniform(13, 16))) for k in others]
    lines.insert(int(rng.integers(len(lines) + 1)), telling)
    return lines


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Print two or three lines, one of them telling, in one typeface: uint8 [32, 32, 3]."""
    back = any_colour(rng, 0, 70) if rng.random() < 0.5 else any_colour(rng, 185, 255)
    ink = contrasting(rng, back, 130)
    face = FACES[rng.integers(len(FACES))]
    lines = _lines(rng, label)
    mask = Image.new("L", (CANVAS, CANVAS))
    spare = CANVAS - sum(height for _, height in lines)
    y = spare * float(rng.random())
    for word, height in lines:
        drawn = _word(face, word)
        width = min(CANVAS - 2, round(drawn.width * height / _HEIGHT))
        x = 1 + (CANVAS - 2 - width) * float(rng.uniform(0.3, 0.7))
        mask.paste(drawn.resize((width, round(height)), Image.Resampling.BILINEAR), (round(x), round(y)))
        y += height
    image = ground(rng, back, 4, style)
    image.paste(Image.new("RGB", (CANVAS, CANVAS), ink), mask=mask)
    return photograph(image, rng, _CAMERA, style)


TASK = SuiteTask("reviews", ("positive review", "negative review"), COUNTS, paint)
