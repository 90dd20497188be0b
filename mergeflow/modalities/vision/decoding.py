"""From a labelled image to what is stored of it. Each image is decoded once and all else is made from that."""

import numpy as np

from mergeflow.data.decoding import Decoded, Decoding
from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.image_columns import image_schema
from mergeflow.modalities.vision.images import encode_png, pixel_digest, resize, to_rgb


def image_decoding(image_size: int) -> Decoding:
    """Return how labelled images become the arrays `images` (uint8 [N, S, S, 3]) and `labels` (int64 [N])."""
    if image_size < 1:
        raise MergeflowError(f"image_size is {image_size}; expected at least 1 pixel.")

    def decode(example: Example, where: str) -> Decoded:
        return decode_example(example, image_size, where)

    return Decoding({"image_size": image_size}, decode, image_schema, size=3 * image_size**2 + 8)


def decode_example(example: Example, image_size: int, where: str) -> Decoded:
    """Read and decode one example and derive all that is stored of it.

    Args:
        where: what an error message calls the example besides its path, such as "task 'x', split train, row 3".

    Returns:
        `images`, the pixels at S x S, and `labels`; the SHA-256 of the pixels at the original resolution; and for
        Parquet the encoded bytes (the source's own, or a PNG of a drawn or edited image).
    """
    try:
        raw = example.read()
    except OSError as error:
        raise MergeflowError(f"{where}: cannot read image '{example.path}': {error}. Restore the file.") from error
    rgb = to_rgb(raw, f"{where}: image '{example.path}'")
    digest = pixel_digest(rgb)
    rgb = example.edited(rgb)
    encoded = raw if isinstance(raw, bytes) and not example.edits else encode_png(rgb)
    arrays = {"images": resize(rgb, image_size), "labels": np.asarray(example.label, np.int64)}
    row = {"image": {"bytes": encoded, "path": example.path}, "label": example.label}
    return Decoded(arrays, digest, row, len(encoded))
