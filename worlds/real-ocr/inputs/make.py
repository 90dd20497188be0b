"""Fill this folder with Tesseract's base, four fine-tunes of it, and lines to read: python inputs/make.py

Packages are fetched by pip, apt-get and npm, each of one version and checked by its SHA-256, into inputs/packages. What
is taken from them, and under which licence, is in `mergeflow docs real-data`.
"""

import gzip
import io
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from safetensors.torch import save_file
from traineddata import read

from mergeflow.data.packages import Package, contents, fetch, run_make
from mergeflow.errors import MergeflowError

HERE = Path(__file__).resolve().parent
LETTERS = "ABCDHKLMPRTVXY34"  # those that the fine-tunes have learnt
LENGTH, SIZE, MARGIN = 24, 26, 12  # of a line, in letters; of its letters and of the white around it, in pixels
LINES = {"validation": 16, "test": 32}
NOISES = {"light": (1.5, 25.0), "heavy": (1.2, 50.0)}  # radius of the blur, and deviation of the noise in grey levels

BASE = Package(
    "npm",
    "@tesseract.js-data/eng",
    "1.0.0",
    "c9bddf2e2f0a214ac7918f3f4a3caf45e09ce8674fe26662ae7787ac8927f7bb",
)
EXPERTS = {
    "ocrb": "811f89b0b4766736f0b6e6ef7b85abd7598dbc40932a04d4733ef06fc8dbe3e0",
    "courier": "52bd59ac386af4ace4f0abef6aa5c62cc0efb2f69bf3c05bf014b9b1ae9dd12c",
    "dejavu": "a68dc02aeff114db67b0609503195906f3bb3b07e6adb0cfca5eaf7966e138b0",
    "libmono": "23870de269ad0b75aa414bec3a0cf649522cb576aa16377a5f17e7cc095ce59c",
}
# The font that each expert was trained on, and one that none was: package, version, SHA-256, file.
FONTS = {
    "ocrb": (
        *("fonts-ocr-b", "0.3~dfsg1-1", "56e6a6bfe5d77bbb4f0a6964ce1f8ed3679d7c1a138064bcaf6cc3480c3628f3"),
        "OCRB.otf",
    ),
    "courier": (
        *("fonts-urw-base35", "20200910-7", "93e4997c99c4c31ea88c5d37e2259af0a0c826b9358931d5a69f794f7f0c73ac"),
        "NimbusMonoPS-Regular.otf",
    ),
    "dejavu": (
        *("fonts-dejavu-core", "2.37-6", "8892669e51aab4dc56682c8e39d8ddb7d70fad83c369344e1e240bf3ca22bb76"),
        "DejaVuSansMono.ttf",
    ),
    "libmono": (
        *("fonts-liberation", "1:1.07.4-11", "efd381517f958b01969343634ffcbdd60056be7779af84c6f53a005090430204"),
        "LiberationMono-Regular.ttf",
    ),
    "unseen": (
        *("fonts-freefont-ttf", "20120503-10", "4ca1c21ebc479198a3a5879d236c8317d6f7b2f1c403f7890e24c02eead05615"),
        "FreeMono.ttf",
    ),
}


def file_in(package: Path, name: str) -> bytes:
    """Return the file of a package whose path ends so."""
    found = next((content for path, content in contents(package) if path.endswith(name)), None)
    if found is None:
        raise MergeflowError(f"{package} has no file {name}.")
    return found


def write_models(out: Path) -> None:
    """Write base and experts as safetensors, and a file of Tesseract's with room for a merge."""
    packed = file_in(fetch(BASE, out / "packages"), "4.0.0_best_int/eng.traineddata.gz")
    save_file(read(gzip.decompress(packed)), out / "base.safetensors")
    for name, digest in EXPERTS.items():
        wheel = fetch(Package("pip", f"glyphive-ocrmodel-{name}", "0.1.0", digest), out / "packages")
        data = file_in(wheel, ".traineddata")
        save_file(read(data), out / f"{name}.safetensors")
        (out / "like.traineddata").write_bytes(data)


def write_lines(folder: Path, font: ImageFont.FreeTypeFont, noise: tuple[float, float], count: int, seed: str) -> None:
    """Write pictures of lines of random letters, their texts, and the list that Tesseract takes."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn, texts = random.Random(seed), []
    for number in range(count):
        texts.append("".join(drawn.choices(LETTERS, k=LENGTH)))
        width, height = (round(side) + 2 * MARGIN for side in font.getbbox(texts[-1])[2:])
        picture = Image.new("L", (width, height), 255)
        ImageDraw.Draw(picture).text((MARGIN, MARGIN), texts[-1], font=font, fill=0)
        blurred = np.asarray(picture.filter(ImageFilter.GaussianBlur(noise[0])), np.float64)
        grey = blurred + np.random.default_rng(drawn.getrandbits(64)).normal(0, noise[1], blurred.shape)
        Image.fromarray(grey.clip(0, 255).astype(np.uint8)).save(folder / f"{number:02}.png")
    (folder / "list.txt").write_text("".join(f"{number:02}.png\n" for number in range(count)))
    (folder / "text.txt").write_text("".join(f"{text}\n" for text in texts))


def fill(out: Path) -> None:
    """Fetch the packages and write models and lines into a folder."""
    write_models(out)
    for name, (package, version, digest, file) in FONTS.items():
        data = file_in(fetch(Package("apt", package, version, digest), out / "packages"), f"/{file}")
        font = ImageFont.truetype(io.BytesIO(data), SIZE)
        for split, count in LINES.items():
            for noise, strength in NOISES.items():
                write_lines(out / "lines" / split / f"{name}-{noise}", font, strength, count, f"{split}-{name}-{noise}")
    print(f"lines: {LINES}, {len(FONTS)} fonts, {len(NOISES)} noises", flush=True)


if __name__ == "__main__":
    run_make(fill, HERE, "Fill this folder with Tesseract's base, fine-tunes of it, and lines.")
