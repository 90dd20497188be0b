"""Serve a registered image model: an encoded image in, a label and probabilities out."""

import base64
import binascii
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from mergeflow.errors import MergeflowError
from mergeflow.modalities.served import Columns, Loaded, Served
from mergeflow.modalities.serving import classify
from mergeflow.modalities.vision.images import encode_png, resize, to_rgb

_EXPECTED = "Expected are the bytes of a PNG or JPEG file; over HTTP, their base64."

# `base64` breaks lines, and a browser's data URL says first what follows.
_AROUND = re.compile(r"^\s*data:image/[\w.+-]+;base64,|\s+")


def _answer(loaded: Loaded, columns: Columns) -> dict[str, list[Any]]:
    return classify(loaded, columns, ["image"], partial(_read, loaded.decoding["image_size"]))


def _read(image_size: int, row: Mapping[str, Any]) -> np.ndarray:
    return resize(to_rgb(_to_bytes(row["image"]), "the image", _EXPECTED), image_size)


def _to_bytes(image: Any) -> bytes:
    if not isinstance(image, (bytes, bytearray, str)):
        raise MergeflowError(f"the image is a {type(image).__name__}. {_EXPECTED}")
    try:
        content = base64.b64decode(_AROUND.sub("", image), validate=True) if isinstance(image, str) else bytes(image)
    except (binascii.Error, ValueError):
        raise MergeflowError(f"the image is text but not base64. {_EXPECTED}") from None
    if not content:  # MLflow's server skips what is not base64, up to all of a text
        raise MergeflowError(f"the image is empty, or text that is not base64. {_EXPECTED}")
    return content


def _grey(decoding: Mapping[str, Any]) -> dict[str, Any]:
    size = decoding["image_size"]
    return {"image": encode_png(Image.new("RGB", (size, size), (127, 127, 127)))}


SERVED = Served(
    inputs=lambda decoding: {"image": "bytes"},
    outputs={"label": "text", "probabilities": "shares"},
    example=_grey,
    answer=_answer,
    packages=("torchvision", "open_clip_torch", "timm", "transformers", "pillow"),
)
