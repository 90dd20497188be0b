"""Time work by one worker of one core, and by two that share a store and no folder.

    python -m benchmarks.operations.two_hosts             # eight tasks are fine-tuned; two free cores, two minutes
    python -m benchmarks.operations.two_hosts --steps 50  # a smoke test
    python -m benchmarks.operations.two_hosts --merge     # three experts of 0.2 B parameters are merged; 6 GB of disk

Workers are processes of Dask with homes of their own. Stages go through the bucket of a server in this process, moto;
a merge goes through a folder of the workers, so that no server takes part of the cores.
"""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.merging.shapes import DECODERS, make_checkpoints
from tests.flows.bucket import serve_bucket
from tests.flows.hosts import Hosts
from tests.flows.kill_driver import make_toy_repository
from tests.flows.small_project import run_in
from tests.loopback import free_port

BUCKET = "s3://bucket/fleet"
TASKS = 8
SHARD = "40MB"
DRIVER = (
    "from pathlib import Path; from flows.ephemeral_server import embedded_server; "
    "from flows.pipeline import pipeline\n"
    "with embedded_server(Path('.mergeflow/prefect').resolve()): pipeline('{}', targets={})"
)


def main() -> None:
    """Measure and print both times and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="of each expert's training")
    parser.add_argument(
        "--merge", choices=DECODERS, nargs="?", const="Llama-3.2-1B-2", help="merge such models instead"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare_merges(Path(folder), options.merge) if options.merge else compare_training(Path(folder), options.steps)


@contextmanager
def two_workers(folder: Path) -> Iterator[str]:
    """Start a scheduler and two workers of one core while the block runs; gives the scheduler's address."""
    port = free_port()
    hosts, cluster = Hosts(folder / "hosts", folder / "driver"), f"tcp://127.0.0.1:{port}"
    try:
        hosts.start("head", ["dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"])
        for core, name in enumerate(("one", "two")):
            worker = ["dask", "worker", cluster, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
            hosts.start(name, ["taskset", "-c", str(core), *worker])
        yield cluster
    finally:
        hosts.end()


def compare_training(folder: Path, steps: int) -> None:
    """Fine-tune eight tasks by two workers, and by one."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    with serve_bucket() as (_, variables):
        os.environ |= variables
        project = make_toy_repository(folder / "driver/project", "dask")
        with two_workers(folder) as cluster:
            finetune(project, cluster, 2, ["prepare", "base", "multitask", "finetune"], steps=10)  # what is read once
            together = finetune(project, cluster, 2, ["finetune"], steps=steps)
            alone = finetune(project, cluster, 1, ["finetune"], steps=steps, learning_rate=0.021)  # so that it is stale
    print(f"one worker {alone:.1f} s, two {together:.1f} s, ratio {together / alone:.2f}")


def compare_merges(folder: Path, model: str) -> None:
    """Merge three experts by one worker, and by two; each time anew, from the hashing of inputs to the whole folder."""
    driver = folder / "driver"
    driver.mkdir()
    for name, size in (("tiny-decoder", "8KB"), (model, SHARD)):
        base, experts = make_checkpoints(driver, name, 3)
        for path in (base, *experts):
            done = run_in(driver, "mergeflow", "convert", path.name, "--out", path.stem, "--shard-size", size)
            assert done.returncode == 0, done.stderr
            path.unlink()
        values = {"base": base.stem, "experts": [path.stem for path in experts], "shard_size": size}
        (driver / f"{name}.yaml").write_text(yaml.safe_dump({"method": "average", "out": "merged", **values}))
    for method in ("task_arithmetic", "ties"):
        seconds = []
        for workers in (1, 2):
            run = folder / f"{method}-{workers}"
            with two_workers(run) as cluster:
                merge(driver, "tiny-decoder", "average", run, 2, cluster)  # a worker imports torch once
                seconds.append(merge(driver, model, method, run, workers, cluster))
            shutil.rmtree(run)
        print(f"{method}: one worker {seconds[0]:.1f} s, two {seconds[1]:.1f} s, ratio {seconds[1] / seconds[0]:.2f}")


def merge(driver: Path, model: str, method: str, run: Path, workers: int, cluster: str) -> float:
    """Merge a model's experts, and return the seconds that the command prints."""
    command = ["mergeflow", "merge", f"{model}.yaml", "--set", f"method={method}", "--store", f"file://{run}/store"]
    done = run_in(driver, *command, "--workers", str(workers), timeout=1200, DASK_SCHEDULER_ADDRESS=cluster)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    shutil.rmtree(driver / "merged")
    return float(re.findall(r"([\d.]+) s$", done.stdout, re.MULTILINE)[0])


def finetune(project: Path, cluster: str, workers: int, targets: list[str], **settings: float) -> float:
    """Run stages, and return the seconds from the first fine-tuning's beginning to the last one's end."""
    params = yaml.safe_load((project / "params.yaml").read_text())
    params["tasks"] = {f"task-{number}": "toy:clouds" for number in range(TASKS)}
    params["run"] |= {"store": BUCKET, "workers": workers}
    params["finetune"] |= settings
    (project / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    done = run_in(project, sys.executable, "-c", DRIVER.format(project, targets), DASK_SCHEDULER_ADDRESS=cluster)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    state = project / ".mergeflow"
    began = min(json.loads(path.read_text())["started"] for path in (state / "records").glob("finetune@*.json"))
    return max(path.stat().st_mtime for path in (state / "manifests").glob("finetune@*.json")) - began


if __name__ == "__main__":
    main()
