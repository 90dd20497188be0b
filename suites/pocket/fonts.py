"""Digits in the typefaces that matplotlib ships, rendered once a process."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mergeflow.errors import MergeflowError

CELL = 96
FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmb10",
    "cmr10",
    "cmss10",
    "cmtt10",
)


def _face(name: str) -> Path:
    spec = find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        raise MergeflowError(
            "the embedded suite draws digits with the typefaces of matplotlib, which is not installed: "
            "install mergeflow[suite]."
        )
    return Path(spec.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf" / f"{name}.ttf"


@cache
def glyph(face: str, digit: int) -> Image.Image:
    """Return a digit 52 pixels high in the middle of a 96x96 mask (mode L)."""
    font = ImageFont.truetype(str(_face(face)), 72)
    drawn = Image.new("L", (CELL * 2, CELL * 2))
    ImageDraw.Draw(drawn).text((CELL, CELL), str(digit), fill=255, font=font, anchor="mm")
    left, top, right, bottom = drawn.getbbox() or (0, 0, 1, 1)
    height = 52
    width = max(1, round((right - left) * height / (bottom - top)))
    small = drawn.crop((left, top, right, bottom)).resize((width, height), Image.Resampling.BOX)
    mask = Image.new("L", (CELL, CELL))
    mask.paste(small, ((CELL - width) // 2, (CELL - height) // 2))
    return mask


def turned(
    mask: Image.Image, angle: float, scale: float, shift: tuple[float, float], shear: float = 0.0
) -> Image.Image:
    """Return a mask after a turn, a scale, a shear and a shift.

    Args:
        mask: 96x96, as of `glyph`.
        angle: in radians.
        shift: right and down, in pixels of the result.
        shear: slant to the side, as a share of the height.

    Returns:
        A 64x64 mask (mode L).
    """
    sin, cos = np.sin(angle) / scale, np.cos(angle) / scale
    x, y = 32 + shift[0], 32 + shift[1]
    a, b, c, d = cos, sin + shear * cos, -sin, cos - shear * sin
    half = CELL / 2
    return mask.transform(
        (64, 64),
        Image.Transform.AFFINE,
        (a, b, half - a * x - b * y, c, d, half - c * x - d * y),
        Image.Resampling.BILINEAR,
    )
