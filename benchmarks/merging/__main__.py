"""Measure merges as whole processes: ratios to the floor of the same run, wall time, processor time, peak memory.

    python -m benchmarks.merging                       # everything on ViT-B/32 shapes, 8 experts; about ten minutes
    python -m benchmarks.merging --model Llama-3.2-1B --experts 4 --rounds 5 --plain   # language models: 15 GB
    python -m benchmarks.merging --only ties cart --experts 20
    python -m benchmarks.merging --model tiny          # a smoke test in half a minute
    python -m benchmarks.merging --memory              # another table: foretold and measured peaks of spectral methods
    python -m benchmarks.merging --cold                # another table: files that are not in the page cache
    python -m benchmarks.merging --device cuda         # another table: when a CUDA device pays
    python -m benchmarks.merging --older ../before --sweep examples/sweeps/grid.yaml   # another: an older checkout's
                                                       # processor time; the sweep reads what `mergeflow run` left here

It makes random float32 checkpoints (351 MB each for ViT-B-32) in --scratch and removes them afterwards.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.merging.devices import DEFAULTS, table
from benchmarks.merging.older import older_table, sweep_job
from benchmarks.merging.peers import CONFIGS, MECHA, mecha_command, mergekit_command
from benchmarks.merging.places import cold_table, memory_table
from benchmarks.merging.shapes import MODELS, make_checkpoints, shapes_of
from mergeflow.errors import MergeflowError
from mergeflow.merging.execution.device import check_device

WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "ta": ("task_arithmetic", {}),
    "average": ("average", {}),
    "slerp": ("slerp", {}),
    "nuslerp": ("nuslerp", {}),
    "karcher": ("karcher", {}),
    "dare": ("dare", {"drop": 0.9}),
    "della": ("della", {"drop": 0.9}),
    "breadcrumbs": ("breadcrumbs", {}),
    "ties": ("ties", {"keep": 0.2}),
    "iso_c": ("iso_c", {}),
    "cart": ("cart", {"rank_ratio": 0.08}),
    "tsv": ("tsv", {}),
}
# What a merge may take beside the import, in floors.
GOALS = {"ta": 1.3, "average": 1.3, "slerp": 1.6, "nuslerp": 1.6, "karcher": 1.6, "dare": 2.5, "della": 2.5,
         "breadcrumbs": 2.5, "ties": 4.0}  # fmt: skip
PLAIN = ("ta", "ties", "dare", "slerp", "iso_c", "cart", "tsv")  # have a plain formula in plain.py
# Measured when asked for.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ("knots", "iso_cts", "wudi")}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job, or a peer's `command`, in a process of its own."""
    command = job.get("command") or [sys.executable, "-m", "benchmarks.merging.worker", json.dumps(job)]
    quiet = subprocess.DEVNULL if "command" in job else None  # progress bars
    # An older checkout runs by this worker too, which knows how to call both. With two threads, processor time would be
    # that of threads which wait for each other on a busy machine.
    given = {**os.environ, "PYTHONPATH": job["checkout"], "OMP_NUM_THREADS": "1"} if "checkout" in job else None
    if given is not None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(job)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True, env=given) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        return dict.fromkeys(("wall", "cpu", "peak"), float("nan")) | {"failed": process.returncode}
    note = next((line for line in text.splitlines() if line.startswith("NOTES ")), None)
    notes = {"peak": usage.ru_maxrss / 2**20} if note is None else json.loads(note[6:])
    return {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, **notes}


def show(label: str, row: dict[str, Any], start: float, floor: float | None, goal: float | None = None) -> None:
    """Print one row of the table.

    Args:
        row: as of `measure`; `factor` turns the plain formula's part of a model into all of it.
        start: seconds of the import of torch, which the ratio leaves out.
        floor: seconds of the floor; None for no ratio.
    """
    seconds, factor = row["wall"], row.get("factor", 1)
    if factor != 1:
        seconds += row["seconds"] * (factor - 1)
    ratio = f"{(seconds - start) / floor:.2f}" if floor else ""
    cells = (
        label,
        ratio + (f" (≤ {goal})" if goal else ""),
        f"{'~' * (factor != 1)}{seconds:.1f} s",
        f"{row['cpu']:.1f} s",
        f"{row['peak']:.2f} GiB",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def run(scratch: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything asked for; returns the rows."""
    base, experts = make_checkpoints(scratch, options.model, options.experts)
    common = {"base": str(base), "out": str(scratch / "out.safetensors"), "args": {}, "blocks": options.blocks}
    everything = [str(path) for path in experts]
    if options.memory is not None:
        return memory_table(measure, {**common, "experts": everything}, options.memory or None)
    if options.cold:
        return cold_table(measure, {**common, "experts": everything}, WORK["ta"])
    if options.device:
        return list(table(measure, {**common, "experts": everything}, options.device, options.methods))
    measure({**common, "kind": "floor", "experts": everything})  # warms the page cache
    if options.older:
        merges = {f"{options.kind} {name}": {**common, **_job(name, everything), "kind": options.kind}
                  for name in options.only if name != "grid"}  # fmt: skip
        sweeps = {f"sweep {file.name}": {**common, **sweep_job(file, scratch / "sweep")} for file in options.sweep}
        return older_table(measure, merges | sweeps, options.older, options.rounds)
    rows = []

    def in_turn(jobs: dict[str, dict[str, Any]], goal: float | None, experts: list[str]) -> None:
        """Run import, floor and jobs one after the other, `--rounds` times, and show the medians."""
        names = f"floor of {len(experts)} + 1 reads", "import torch", "the floor, hashing what passes"
        first: list[dict[str, Any]] = [{"kind": "floor"}, {"kind": "import"}, {"kind": "floor", "hashed": True}]
        jobs = {name: {**job, "experts": experts} for name, job in zip(names, first, strict=True)} | jobs
        runs = [{label: measure({**common, **job}) for label, job in jobs.items()} for _ in range(options.rounds)]
        rows_by_label = {
            label: {**runs[0][label], **{key: median(run[label][key] for run in runs)
                                        for key in ("wall", "cpu", "peak", "seconds") if key in runs[0][label]}}
            for label in jobs
        }  # fmt: skip
        start, floor = rows_by_label[names[1]]["wall"], rows_by_label[names[0]]["seconds"]
        for label, row in rows_by_label.items():
            of_floor = label in (names[0], names[2])
            shown, imported = ({**row, "wall": row["seconds"]}, 0.0) if of_floor else (row, start)
            limit = None if label in names[:2] else floor
            show(label, shown, imported, limit, goal if label.startswith("mergeflow") else None)
            rows.append({"label": label, "ratio": (shown["wall"] - imported) / floor, **row})

    print(f"{options.model}, {options.experts} experts, medians of {options.rounds}\n")
    print("| work | (wall − import) / floor | wall | processor | peak memory |\n|---|---|---|---|---|")
    for name in options.only:
        if name == "grid":
            grid = measure({**common, "kind": "grid", "experts": everything})
            print(
                f"  all 105 models / first preparation = {grid['all'] / grid['one']:.2f},"
                f" in processor time {grid['all_cpu'] / grid['one_cpu']:.2f}"
                f" (of it merging {grid['merging']:.1f} s; {grid['misses']} factorisations)"
            )
            continue
        job = {"kind": options.kind, **_job(name, everything)}
        chosen = job["experts"]
        jobs: dict[str, dict[str, Any]] = {f"mergeflow {name}": job}
        if name in options.plain:
            jobs[f"plain torch {name}"] = {**job, "kind": "plain"}
        if options.mergekit and name in CONFIGS:
            jobs[f"mergekit {name}"] = {"command": mergekit_command(options.mergekit, scratch, name, base, chosen)}
        if options.sd_mecha and name in MECHA:
            jobs[f"sd-mecha {name}"] = {"command": mecha_command(options.sd_mecha, scratch, name, base, chosen)}
        in_turn(jobs, GOALS.get(name), chosen)
    return rows


def _job(name: str, experts: list[str]) -> dict[str, Any]:
    method, args = (WORK | FURTHER)[name]
    return {"method": method, "args": args, "experts": experts[:2] if name.endswith("slerp") else experts}


def main() -> None:
    """Parse the command line, check the disk, measure, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="ViT-B-32")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=[*WORK, *FURTHER, "grid"], default=[*WORK, "grid"])
    parser.add_argument("--plain", nargs="*", choices=PLAIN, default=PLAIN, help="plain formulas to measure too")
    parser.add_argument("--blocks", type=int, default=2, help="blocks a plain SVD is measured on and extrapolated from")
    parser.add_argument("--mergekit", type=Path, help="bin folder of an environment with mergekit: its column too")
    parser.add_argument("--sd-mecha", type=Path, help="bin folder of an environment with sd-mecha: its column too")
    parser.add_argument("--older", type=Path, help="an older checkout of this project: processor time beside it, alone")
    parser.add_argument("--sweep", type=Path, nargs="+", default=[], help="sweep files to run too, with --older")
    parser.add_argument(
        "--kind", choices=["merge", "prepare"], default="merge", help="whole processes on files, or `prepare` in memory"
    )
    parser.add_argument("--memory", nargs="*", help="foretold and measured peaks of these methods (or all spectral)")
    parser.add_argument("--cold", action="store_true", help="`cat`, the write and task arithmetic, no file in memory")
    parser.add_argument("--rounds", type=int, default=1, help="times each row is run; medians are printed")
    parser.add_argument("--device", help="measure every method there and on the processor, and nothing else")
    parser.add_argument(
        "--methods", nargs="+", choices=DEFAULTS, default=list(DEFAULTS), help="of the table of --device"
    )
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoints; a temporary one by default")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints in --scratch")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    if options.sweep and not options.older:
        parser.error("--sweep compares with an older checkout: name it by --older")
    try:
        check_device(options.device or "cpu")
    except MergeflowError as error:
        sys.exit(str(error))
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="mergeflow-bench-"))
    scratch.mkdir(parents=True, exist_ok=True)
    needed = (options.experts + 2) * sum(info.nbytes for info in shapes_of(options.model).values())
    if shutil.disk_usage(scratch).free < 1.1 * needed:
        sys.exit(f"{scratch} has too little space: {needed / 1e9:.1f} GB are needed. Choose another with --scratch.")
    try:
        rows = run(scratch, options)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    finally:
        if not options.keep:
            for path in scratch.glob(f"{options.model}-*.safetensors"):
                path.unlink()
            for name in (
                "out.safetensors",
                "mecha-out.safetensors",
                "out.md",
                *(f"mergekit-{work}.yml" for work in CONFIGS),
            ):
                (scratch / name).unlink(missing_ok=True)
            for folder in ("mergekit-out", "sweep"):
                shutil.rmtree(scratch / folder, ignore_errors=True)
            if options.scratch is None:
                shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
