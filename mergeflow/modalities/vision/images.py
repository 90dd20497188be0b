"""Pixels: decode, digest, resize, encode."""

import hashlib
import io
import warnings
from typing import TypeAlias

import numpy as np
from PIL import Image, UnidentifiedImageError

from mergeflow.errors import MergeflowError

ImageInput: TypeAlias = bytes | Image.Image

# Modes that hold 8 bits a channel; the others (16-bit, float) would be clipped by a conversion to RGB.
_EIGHT_BIT_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}


def to_rgb(image: ImageInput, what: str, way_out: str = "Restore the file or remove the row.") -> Image.Image:
    """Return an image as 8-bit RGB.

    Args:
        image: encoded bytes or a PIL image of any 8-bit mode. An alpha channel is dropped, as CLIP does.
        what: how an error message names the image.
        way_out: the advice that an error message gives when the bytes are not an image.

    Raises:
        MergeflowError: undecodable bytes, too many pixels for PIL's limit, or more than 8 bits a channel.

    Example:
        >>> to_rgb(Image.new("L", (4, 2), 7), "grey").getpixel((0, 0))
        (7, 7, 7)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
            opened.load()
    except UnidentifiedImageError:  # its words are the buffer's address in memory
        size = f"its {len(image)} bytes are" if isinstance(image, bytes) else "it is"
        raise MergeflowError(f"{what} cannot be decoded: {size} not an image of a known format. {way_out}") from None
    # PIL's decoders raise many types on damaged files (SyntaxError, struct.error, zlib.error, ...).
    except Exception as error:
        raise MergeflowError(f"{what} cannot be decoded ({type(error).__name__}: {error}). {way_out}") from error
    if opened.mode == "RGB":
        return opened
    if opened.mode not in _EIGHT_BIT_MODES:
        raise MergeflowError(
            f"{what} has mode '{opened.mode}'; expected 8 bits a channel. Convert it to 8-bit RGB first, "
            "choosing the range that matters."
        )
    # Through RGBA, because PIL warns about palettes whose transparency is given in bytes.
    return (opened.convert("RGBA") if opened.mode == "P" else opened).convert("RGB")


def pixel_digest(rgb: Image.Image) -> bytes:
    """Return the SHA-256 over width, height and RGB bytes: equal for equal pictures whatever their file format."""
    return hashlib.sha256(b"%d %d " % rgb.size + rgb.tobytes()).digest()


def resize(rgb: Image.Image, image_size: int) -> np.ndarray:
    """Resize the shorter side to S with bicubic interpolation and crop the centre, as CLIP's preprocessing does.

    Args:
        rgb: picture of any size.
        image_size: S, pixels.

    Returns:
        uint8 array [S, S, 3].

    Example:
        >>> resize(Image.new("RGB", (64, 48)), 32).shape
        (32, 32, 3)

    Source: Radford et al. 2021, "Learning transferable visual models from natural language supervision"; the rounding
    is that of torchvision's Resize and CenterCrop, which open_clip uses.
    """
    width, height = rgb.size
    if (width, height) != (image_size, image_size):
        if width <= height:
            width, height = image_size, int(image_size * height / width)
        else:
            width, height = int(image_size * width / height), image_size
        if rgb.size != (width, height):
            rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
        left, top = round((width - image_size) / 2.0), round((height - image_size) / 2.0)
        rgb = rgb.crop((left, top, left + image_size, top + image_size))
    return np.asarray(rgb)


def encode_png(rgb: Image.Image) -> bytes:
    """Return a lossless PNG. Compression level 1: three times as fast as the default at 32 x 32, hardly larger."""
    buffer = io.BytesIO()
    rgb.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
