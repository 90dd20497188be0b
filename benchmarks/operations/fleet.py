"""Measure one box, and print what a large model with many experts takes on several.

    python -m benchmarks.operations.fleet                      # 8 B x 20 on four boxes, from one layer of 8 B; 20 GB
    python -m benchmarks.operations.fleet --model tiny-decoder # a smoke test

Measured: task arithmetic in one process, in parts that are joined, TIES, and the hashing of what goes into a store.
Ratios and rates are of processor time without that of a start, which does not depend on what else a machine does.
Given: the network's rate, and that of training. The arithmetic is below, in `plan`.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from benchmarks.merging.__main__ import measure
from benchmarks.merging.shapes import DECODERS, make_checkpoints
from tasks.project.recorded import StoredFile

SHARDS = 8


@dataclass(frozen=True)
class Rates:
    """Bytes a second of a box: merged by task arithmetic and by TIES, hashed, sent or fetched."""

    arithmetic: float
    ties: float
    hashing: float
    network: float


def merge(scratch: Path, method: str, inputs: list[Path], *options: str) -> dict[str, Any]:
    """Run a merge as its own process, and return its seconds, processor seconds and peak memory."""
    base, *experts = map(str, inputs)
    values = {"method": method, "base": base, "experts": experts, "out": str(scratch / method)}
    values["shard_size"] = inputs[0].stat().st_size // SHARDS
    (scratch / "recipe.yaml").write_text(yaml.safe_dump(values))
    command = [str(Path(sys.executable).with_name("mergeflow")), "merge", str(scratch / "recipe.yaml"), *options]
    row = measure({"command": command})
    assert "failed" not in row, f"{command} failed"
    return row


def compare_parts(scratch: Path, inputs: list[Path], parts: int, start: float) -> float:
    """Print parts and their join as ratios to one merge, whose processor seconds are returned.

    Args:
        start: processor seconds of a merge of next to nothing.
    """
    whole = merge(scratch, "task_arithmetic", inputs)
    expected = _digests(scratch / "task_arithmetic")
    rows = [merge(scratch, "task_arithmetic", inputs, "--part", f"{part}/{parts}") for part in range(1, parts + 1)]
    (scratch / "task_arithmetic").rename(scratch / "whole")
    joined = merge(scratch, "task_arithmetic", inputs, "--join", str(scratch))
    assert _digests(scratch / "task_arithmetic") == expected, "the joined merge has other bytes"
    once = whole["cpu"] - start
    times = [(row["cpu"] - start) / once for row in (*rows, joined)]
    print(f"one merge: {once:.1f} s of the processor, {whole['peak']:.2f} GiB; a start takes {start:.1f} s")
    memory = max(row["peak"] for row in (*rows, joined)) / whole["peak"]
    print(f"÷ one merge: the longest of {parts} parts {max(times[:-1]):.2f}, all {sum(times[:-1]):.2f}, ", end="")
    print(f"the join {times[-1]:.2f}; peak memory {memory:.2f}")
    return once


def plan(parameters: float, experts: int, boxes: int, tokens: float, flops: float, rates: Rates) -> None:
    """Print bytes and hours of a project, bfloat16 on disk."""
    size = 2 * parameters
    each, read = ceil(experts / boxes), (experts + 1) * size
    training = each * (6 * parameters * tokens / flops + size / rates.hashing + size / rates.network)
    here, merged, moved = read / rates.network, read / rates.arithmetic, size / rates.network
    rows = [
        ("base to every box", boxes * size, size / rates.network),
        (f"fine-tuning, {each} a box, each on {tokens:.0e} tokens", experts * size, training),
        ("one merge by task arithmetic, one box", read, here + merged),
        ("the same by TIES", read, here + read / rates.ties),
        (f"task arithmetic by `--store` on {boxes}", read + 2 * size, (here + merged + moved) / boxes + moved),
        ("registration: base, experts and a merge fetched, merged again", read + size, here + merged),
    ]
    print(f"\n{parameters:.0e} parameters, {experts} experts, {boxes} boxes: a model of {size / 1e9:.0f} GB")
    print("\n| work | GB through the store | minutes |\n|---|--:|--:|")
    for work, moved, seconds in rows:
        print(f"| {work} | {moved / 1e9:.0f} | {seconds / 60:.0f} |")
    print(f"\nThe box that registers, or merges alone, needs a disk of {(read + 2 * size) / 1e9:.0f} GB.")


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def main() -> None:
    """Measure, print ratios and rates, then the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DECODERS, default="decoder-8B-1", help="shapes to measure with")
    parser.add_argument("--measured", type=int, default=3, help="experts to measure with")
    parser.add_argument("--parameters", type=float, default=8e9)
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--boxes", type=int, default=4)
    parser.add_argument("--tokens", type=float, default=1e7, help="of training an expert")
    parser.add_argument("--tflops", type=float, default=84, help="of training, a second on a box")
    parser.add_argument("--network", type=float, default=1.25, help="GB a second between a box and the store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mergeflow-fleet-") as folder:
        scratch = Path(folder)
        tiny, few = make_checkpoints(scratch / "tiny", "tiny-decoder", options.measured)
        start = merge(scratch, "ties", [tiny, *few])["cpu"]
        base, experts = make_checkpoints(scratch, options.model, options.measured)
        inputs = [base, *experts]
        arithmetic = compare_parts(scratch, inputs, options.boxes, start)
        ties = merge(scratch, "ties", inputs, "--force")["cpu"] - start
        began = time.process_time()
        StoredFile.of(base)
        hashing = base.stat().st_size / (time.process_time() - began)
        read = sum(path.stat().st_size for path in inputs)
    rates = Rates(
        2 * read / arithmetic, 2 * read / ties, hashing, options.network * 1e9
    )  # a merge works in two threads
    shown = {name: f"{rate / 1e9:.2f}" for name, rate in vars(rates).items()}
    print(f"GB a second: {shown}")
    plan(options.parameters, options.experts, options.boxes, options.tokens, options.tflops * 1e12, rates)


if __name__ == "__main__":
    main()
