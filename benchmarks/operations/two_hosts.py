"""Time the fine-tuning of eight tasks by one worker of one core, and by two that share a bucket and no folder.

    python -m benchmarks.operations.two_hosts             # of two free cores; about two minutes
    python -m benchmarks.operations.two_hosts --steps 50  # a smoke test

Workers are processes of Dask with homes of their own; the bucket is that of a server in this process, moto.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import yaml

from tests.flows.bucket import serve_bucket
from tests.flows.hosts import Hosts
from tests.flows.kill_driver import make_toy_repository
from tests.flows.small_project import run_in
from tests.loopback import free_port

BUCKET = "s3://bucket/fleet"
TASKS = 8
DRIVER = (
    "from pathlib import Path; from flows.ephemeral_server import embedded_server; "
    "from flows.pipeline import pipeline\n"
    "with embedded_server(Path('.mergeflow/prefect').resolve()): pipeline('{}', targets={})"
)


def main() -> None:
    """Measure and print both times and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="of each expert's training")
    steps = parser.parse_args().steps
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    with serve_bucket() as (_, variables), tempfile.TemporaryDirectory() as folder:
        os.environ |= variables
        project, port = make_toy_repository(Path(folder) / "driver/project", "dask"), free_port()
        hosts, cluster = Hosts(Path(folder) / "hosts", Path(folder) / "driver"), f"tcp://127.0.0.1:{port}"
        try:
            hosts.start("head", ["dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"])
            for core, name in enumerate(("one", "two")):
                worker = ["dask", "worker", cluster, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
                hosts.start(name, ["taskset", "-c", str(core), *worker])
            finetune(project, cluster, 2, ["prepare", "base", "multitask", "finetune"], steps=10)  # what is read once
            together = finetune(project, cluster, 2, ["finetune"], steps=steps)
            alone = finetune(project, cluster, 1, ["finetune"], steps=steps, learning_rate=0.021)  # so that it is stale
        finally:
            hosts.end()
    print(f"one worker {alone:.1f} s, two {together:.1f} s, ratio {together / alone:.2f}")


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
