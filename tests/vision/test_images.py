"""From any picture to 8-bit RGB: orientation, transparency, 16 bits, and pictures that are thin lines."""

import io
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.images import resize, to_rgb


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


UPRIGHT = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
# What a camera stores of the upright picture under each EXIF orientation.
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.swapaxes(0, 1),
    6: np.rot90(UPRIGHT, 1),
    7: UPRIGHT[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90(UPRIGHT, -1),
}


@pytest.mark.parametrize("orientation", STORED)
def test_a_picture_stands_as_its_camera_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    assert np.array_equal(np.asarray(to_rgb(encoded(image, exif=exif), "it")), UPRIGHT)


@pytest.mark.parametrize("exif", [b"Exif\x00\x00not exif", b"Exif\x00\x00MM\x00*\xff\xff\xff\xff", b"\x01"])
def test_a_picture_whose_exif_is_damaged_stays_as_it_is(exif: bytes) -> None:
    content = encoded(Image.fromarray(UPRIGHT), "JPEG", exif=exif)
    assert to_rgb(content, "it").size == (6, 4)


def transparent(mode: str) -> bytes:
    """A black square on nothing."""
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (2, 2, 5, 5))
    if mode == "P":
        palette = Image.new("P", (8, 8), 1)
        palette.putpalette([0, 0, 0, 0, 0, 0])
        palette.paste(0, (2, 2, 5, 5))
        return encoded(palette, transparency=1)
    if mode in ("I;16", "RGB;16"):
        deep = np.full((8, 8, 3 if mode == "RGB;16" else 1), 1000, ">u2")
        deep[2:5, 2:5] = 0
        return png_of_16_bits(deep, key=1000)
    if mode in ("L", "RGB"):  # one colour stands for nothing
        plain = Image.new(mode, (8, 8), "blue")
        plain.paste(0, (2, 2, 5, 5))
        return encoded(plain, transparency=plain.getpixel((0, 0)))
    return encoded(image.convert(mode))


def png_of_16_bits(values: np.ndarray, key: int) -> bytes:
    """A PNG of 16 bits a channel, as Pillow writes none; the colour whose values are all `key` stands for nothing."""
    height, width, channels = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in values))
    parts = {b"IHDR": header, b"tRNS": struct.pack(">H", key) * channels, b"IDAT": pixels, b"IEND": b""}
    chunks = [
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "I;16", "RGB;16"])
def test_transparent_parts_are_white(mode: str) -> None:
    image = np.asarray(to_rgb(transparent(mode), "it"))
    assert (image[2:5, 2:5] == 0).all()
    assert (image[:2] == 255).all()


def test_half_transparent_lies_on_white_and_opaque_keeps_its_bits() -> None:
    half = np.dstack([UPRIGHT, np.full((4, 6), 128, np.uint8)])
    image = np.asarray(to_rgb(encoded(Image.fromarray(half)), "it"), dtype=float)
    assert np.abs(image - (UPRIGHT * (128 / 255) + 255 * (127 / 255))).max() <= 1
    opaque = Image.fromarray(np.dstack([UPRIGHT, np.full((4, 6), 255, np.uint8)]))
    assert np.array_equal(np.asarray(to_rgb(encoded(opaque), "it")), UPRIGHT)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_the_nearest_of_8(kind: str) -> None:
    values = np.array([[0, 128, 129, 257, 40000, 65535]], np.uint16)
    image = np.asarray(to_rgb(encoded(Image.fromarray(values), kind), "it"))
    assert image[0, :, 0].tolist() == [0, 0, 1, 1, 156, 255]


@pytest.mark.parametrize("values", [np.zeros((2, 2), np.float32), np.zeros((2, 2), np.int32)])
def test_values_without_a_known_range_are_refused(values: np.ndarray) -> None:
    with pytest.raises(MergeflowError, match="expected 8 bits a channel, or 16 bits of grey"):
        to_rgb(encoded(Image.fromarray(values), "TIFF"), "it")


def test_no_program_runs_for_bytes_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encapsulated PostScript is a program, which Pillow gives to Ghostscript where that is installed."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **options: pytest.fail("Ghostscript was called"))
    with pytest.raises(MergeflowError, match=r"it cannot be decoded: its \d+ bytes are not an image of a known format"):
        to_rgb(encoded(Image.fromarray(UPRIGHT), "EPS"), "it")


@pytest.mark.parametrize("size", [(20_000, 5_000), (20_000, 10_000)])
def test_a_picture_beyond_the_limit_of_pixels_is_to_be_made_smaller(size: tuple[int, int]) -> None:
    with pytest.raises(MergeflowError, match=r"it is larger than Pillow reads .*exceeds limit.* Make it smaller"):
        to_rgb(encoded(Image.new("1", size)), "it")


@pytest.mark.parametrize("size", [(7, 200), (200, 7), (3, 100), (33, 1000)])
def test_a_long_picture_is_resized_as_if_it_were_resized_whole(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    resized = resize(Image.fromarray(pixels), 32).astype(int)
    scaled = (32, int(32 * size[1] / size[0])) if size[0] < size[1] else (int(32 * size[0] / size[1]), 32)
    whole = Image.fromarray(pixels).resize(scaled, Image.Resampling.BICUBIC)
    left, top = round((whole.width - 32) / 2), round((whole.height - 32) / 2)
    assert np.abs(np.asarray(whole.crop((left, top, left + 32, top + 32))).astype(int) - resized).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1_000_000), (10_000_000, 1)])
def test_a_line_of_a_few_kilobytes_takes_no_gigabytes(size: tuple[int, int]) -> None:
    code = (
        "import resource, sys\nfrom PIL import Image\n"
        "from mergeflow.modalities.vision.images import encode_png, resize, to_rgb\n"
        f"content = encode_png(Image.new('1', {size}))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "resize(to_rgb(content, 'it'), 224)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200_000
