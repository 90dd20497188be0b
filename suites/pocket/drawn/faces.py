"""faces: seven expressions on grey drawn faces of varied identity (counterpart of FER2013).

An expression is a point in the space of `Look`. A face shows it at a strength between 0.55 and 1.1, every part a little
off, so that brows, eyes and mouth must be read together.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.random import Generator

from suites.pocket.canvas import Camera, Colour, Pen, Style, clip_byte, ground, photograph
from suites.pocket.core import SuiteTask

COUNTS = {"train": 1500, "validation": 200, "test": 500}

_CAMERA = Camera(blur=(0.0, 0.5), shading=0.4, noise=(3.0, 10.0), light=(0.8, 1.1))


@dataclass(frozen=True)
class Look:
    """What the muscles do, each 0 at rest; lengths in units of half the face.

    Args:
        inner: height of the brows' inner ends.
        outer: height of the brows' outer ends.
        lids: opening of the eyes beyond the resting 1.
        corners: height of the mouth's corners above its middle.
        jaw: opening of the mouth.
        width: half the mouth's width beyond the resting 0.3.
        sneer: height by which one side of the upper lip is drawn up.
        nose: strength of the wrinkles on the nose.
        teeth: how much of the open mouth shows teeth.
        cheeks: strength of the raised cheeks.
    """

    inner: float = 0.0
    outer: float = 0.0
    lids: float = 0.0
    corners: float = 0.0
    jaw: float = 0.0
    width: float = 0.0
    sneer: float = 0.0
    nose: float = 0.0
    teeth: float = 0.0
    cheeks: float = 0.0


LOOKS = {
    "angry": Look(inner=-0.2, outer=0.14, lids=-0.15, corners=-0.06, jaw=0.1, width=0.04, teeth=1.0),
    "disgusted": Look(inner=-0.1, outer=-0.08, lids=-0.6, corners=-0.12, jaw=0.03, width=-0.02, sneer=0.22, nose=1.0),
    "fearful": Look(inner=0.2, outer=-0.02, lids=0.5, corners=-0.08, jaw=0.2, width=0.12, teeth=0.5),
    "happy": Look(inner=0.03, outer=0.03, lids=-0.3, corners=0.24, jaw=0.14, width=0.14, teeth=0.8, cheeks=1.0),
    "neutral": Look(),
    "sad": Look(inner=0.2, outer=-0.16, lids=-0.4, corners=-0.22, width=-0.04),
    "surprised": Look(inner=0.2, outer=0.2, lids=0.65, jaw=0.42, width=-0.12),
}
_FIELDS = tuple(field.name for field in fields(Look))


def _grey(value: float) -> Colour:
    level = clip_byte(value)
    return (level, level, level)


def _shown(rng: Generator, look: Look) -> Look:
    """Return the look at a random strength, every part a little off; what is drawn by amount stays non-negative."""
    strength = float(rng.uniform(0.55, 1.1))
    noise = (0.03 * rng.standard_normal(len(_FIELDS))).tolist()
    values = {name: strength * getattr(look, name) + e for name, e in zip(_FIELDS, noise, strict=True)}
    values["jaw"] = max(0.0, values["jaw"] if look.jaw else 0.0)
    return Look(**values)


@dataclass(frozen=True)
class Person:
    """Whose face it is: grey values and proportions."""

    skin: float
    hair: float
    wide: float
    eye: float
    style: int
    glasses: bool
    beard: bool

    @classmethod
    def draw(cls, rng: Generator) -> "Person":
        """Return a random person."""
        a, b, c, d, e, f = rng.random(6).tolist()
        skin = 105 + 115 * a
        return cls(
            skin, skin * (0.25 + 0.5 * b), 0.62 + 0.16 * c, 0.28 + 0.05 * d, int(5 * e), f < 0.15, 0.15 < f < 0.27
        )


def _head(pen: Pen, p: Person) -> None:
    """Draw hair behind, neck, ears, head and fringe."""
    hair, skin = _grey(p.hair), _grey(p.skin)
    if p.style == 4:  # long hair
        pen.oval(0, -0.1, p.wide + 0.2, 0.9, hair)
        pen.box(-p.wide - 0.2, -0.1, p.wide + 0.2, 1.0, hair)
    elif p.style:
        pen.oval(0, -0.25, p.wide + 0.12, 0.8, hair)
    pen.box(-0.3, 0.6, 0.3, 1.3, _grey(p.skin * 0.82))
    pen.oval(0, 1.35, 0.95, 0.4, _grey(255 - p.hair))
    for sign in (-1, 1):
        pen.oval(sign * p.wide, 0.05, 0.1, 0.17, _grey(p.skin * 0.85))
    pen.oval(0, 0, p.wide, 0.92, skin)
    if p.beard:
        pen.oval(0, 0.62, p.wide * 0.72, 0.34, _grey(0.5 * (p.skin + p.hair)))
    if p.style in (1, 4):
        pen.polygon([(-p.wide, -0.3), (-0.5, -0.98), (0.5, -0.98), (p.wide, -0.3), (0.35, -0.55), (-0.3, -0.6)], hair)
    elif p.style == 2:
        pen.polygon([(-p.wide, -0.25), (-0.5, -0.98), (0.5, -0.98), (p.wide, -0.45), (0, -0.6), (-0.45, -0.5)], hair)


def _eyes(pen: Pen, p: Person, look: Look) -> None:
    """Draw eyes, brows, glasses."""
    ink = _grey(min(p.hair, p.skin * 0.45) * 0.7)
    high = max(0.035, 0.1 * (1 + look.lids))
    gaze = 0.04 * float(pen.rng.standard_normal())
    for sign in (-1, 1):
        x = sign * p.eye
        pen.oval(x, -0.12, 0.17, high, _grey(min(255, p.skin * 1.2 + 40)))
        pen.oval(x + gaze, -0.12, 0.08, min(0.09, high), _grey(25))
        lid = [(x - 0.18, -0.12), (x - 0.1, -0.12 - high), (x + 0.1, -0.12 - high), (x + 0.18, -0.12)]
        pen.line(lid, 0.035, _grey(p.skin * 0.45))
        brow = [(sign * 0.12, -0.36 - look.inner), (sign * (p.eye + 0.22), -0.36 - look.outer)]
        middle = (x, 0.5 * (brow[0][1] + brow[1][1]) - 0.05)
        pen.line([brow[0], middle, brow[1]], 0.085, ink)
        if p.glasses:
            pen.ring(x, -0.1, 0.24, 0.04, _grey(35))
    if p.glasses:
        pen.line([(-0.08, -0.12), (0.08, -0.12)], 0.04, _grey(35))


def _nose(pen: Pen, p: Person, look: Look) -> None:
    """Draw the nose, its wrinkles and the cheeks' folds."""
    shade = _grey(p.skin * 0.7)
    pen.line([(0.03, -0.08), (0.1, 0.2), (-0.06, 0.22)], 0.05, shade)
    if look.nose > 0.25:
        for y in (-0.12, -0.02):
            pen.line([(-0.12, y - 0.04), (0, y + 0.03), (0.12, y - 0.04)], 0.04, _grey(p.skin * 0.55))
        for sign in (-1, 1):
            pen.line([(sign * 0.14, 0.14), (sign * 0.42, 0.42)], 0.05, shade)
    if look.cheeks > 0.25:
        for sign in (-1, 1):
            pen.oval(sign * 0.42, 0.2, 0.14, 0.09, _grey(p.skin * 1.1))
            pen.line([(sign * 0.26, 0.2), (sign * 0.5, 0.45)], 0.035, shade)


def _mouth(pen: Pen, p: Person, look: Look) -> None:
    """Draw the mouth: lips from corner to corner, what is between them where it is open."""
    wide, middle = 0.3 + look.width, 0.52 + 0.3 * look.corners
    corner, lip = middle - look.corners, _grey(p.skin * 0.45)
    lift = look.sneer if look.sneer > 0.1 else 0.0
    top = middle - 0.5 * look.jaw
    upper = [(-wide, corner), (-0.5 * wide, top - 0.25 * look.corners), (0.0, top - 0.4 * lift)]
    upper = [*upper, (0.6 * wide, top - lift), (wide, corner - 0.4 * lift)]
    bottom = middle + 0.6 * look.jaw
    lower = [(0.55 * wide, bottom - 0.15 * look.corners), (-0.55 * wide, bottom - 0.15 * look.corners)]
    if look.jaw > 0.03 or lift:
        pen.polygon([*upper, *lower], _grey(30))
        if look.teeth > 0.3 or lift:
            share = max(0.35, look.teeth) * 0.9
            inner = [(x * 0.85, share * (bottom - y) * 0.85 + y) for x, y in upper[::-1]]
            pen.polygon([*((0.85 * x, y + 0.03) for x, y in upper), *inner], _grey(235))
        pen.line([upper[-1], *lower, upper[0]], 0.06, lip)
    pen.line(upper, 0.07, lip)


def paint(rng: Generator, label: int, style: Style) -> np.ndarray:
    """Paint a face with an expression, tilted, scaled, moved and mirrored half of the time; grey: uint8 [32, 32, 3]."""
    look, person = _shown(rng, tuple(LOOKS.values())[label]), Person.draw(rng)
    back = float(rng.uniform(40, 220))
    image = ground(rng, _grey(back), 9, style)
    if style.clutter:
        behind = Pen(image, rng)
        for x, y, w, tone in rng.random((int(rng.integers(4)), 4)).tolist():
            behind.box(2.4 * x - 1.2, 2.4 * y - 1.2, 2.4 * x - 0.8 + w, 2.4 * y - 0.8 + w, _grey(back + 80 * tone - 40))
    a, b, c, d = rng.standard_normal(4).tolist()
    flip = rng.random() < 0.5
    scale = float(rng.uniform(0.88, 1.06))
    shift = (0.05 * a, 0.05 * b)
    _head(Pen(image, rng, 0.09 * c, scale, shift, flip), person)
    turned = (shift[0] + 0.04 * d, shift[1])  # the features move with the head's turn, its outline does not
    pen = Pen(image, rng, 0.09 * c, scale, turned, flip)
    _eyes(pen, person, look)
    _nose(pen, person, look)
    _mouth(pen, person, look)
    picture = photograph(image, rng, _CAMERA, style)
    return np.repeat(picture[:, :, 1:2], 3, axis=2)


TASK = SuiteTask("faces", tuple(f"{name} face" for name in LOOKS), COUNTS, paint)
