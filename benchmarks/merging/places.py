"""Where a merge's bytes are: foretold and measured peaks of memory, and files that are not in the page cache."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPECTRAL: dict[str, dict[str, Any]] = {
    "cart": {}, "low_rank": {}, "tsv": {}, "iso_c": {}, "iso_cts": {}, "wudi": {"steps": 5},
    "knots": {"then": "task_arithmetic"},
}  # fmt: skip

Measure = Callable[[dict[str, Any]], dict[str, Any]]


def memory_table(measure: Measure, common: dict[str, Any], methods: list[str] | None) -> list[dict[str, Any]]:
    """Print what a plan foretells of each method beside the peak of a process that merges; return the rows.

    Args:
        methods: their names; the spectral ones by default.
    """
    print("| method | foretold | measured | foretold / measured |\n|---|---|---|---|")
    rows = []
    for method in methods or list(SPECTRAL):
        chosen = common["experts"][:2] if method == "slerp" else common["experts"]
        job = {"kind": "merge", "method": method, "args": SPECTRAL.get(method, {}), "experts": chosen}
        row = measure({**common, **job})
        ratio = row["foretold"] / row["peak"]
        print(f"| `{method}` | {row['foretold']:.2f} GiB | {row['peak']:.2f} GiB | {ratio:.2f} |", flush=True)
        rows.append({"method": method, **row})
    return rows


def cold_table(measure: Measure, common: dict[str, Any], work: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the seconds of reading all files by `cat` and writing one, and those of a merge; return the rows.

    Args:
        work: the method that merges, and its arguments.
    """
    files = [common["base"], *common["experts"]]
    rows = []
    for _ in range(2):
        forget(files)
        began = time.perf_counter()
        subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
        read = time.perf_counter() - began
        Path(common["out"]).unlink(missing_ok=True)
        began = time.perf_counter()
        with Path(common["base"]).open("rb") as source, Path(common["out"]).open("wb") as target:
            while piece := source.read(2**24):
                target.write(piece)
            os.fsync(target.fileno())
        written = time.perf_counter() - began
        forget(files)
        row = measure({**common, "kind": "merge", "method": work[0], "args": work[1]})
        ratio = row["seconds"] / (read + written)
        print(
            f"cat {read:.1f} s, write {written:.1f} s, {work[0]} {row['seconds']:.1f} s "
            f"({row['cpu']:.1f} s of the processor, imports and all): {ratio:.2f}",
            flush=True,
        )
        rows.append({"cat": read, "write": written, **row})
    return rows


def forget(files: list[str]) -> None:
    """Drop files from the page cache, once they are on the disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
