"""How long preparation takes: `python benchmarks/prepare_data.py`. Images are made up beforehand, outside the clock."""

import io
import resource
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from PIL import Image

from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example, RawTask
from mergeflow.modalities.vision.preparation import image_decoding

CLASSES = 10


def pictures(count: int, width: int, height: int, encode: bool) -> list[Image.Image | bytes]:
    """Return smooth random pictures with some noise, as PIL images or JPEG files.

    Args:
        count: how many.
        width, height: in pixels, multiples of 8.
        encode: whether they are encoded as JPEG (quality 92).
    """
    random = np.random.default_rng(0)
    made: list[Image.Image | bytes] = []
    for _ in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
        noise = random.integers(-10, 10, (height, width, 3))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + noise
        image = Image.fromarray(smooth.clip(0, 255).astype(np.uint8))
        if encode:
            image.save(buffer := io.BytesIO(), "JPEG", quality=92)
        made.append(buffer.getvalue() if encode else image)
    return made


def measure(what: str, images: list[Image.Image | bytes], image_size: int) -> None:
    """Prepare the pictures as one task, validation and test carved, and print the cost.

    Args:
        what: the row's name.
        images: the pictures.
        image_size: side of the prepared images, in pixels.
    """

    def draw() -> Iterator[Example]:
        for row, image in enumerate(images):
            yield Example(image, f"{row:05d}", row % CLASSES)

    raw = RawTask(what, [str(label) for label in range(CLASSES)], ["a {}"], {"train": draw})
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        prepare_task(raw, folder, image_decoding(image_size))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {len(images)} images, {wall:.1f} s ({cpu:.1f} s of CPU), peak memory of the process {peak:.0f} MiB")


if __name__ == "__main__":
    measure("drawn 32 x 32", pictures(17_200, 32, 32, encode=False), 32)
    measure("JPEG 904 x 600 to 224", pictures(300, 904, 600, encode=True), 224)
