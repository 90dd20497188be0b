"""Compare `mergeflow add-task` with running the whole pipeline over the same tasks, in wall and processor time.

    python -m benchmarks.operations.add_task                    # params.yaml as it is; ten minutes on two idle cores
    python -m benchmarks.operations.add_task --tasks 3 --steps 30     # a smoke test in two minutes

With T + 1 tasks in params.yaml, one copy of the project runs the first T (not counted) and then `add-task`s the last;
another copy runs the whole pipeline over all of them. Both copies lie in a temporary folder. The ratio that counts is
of processor time: it does not depend on how many cores the machine has or on what else it does.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
QUIET = {
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "1",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",
}
FOREIGN = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "MERGEFLOW_LOCK_URI")


@dataclass(frozen=True)
class Cost:
    """Wall and processor seconds of one command, its children included."""

    wall: float
    processor: float


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, help="tasks in all, the last of which is added; default: params.yaml's")
    parser.add_argument("--steps", type=int, help="fine-tuning steps; default: params.yaml's")
    parser.add_argument("--full-sweep", action="store_true", help="let add-task try every candidate")
    options = parser.parse_args()
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    names = list(values["tasks"])[: options.tasks]
    values["tasks"] = {name: values["tasks"][name] for name in names}
    values["finetune"]["steps"] = options.steps or values["finetune"]["steps"]
    with tempfile.TemporaryDirectory(prefix="mergeflow-add-task-") as scratch:
        whole, grown = Path(scratch) / "whole", Path(scratch) / "grown"
        copy_project(whole, values)
        *rest, last = names
        copy_project(grown, {**values, "tasks": {name: values["tasks"][name] for name in rest}})
        run(grown, "run")
        sweep = ["--full-sweep"] if options.full_sweep else []
        added = run(grown, "add-task", last, values["tasks"][last], *sweep)
        ran = run(whole, "run")
        report(len(names), ran, added, champion(whole), champion(grown))


def copy_project(target: Path, values: dict[str, Any]) -> None:
    """Copy the tracked files, changed ones as they are, and write params.yaml."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists() and name != "dvc.lock":
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    (target / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "commit", "-q", "--force", "pretrain"]):
        subprocess.run(command, cwd=target, check=True, env=environment(target))


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the copy's own library is imported."""
    inherited = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    return {**inherited, **QUIET, "PYTHONPATH": str(folder)}


def run(folder: Path, *arguments: str) -> Cost:
    """Run one command of mergeflow in a project and return what it cost."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "mergeflow.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: the gates refused
        sys.exit(f"`mergeflow {' '.join(arguments)}` failed:\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.monotonic() - began, spent)


def champion(folder: Path) -> dict[str, Any]:
    """Return version, method, arguments and normalised validation accuracy of a copy's champion."""
    command = [sys.executable, "-m", "mergeflow.cli", "registry", "lineage", "--json"]
    tree = json.loads(subprocess.check_output(command, cwd=folder, env=environment(folder), text=True))
    command[-2] = "show"
    shown = json.loads(subprocess.check_output(command, cwd=folder, env=environment(folder), text=True))
    return {
        "tasks": len(tree["experts"]),
        "recipe": f"{tree['recipe']['method']} {tree['recipe']['args']}",
        "normalised": shown["metrics"]["validation/normalised"],
    }


def report(tasks: int, ran: Cost, added: Cost, whole: dict[str, Any], grown: dict[str, Any]) -> None:
    """Print costs, ratios and what each way chose.

    Args:
        tasks: how many there are in the end.
        ran: cost of `mergeflow run` with all tasks.
        added: cost of `mergeflow add-task` with the last one.
        whole: the champion after the run.
        grown: the champion after the task was added.
    """
    print(f"{tasks} tasks, the last of them added\n")
    print(f"{'':28}{'wall, s':>10}{'processor, s':>14}")
    print(f"{'mergeflow run, all tasks':28}{ran.wall:10.1f}{ran.processor:14.1f}")
    print(f"{'mergeflow add-task':28}{added.wall:10.1f}{added.processor:14.1f}")
    print(f"{'ratio':28}{ran.wall / added.wall:10.1f}{ran.processor / added.processor:14.1f}\n")
    for title, record in (("run", whole), ("add-task", grown)):
        print(f"{title:10}{record['tasks']} tasks, validation {100 * record['normalised']:.2f} %, {record['recipe']}")


if __name__ == "__main__":
    main()
