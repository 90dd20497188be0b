"""Transforms of images: pixels that turn, and the coloured-parity task."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from PIL import Image

from mergeflow.data.address import Maker
from mergeflow.data.arrays import quoted
from mergeflow.data.task import Example, Place, Transform
from mergeflow.data.transforms import LABEL_TRANSFORMS, chance, number
from mergeflow.errors import MergeflowError

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PARITY = ("even number", "odd number")


def rotate(value: str, class_names: Sequence[str] | None) -> Transform:
    """Turn every picture counter-clockwise about its centre, bilinear, at its own size; corners become black.

    Args:
        value: the angle in degrees, from -360 to 360.

    Example:
        >>> picture = Image.new("RGB", (8, 8), "white")
        >>> turned = rotate("45", None).apply(Example(picture, ""), Place("train", 0, 0))
        >>> turned.edited(turned.read()).getpixel((0, 0))
        (0, 0, 0)
    """
    angle = number(value)
    if angle is None or not -360 <= angle <= 360:
        raise MergeflowError(f"found '{value}'; expected an angle in degrees from -360 to 360, such as 45 or -22.5.")
    turn = partial(_turned, angle=angle)

    def apply(example: Example, place: Place) -> Example:
        return replace(example, edits=(*example.edits, turn))

    return Transform("", class_names, apply)


def colour(value: str, class_names: Sequence[str] | None) -> Transform:
    """Make the coloured-parity task of digits: label 0 is even, 1 is odd; the digit's strokes are red or green.

    P(red | odd) = r and P(red | even) = 1 - r, drawn for each (seed, split, index).

    Args:
        value: r, from 0 to 1.
        class_names: of the task; each must name a number ("7", "handwritten digit seven"), in any order.

    Example:
        >>> digit = Example(Image.new("RGB", (8, 8), "white"), "", label=7)
        >>> coloured = colour("1", [str(number) for number in range(10)]).apply(digit, Place("train", 0, 0))
        >>> coloured.label, coloured.edited(coloured.read()).getpixel((4, 4))
        (1, (255, 0, 0))

    Source: Arjovsky et al. 2019, "Invariant risk minimization" (coloured digits); without its noise in the labels.
    """
    ratio = number(value)
    if ratio is None or not 0 <= ratio <= 1:
        raise MergeflowError(f"found '{value}'; expected P(red | odd), a number from 0 to 1.")
    names = class_names or ()
    numbers = [_named_number(name) for name in names]
    other = [name for name, number in zip(names, numbers, strict=True) if number is None]
    if other or not names:
        raise MergeflowError(
            f"found {quoted(other) or 'no classes'}; expected classes that name a number, such as '7' or 'handwritten "
            "digit seven': use it on a source of digits."
        )
    odd = [bool(number and number % 2) for number in numbers]

    def apply(example: Example, place: Place) -> Example:
        is_odd = odd[example.label]
        red = chance("colour", place) < (ratio if is_odd else 1 - ratio)
        return replace(example, label=int(is_odd), edits=(*example.edits, partial(_coloured, channel=0 if red else 1)))

    return Transform("", PARITY, apply)


def _turned(rgb: Image.Image, angle: float) -> Image.Image:
    return rgb.rotate(angle, Image.Resampling.BILINEAR)


def _coloured(rgb: Image.Image, channel: int) -> Image.Image:
    """Put the brightness of a picture into one channel."""
    grey, dark = rgb.convert("L"), Image.new("L", rgb.size)
    return Image.merge("RGB", [grey if number == channel else dark for number in range(3)])


def _named_number(name: str) -> int | None:
    """Return the one number that a class name holds, in digits or as a word from zero to nine.

    Example:
        >>> _named_number("handwritten digit seven"), _named_number("12"), _named_number("a cat")
        (7, 12, None)
    """
    words = re.findall(r"\d+|" + "|".join(rf"\b{word}\b" for word in _WORDS), name.lower())
    if len(words) != 1:
        return None
    return int(words[0]) if words[0].isdecimal() else _WORDS.index(words[0])


TRANSFORMS: Mapping[str, Maker] = {**LABEL_TRANSFORMS, "rotate": rotate, "colour": colour}
