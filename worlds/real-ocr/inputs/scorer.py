"""The scorer of sweep.yaml: Tesseract reads lines of several fonts, and a font's score is the share of characters read.

After the sweep, `python inputs/scorer.py` looks at the test lines, once for base, experts, and each method's best
candidate, and also on a font that no expert was trained on and on which nothing was chosen.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pandas
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from traineddata import write

from mergeflow import configure, open_checkpoint, prepare

INPUTS = Path(__file__).resolve().parent
EXPERTS, UNSEEN = ("ocrb", "courier", "dejavu", "libmono"), "unseen"


def read_lines(state: Mapping[str, Tensor], candidate) -> dict[str, float]:
    """Return the share of characters read, by font and noise, of the lines in the experts' fonts."""
    return read_fonts(state, candidate.split, EXPERTS)


def read_fonts(state: Mapping[str, Tensor], split: str, fonts: tuple[str, ...]) -> dict[str, float]:
    """Return 1 - the character error rate of each folder of lines in some fonts."""
    folders = sorted((INPUTS / "lines" / split).iterdir())
    with tempfile.TemporaryDirectory() as tessdata:
        (Path(tessdata) / "merged.traineddata").write_bytes(write(state, (INPUTS / "like.traineddata").read_bytes()))
        return {folder.name: read_folder(folder, tessdata) for folder in folders if folder.name.startswith(fonts)}


def read_folder(lines: Path, tessdata: str) -> float:
    """Return 1 - the character error rate of Tesseract, with the model in `tessdata`, on a folder of lines."""
    command = ["tesseract", "list.txt", "stdout", "--tessdata-dir", tessdata, "-l", "merged", "--psm", "7"]
    one_thread = os.environ | {"OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(command, cwd=lines, env=one_thread, capture_output=True, text=True, check=True)
    texts = (lines / "text.txt").read_text().split()
    printed = ["".join(page.split()) for page in done.stdout.split("\f")]
    return 1 - sum(map(distance, texts, printed)) / sum(map(len, texts))


def distance(first: str, second: str) -> int:
    """Return how many characters must be put in, taken out or replaced to make one text of the other.

    Example:
        >>> distance("kitten", "sitting")
        3
    """
    above = list(range(len(second) + 1))
    for row, letter in enumerate(first, 1):
        line = [row]
        for column, other in enumerate(second, 1):
            line.append(min(above[column] + 1, line[-1] + 1, above[column - 1] + (letter != other)))
        above = line
    return above[-1]


def main(trials: Path) -> None:
    """Print the character error rates on test, in %, of base, experts, and the best candidate of each method."""
    rows = pandas.read_parquet(trials)
    best = rows.loc[rows.groupby("method")["objective"].idxmax()]
    base = dict(open_checkpoint(INPUTS / "base.safetensors"))
    experts = {name: dict(open_checkpoint(INPUTS / f"{name}.safetensors")) for name in EXPERTS}
    models = {"base": base, **experts}
    for method, arguments in zip(best["method"], best["args"], strict=True):
        call = configure(method, json.loads(arguments))
        models[f"{method} {arguments}"] = prepare(call, base, experts).at(call.scale)
    table = pandas.DataFrame({name: read_fonts(state, "test", (*EXPERTS, UNSEEN)) for name, state in models.items()}).T
    errors = 100 * (1 - table)
    errors["mean"] = errors[[name for name in errors if not name.startswith(UNSEEN)]].mean(axis=1)
    print(errors.round(1).to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "sweeps/sweep") / "trials.parquet")
