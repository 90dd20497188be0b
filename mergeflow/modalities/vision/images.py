"""Pixels: decode, digest, resize, encode."""

import hashlib
import io
import warnings
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mergeflow.errors import MergeflowError

ImageInput: TypeAlias = bytes | Image.Image

# Modes that hold 8 bits a channel.
_EIGHT_BIT_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}
_GROUND = (255, 255, 255)  # what a picture with transparent parts lies on: paper
_ORIENTATION = 0x0112  # of EXIF; 1 is upright
_LONG = 16  # a picture that is longer than so many times its width is cut before it is resized


def to_rgb(image: ImageInput, what: str, way_out: str = "Restore or remove it.") -> Image.Image:
    """Return an image as 8-bit RGB, upright by its EXIF orientation, transparent parts on white.

    Grey values of 16 bits become the nearest of 8.

    Args:
        what: how an error message names the image.
        way_out: the advice that an error message gives when the bytes are not an image.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Corrupt EXIF", UserWarning)  # then the picture stays as it is
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
            if opened.format == "EPS":  # a program, which Pillow would have Ghostscript run
                raise UnidentifiedImageError
            opened.load()
    except UnidentifiedImageError:  # its words are the buffer's address in memory
        size = f"its {len(image)} bytes are" if isinstance(image, bytes) else "it is"
        raise MergeflowError(f"{what} cannot be decoded: {size} not an image of a known format. {way_out}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise MergeflowError(f"{what} is larger than Pillow reads ({error}) Make it smaller.") from None
    # PIL's decoders raise many types on damaged files (SyntaxError, struct.error, zlib.error, ...).
    except Exception as error:
        raise MergeflowError(f"{what} cannot be decoded ({type(error).__name__}: {error}). {way_out}") from error
    opened = _upright(opened)
    key = opened.info.get("transparency")
    if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format == "PNG"):
        grey = np.asarray(opened)
        grey = np.where(grey == key, _GROUND[0], np.rint(grey / 257))
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if isinstance(key, tuple) and isinstance(image, bytes) and image[1:4] == b"PNG" and image[24] == 16:
        opened.info["transparency"] = tuple(value >> 8 for value in key)  # as Pillow reads the pixels
    if opened.mode not in _EIGHT_BIT_MODES:
        raise MergeflowError(
            f"{what} has mode '{opened.mode}'; expected 8 bits a channel, or 16 bits of grey. Convert it to 8-bit RGB "
            "first, choosing the range that matters."
        )
    if not opened.has_transparency_data:
        return opened if opened.mode == "RGB" else opened.convert("RGB")
    solid = opened.convert("LA" if opened.mode == "La" else "RGBA").convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", solid.size, _GROUND), solid).convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """Return a picture turned as its camera says; one whose EXIF cannot be read stays as it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            turned = image.getexif().get(_ORIENTATION, 1) != 1
            upright = ImageOps.exif_transpose(image) if turned else image
    except Exception:  # PIL's reader of EXIF raises many types on damaged blocks
        return image
    upright.format = image.format
    return upright


def pixel_digest(rgb: Image.Image) -> bytes:
    """Return the SHA-256 over width, height and RGB bytes: equal for equal pictures whatever their file format."""
    return hashlib.sha256(b"%d %d " % rgb.size + rgb.tobytes()).digest()


def resize(rgb: Image.Image, image_size: int) -> np.ndarray:
    """Resize the shorter side to S with bicubic interpolation and crop the centre: uint8 [S, S, 3], as CLIP does.

    Source: Radford et al. 2021, "Learning transferable visual models from natural language supervision"; the rounding
    is that of torchvision's Resize and CenterCrop, which open_clip uses.
    """
    width, height = rgb.size
    if (width, height) != (image_size, image_size):
        if max(width, height) > _LONG * min(width, height):
            return np.asarray(_centre_of_long(rgb, image_size))
        if width <= height:
            width, height = image_size, int(image_size * height / width)
        else:
            width, height = int(image_size * width / height), image_size
        if rgb.size != (width, height):
            rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
        left, top = round((width - image_size) / 2.0), round((height - image_size) / 2.0)
        rgb = rgb.crop((left, top, left + image_size, top + image_size))
    return np.asarray(rgb)


def _centre_of_long(rgb: Image.Image, image_size: int) -> Image.Image:
    """Resize and crop at once, equal but for rounding, without the pixels that are cropped.

    Resized whole, a picture of 1 x 1,000,000 pixels, 3 kB as PNG, has 224 x 224,000,000.
    """
    short, long = sorted(rgb.size)
    resized = int(image_size * long / short)
    scale = long / resized
    first = round((resized - image_size) / 2.0) * scale
    margin = 2 * max(scale, 1) + 1  # as far as bicubic interpolation looks
    start, end = max(0, int(first - margin)), min(long, int(first + image_size * scale + margin) + 1)
    ends = (first - start, first - start + image_size * scale)
    stands = rgb.width < rgb.height
    part = rgb.crop((0, start, short, end) if stands else (start, 0, end, short))
    box = (0.0, ends[0], float(short), ends[1]) if stands else (ends[0], 0.0, ends[1], float(short))
    return part.resize((image_size, image_size), Image.Resampling.BICUBIC, box=box)


def encode_png(rgb: Image.Image) -> bytes:
    """Return a lossless PNG. Compression level 1: three times as fast as the default at 32 x 32, hardly larger."""
    buffer = io.BytesIO()
    rgb.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
