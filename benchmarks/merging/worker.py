"""One measured process: `python -m benchmarks.merging.worker JSON`; prints its own notes as JSON."""

import json
import shutil
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job and return what only the process itself can know."""
    base, experts, out = Path(job["base"]), [Path(path) for path in job["experts"]], Path(job["out"])
    if job["kind"] == "import":
        import torch

        return {"torch": torch.__version__}
    if job["kind"] == "floor":
        from benchmarks.merging.plain import floor

        began = time.perf_counter()
        floor(base, experts, out, job.get("workers", 2), job.get("hashed", False))
        return {"seconds": time.perf_counter() - began}
    if job["kind"] == "plain":
        return plain(job["method"], base, experts, out, job["blocks"])
    if job["kind"] == "grid":
        return grid(base, experts)
    if job["kind"] == "device":
        from benchmarks.merging.devices import merge_there

        return merge_there(job)
    if job["kind"] == "prepare":
        return prepared(job["method"], job["args"], base, experts)
    if job["kind"] == "sweep":
        return swept(Path(job["sweep"]), out)
    from mergeflow.merging import check_recipe, make_recipe, merge

    with suppress(ModuleNotFoundError):  # an older checkout leaves the allocator as it is
        import_module("mergeflow.commands.allocation").reuse_freed_memory()  # as the command `merge` does
    names = {f"e{index:02d}": str(path) for index, path in enumerate(experts)}
    made = make_recipe(
        {"method": job["method"], "args": job["args"], "base": str(base), "experts": names, "out": str(out)}
    )
    for stale in (out, out.with_suffix(".md")):  # an older checkout refuses what it did not make
        stale.unlink(missing_ok=True)
    import_module("torch")  # what is read in late is no part of a merge
    foretold, began = check_recipe(made).peak_memory, time.process_time()
    seconds = merge(made, workers=job.get("workers")).seconds
    return {"seconds": seconds, "alone": time.process_time() - began, "foretold": foretold / 2**30}


def swept(file: Path, out: Path) -> dict[str, Any]:
    """Run a sweep, whose code older checkouts keep elsewhere; returns the winner's arguments.

    Args:
        out: its results; those of another run are removed.
    """
    try:
        from mergeflow.search.sweep import run_sweep
        from mergeflow.search.sweep_file import load_sweep
    except ModuleNotFoundError:
        from mergeflow.evaluation.sweep import run_sweep
        from mergeflow.evaluation.sweep_file import load_sweep
    shutil.rmtree(out, ignore_errors=True)
    return {"winner": run_sweep(load_sweep(file), out).winner.args}


def prepared(method: str, args: dict[str, Any], base: Path, experts: list[Path]) -> dict[str, Any]:
    """Return the seconds of `prepare` on state dicts in memory, the least of three calls."""
    from safetensors.torch import load_file

    from mergeflow.merging import configure, prepare

    start = load_file(base)
    states = {f"e{index:02d}": load_file(path) for index, path in enumerate(experts)}
    least: dict[str, float] = {}
    for _ in range(3):
        began, began_cpu = time.perf_counter(), time.process_time()
        prepare(configure(method, args), start, states)
        took = {"wall": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
        least = {key: min(value, least.get(key, value)) for key, value in took.items()}
    return {**least, "alone": least["cpu"]}


def plain(method: str, base: Path, experts: list[Path], out: Path, blocks: int | None) -> dict[str, Any]:
    """Run the plain formula; a spectral one on the first blocks only, with the factor to all.

    Args:
        method: a function of `benchmarks.merging.plain`.
        blocks: how many blocks a spectral method treats; None for all.

    Returns:
        `seconds` of the formula alone; `factor`, from the blocks treated to all of them.
    """
    from safetensors.torch import save_file

    from benchmarks.merging import plain as formulas

    start, taus = formulas.load(base, experts)
    factor = 1.0
    if blocks and method in formulas.SPECTRAL:
        whole = sum(value.numel() for name, value in start.items() if "resblocks" in name)
        start = formulas.first_blocks(start, blocks)
        factor = whole / sum(value.numel() for value in start.values())
    began = time.perf_counter()
    merged = getattr(formulas, method)(start, taus)
    seconds = time.perf_counter() - began
    save_file(merged, out)
    return {"seconds": seconds, "factor": factor}


def grid(base: Path, experts: list[Path]) -> dict[str, Any]:
    """CART at 5 ranks × 21 scales in memory: the time of the first rank, and of all 105 merged models."""
    from mergeflow.checkpoints import open_checkpoint
    from mergeflow.merging import FactorCache, configure, prepare

    start = open_checkpoint(base)
    states = {f"e{index:02d}": open_checkpoint(path) for index, path in enumerate(experts)}
    ranks = (0.32, 0.16, 0.08, 0.04, 0.02)
    cache = FactorCache(rank_ratio=ranks[0])
    began, began_cpu = time.perf_counter(), time.process_time()
    first = prepare(configure("cart", {"rank_ratio": ranks[0]}), start, states, cache=cache)
    first_seconds, one_cpu = time.perf_counter() - began, time.process_time() - began_cpu
    merging, made = 0.0, 0
    for rank in ranks:
        call = configure("cart", {"rank_ratio": rank})
        candidate = first if rank == ranks[0] else prepare(call, start, states, cache=cache)
        began_scales = time.perf_counter()
        room = None
        for step in range(21):
            room = candidate.at(0.1 * step, out=room)
            made += 1
        merging += time.perf_counter() - began_scales
    return {
        "one": first_seconds,
        "all": time.perf_counter() - began,
        "one_cpu": one_cpu,
        "all_cpu": time.process_time() - began_cpu,
        "merging": merging,
        "models": made,
        "misses": cache.misses,
    }


def peak() -> float:
    """Return this process's highest resident memory in GiB; unlike ru_maxrss it does not count the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


if __name__ == "__main__":
    notes = main(json.loads(sys.argv[1]))
    print("NOTES " + json.dumps({**notes, "peak": peak()}))
