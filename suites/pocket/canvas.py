"""Drawing helpers shared by the drawn tasks: colours, a pen in task coordinates, smooth noise, the camera.

A painter draws on a 64x64 Pillow image with a `Pen`, whose coordinates run from -1 to 1 whatever the position, angle
or scale of the object, and hands it to `photograph`, which box-reduces it to 32x32 and adds blur, shading and noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFilter

CANVAS = 64
SIZE = 32

Colour = tuple[int, int, int]
Points = Sequence[tuple[float, float]]

_GRID = (np.arange(SIZE) - (SIZE - 1) / 2) / (SIZE / 2)
ROWS, COLUMNS = np.meshgrid(_GRID, _GRID, indexing="ij")


@dataclass(frozen=True)
class Style:
    """How an image is rendered.

    Args:
        clutter: whether backgrounds carry distracting objects and mottling.
        spread: factor on the random spread of colours.
        camera: factor on blur, shading and noise, 0 for none.
        recolour: probability of each of the global colour changes of clip art (grey, inverted, turned hue).
    """

    clutter: bool = True
    spread: float = 1.0
    camera: float = 1.0
    recolour: float = 0.0


PHOTO = Style()
CLIP_ART = Style(clutter=False, spread=2.0, camera=0.25, recolour=0.2)


@dataclass(frozen=True)
class Camera:
    """The last step of every image: blur in pixels of the small image, shading and noise in grey values.

    Args:
        blur: range of the Gaussian blur's radius, in pixels of the 32x32 image.
        shading: greatest relative change of brightness from one border to the other.
        noise: range of the standard deviation of the pixel noise.
        light: range of the overall brightness factor.
    """

    blur: tuple[float, float] = (0.0, 0.5)
    shading: float = 0.25
    noise: tuple[float, float] = (2.0, 8.0)
    light: tuple[float, float] = (0.85, 1.1)


def clip_byte(value: float) -> int:
    """Return `value` rounded to 0..255."""
    return 0 if value < 0 else 255 if value > 255 else int(value)


def vary(rng: Generator, colour: Colour, spread: float) -> Colour:
    """Return `colour` moved by up to `spread` grey values a channel, half of it common to the three.

    Args:
        spread: grey values, ≥ 0.
    """
    a, b, c, d = (rng.random(4) - 0.5).tolist()
    return (
        clip_byte(colour[0] + spread * (a + d)),
        clip_byte(colour[1] + spread * (b + d)),
        clip_byte(colour[2] + spread * (c + d)),
    )


def any_colour(rng: Generator, low: int = 0, high: int = 255) -> Colour:
    """Return a uniformly random colour."""
    a, b, c = rng.random(3).tolist()
    span = high - low
    return (int(low + span * a), int(low + span * b), int(low + span * c))


def luminance(colour: Colour) -> float:
    """Return the brightness of a colour, 0..255."""
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def contrasting(rng: Generator, other: Colour, minimum: float = 80) -> Colour:
    """Return a random colour whose brightness differs enough from another's; black or white where twenty draws do not.

    Args:
        minimum: least difference of brightness, of 255.
    """
    for _ in range(20):
        colour = any_colour(rng)
        if abs(luminance(colour) - luminance(other)) >= minimum:
            return colour
    return (0, 0, 0) if luminance(other) > 127 else (255, 255, 255)


def cloud(rng: Generator, cells: int, size: int = CANVAS) -> np.ndarray:
    """Return smooth noise of about unit variance.

    Args:
        cells: bumps along a side.
        size: pixels along a side.

    Returns:
        float32 [size, size].
    """
    coarse = rng.standard_normal((cells, cells), dtype=np.float32)
    return np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC))


def ground(rng: Generator, colour: Colour, rough: float, style: Style, cells: int = 6) -> Image.Image:
    """Return a 64x64 ground of one colour, mottled when the style has clutter.

    Args:
        rough: standard deviation of the mottling in grey values; 0 for none.
        cells: bumps of the coarse mottling along a side; the fine one has four times as many.
    """
    if not style.clutter or rough <= 0:
        return Image.new("RGB", (CANVAS, CANVAS), colour)
    bumps = cloud(rng, cells) + 0.7 * cloud(rng, 4 * cells)
    flat = np.asarray(colour, dtype=np.float32) + (rough * bumps)[:, :, None]
    return Image.fromarray(np.clip(flat, 0, 255).astype(np.uint8))


def regular(corners: int, radius: float = 1.0, angle: float = 0.0) -> Points:
    """Return the corners of a regular polygon around the origin.

    Args:
        radius: of the circle through them.
        angle: of the first corner, in radians clockwise from the top.
    """
    steps = (angle + 2 * math.pi * k / corners for k in range(corners))
    return [(radius * math.sin(a), -radius * math.cos(a)) for a in steps]


_CIRCLE = regular(24)


class Pen:
    """Draws on a 64x64 image in coordinates -1..1 (y downwards) of an object that is turned, scaled, moved, flipped.

    Args:
        angle: rotation in radians.
        scale: 1 lets the coordinates -1..1 span the whole image.
        shift: displacement in the same units.
        jitter: standard deviation, in units, added to every corner of a polygon.
    """

    def __init__(
        self,
        image: Image.Image,
        rng: Generator,
        angle: float = 0.0,
        scale: float = 1.0,
        shift: tuple[float, float] = (0.0, 0.0),
        flip: bool = False,
        jitter: float = 0.0,
    ) -> None:
        self.image = image
        self.rng = rng
        self.jitter = jitter
        self.unit = scale * CANVAS / 2
        self._draw = ImageDraw.Draw(image)
        self._sin, self._cos = math.sin(angle) * self.unit, math.cos(angle) * self.unit
        self._x, self._y = (1 + shift[0]) * CANVAS / 2 - 0.5, (1 + shift[1]) * CANVAS / 2 - 0.5
        self._mirror = -1.0 if flip else 1.0

    def place(self, points: Points) -> list[tuple[float, float]]:
        """Return canvas pixels of points in object coordinates."""
        sin, cos, x0, y0, m = self._sin, self._cos, self._x, self._y, self._mirror
        return [(x0 + cos * m * x - sin * y, y0 + sin * m * x + cos * y) for x, y in points]

    def polygon(self, points: Points, fill: Colour) -> None:
        """Fill a polygon."""
        if self.jitter:
            moves = (self.jitter * self.rng.standard_normal((len(points), 2))).tolist()
            points = [(x + a, y + b) for (x, y), (a, b) in zip(points, moves, strict=True)]
        self._draw.polygon(self.place(points), fill=fill)

    def box(self, left: float, top: float, right: float, bottom: float, fill: Colour) -> None:
        """Fill a rectangle, turned with the object."""
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], fill)

    def line(self, points: Points, width: float, fill: Colour) -> None:
        """Draw a broken line, one pixel wide at least."""
        self._draw.line(self.place(points), fill=fill, width=max(1, round(width * self.unit)), joint="curve")

    def disc(self, x: float, y: float, radius: float, fill: Colour) -> None:
        """Fill a disc."""
        ((cx, cy),) = self.place([(x, y)])
        r = radius * self.unit
        self._draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=fill)

    def oval(self, x: float, y: float, rx: float, ry: float, fill: Colour) -> None:
        """Fill an ellipse, turned with the object."""
        self._draw.polygon(self.place([(x + rx * a, y + ry * b) for a, b in _CIRCLE]), fill=fill)

    def ring(self, x: float, y: float, radius: float, width: float, fill: Colour) -> None:
        """Draw a circle's line, one pixel wide at least; the width goes inwards."""
        ((cx, cy),) = self.place([(x, y)])
        r = radius * self.unit
        self._draw.ellipse((cx - r, cy - r, cx + r, cy + r), outline=fill, width=max(1, round(width * self.unit)))


def reduce_canvas(image: Image.Image) -> np.ndarray:
    """Return the 64x64 image box-reduced, float32 [32, 32, 3] (or [32, 32] of a grey one)."""
    return np.asarray(image.reduce(CANVAS // SIZE), dtype=np.float32)


def soften(pixels: np.ndarray, radius: float) -> np.ndarray:
    """Return pixels [32, 32, 3] under a Gaussian blur, float32; the radius is in pixels."""
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float32)


def recolour(rng: Generator, pixels: np.ndarray, probability: float, hue: bool) -> np.ndarray:
    """Return the pixels after clip art's colour changes: grey, inverted, turned hue.

    Args:
        pixels: float [32, 32, 3] in 0..255.
        probability: of each of the changes, 0..1.
        hue: whether colours may change at all (not where colour is part of the label).

    Returns:
        float [32, 32, 3].
    """
    grey, inverted, turned = (rng.random(3) < probability).tolist()
    if not hue:
        return pixels
    if inverted:
        pixels = 255 - pixels
    if turned:
        pixels = pixels[:, :, rng.permutation(3)]
    if grey:
        pixels = np.repeat(pixels.mean(axis=2, keepdims=True), 3, axis=2)
    return pixels


def photograph(
    image: Image.Image | np.ndarray, rng: Generator, camera: Camera, style: Style, hue: bool = True
) -> np.ndarray:
    """Turn a drawing into the final picture.

    Args:
        image: 64x64 RGB image, or pixels float [32, 32, 3] in 0..255.
        hue: whether the hue may change (not where colour is part of the label).

    Returns:
        uint8 [32, 32, 3].
    """
    pixels = reduce_canvas(image) if isinstance(image, Image.Image) else image
    draws = rng.random(6).tolist()
    radius = style.camera * (camera.blur[0] + draws[0] * (camera.blur[1] - camera.blur[0]))
    if radius > 0.2:
        pixels = soften(pixels, radius)
    if style.recolour:
        pixels = recolour(rng, pixels, style.recolour, hue)
    light = camera.light[0] + draws[1] * (camera.light[1] - camera.light[0])
    shade, angle = style.camera * camera.shading * draws[2], 2 * math.pi * draws[3]
    slope = light * (1 + 0.5 * shade * (math.cos(angle) * COLUMNS + math.sin(angle) * ROWS))
    noise = style.camera * (camera.noise[0] + draws[4] * (camera.noise[1] - camera.noise[0]))
    grain = rng.standard_normal((SIZE, SIZE, 3), dtype=np.float32)
    return np.clip(pixels * slope[:, :, None] + noise * grain + 0.5, 0, 255).astype(np.uint8)
