"""What runs as it is: the tests for a device, the evaluation's own benchmark, and the embedded pipeline."""

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.on_device.common import Row, place

ROOT = Path(__file__).parents[2]
TESTS = ("tests/merging/test_on_card.py", "tests/training/test_on_card.py")
STAGES = ("prepare", "base", "multitask", "finetune", "sweep", "select", "evaluate")


def tests(rehearse: bool) -> Iterator[Row]:
    """The tests of merging and of training on a device; in a rehearsal those that need one are skipped."""
    command, last = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", "real", *TESTS], ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
    yield {"tests": " ".join(TESTS), "result": last}
    if running.returncode:
        raise AssertionError(f"a test failed: {last}")


def evaluation(rehearse: bool) -> Iterator[Row]:
    """`benchmarks.vision.evaluation`: images a second beside open_clip's plain zero-shot loop."""
    from benchmarks.vision.evaluation import measure

    for model, count in [("pocket-clip", 2)] if rehearse else [("ViT-B-32", 200), ("ViT-L-14", 64)]:
        peers = ["plain, slices"] if rehearse else ["plain, tensors", "plain, slices"]
        for row in measure(model, count, 128, 1 if rehearse else 5, place(rehearse), peers):
            yield {
                "model": model, "way": row.way, "images/s": 8 * count / row.seconds, "times ours": row.ratio,
                "same predictions": row.same,
            }  # fmt: skip


def embedded(rehearse: bool) -> Iterator[Row]:
    """The project's pipeline on the device and on the processor: the same findings, within a point."""
    accuracy: dict[str, Any] = {}
    for device in ("cpu", str(place(rehearse)).partition(":")[0]):
        with TemporaryDirectory() as folder:
            began = time.perf_counter()
            _run(Path(folder), device, rehearse)
            metrics = json.loads((Path(folder) / "outputs/results/metrics.json").read_text())
        accuracy[device] = {name: row["mean"] for name, row in metrics.items()}
        yield {"device": device, "seconds": time.perf_counter() - began, **accuracy[device]}
    here, there = accuracy["cpu"], accuracy[device]
    order = [sorted(part, key=lambda name: -part[name]) for part in (here, there)]
    yield {
        "device": "largest difference in points", "seconds": 100 * max(abs(here[name] - there[name]) for name in here),
        "same order": order[0] == order[1],
    }  # fmt: skip


def _run(folder: Path, device: str, rehearse: bool) -> None:
    """Run the stages up to the test set in a project of its own, those of one name side by side; print their seconds.

    Fine-tuning on one device still comes one by one: a piece of training holds its device.
    """
    import yaml

    from tasks.project.graph import load_graph
    from tasks.running.runner import run_stage

    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["run"]["device"] = device
    values["finetune"]["steps"] = 100  # a third of the project's: both places come through in the section's time
    if rehearse:
        values |= {
            "tasks": {"left": "toy:clouds", "right": "toy:clouds"}, "data": {"inputs": 8},
            "model": {"modality": "toy", "widths": [8, 8, 4]}, "sweep": {"average": {"scale": [1.0]}},
        }  # fmt: skip
        values["finetune"] |= {"steps": 4, "batch_size": 8}
    (folder / "inputs").mkdir()
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for name in ("dvc.yaml", "mergeflow", "tasks", "registry"):
        (folder / name).symlink_to(ROOT / name)
    stages = load_graph(folder).values()
    with ProcessPoolExecutor(1 if rehearse else 8, multiprocessing.get_context("spawn")) as pool:
        for name in STAGES:
            began, same = time.perf_counter(), [stage for stage in stages if stage.name == name]
            list(pool.map(run_stage, [folder] * len(same), same))
            print(f"{name} on {device}: {time.perf_counter() - began:.0f} s", flush=True)
