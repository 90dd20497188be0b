"""Everything that only a CUDA device can show, in sections: tables, logs and findings in one folder.

    python -m benchmarks.device --all --out RESULTS                   # on CUDA; about half an hour
    python -m benchmarks.device --all --out RESULTS --seconds 570     # as much as fits; the same command goes on
    for i in 1 2 3; do python -m benchmarks.device --all --out RESULTS --seconds 570; done
    python -m benchmarks.device --only finetune mima --out RESULTS
    python -m benchmarks.device --all --out RESULTS --rehearse        # tiny shapes, on the processor

It needs a checkout with its library's packages: torch, open_clip, safetensors, pydantic, PyYAML, xxhash, blake3, NumPy,
SciPy, filelock, threadpoolctl, pyarrow, Pillow, scikit-learn and Matplotlib for the embedded suite, and pytest with
hypothesis for the tests; the section `causal` needs transformers and PEFT too. Nothing is downloaded. Each section runs
in a process of its own and is stopped when its time is over; what it had measured stays. A rehearsal runs them all in
one process, on one thread; a section that fails says so and the others follow. RESULTS holds three files: results.json
(rows by section; a section that stands there is not run again), tables.md and log.txt.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_device import merging, pipeline, training

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "benchmarks.device"]

# section: seconds it may take, what it measures; in this order three commands of 570 s have room for all of them
SECTIONS: dict[str, tuple[int, Any]] = {
    "tests": (150, pipeline.tests),
    "finetune": (300, training.finetune),
    "causal": (90, training.causal),
    "pipeline": (400, pipeline.embedded),
    "mima": (120, training.mima),
    "statistics": (50, merging.statistics),
    "evaluation": (110, pipeline.evaluation),
    "adamerging": (80, merging.adamerging),
    "merging_vit_b_32": (130, merging.vit_b_32),
    "merging_vit_l_14": (120, merging.vit_l_14),
    "merging_1_2b": (120, merging.decoder),
}


def main() -> None:
    """Parse the command line; run what is asked for, or one section in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="every section")
    what.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    what.add_argument("--here", choices=SECTIONS, help="one section in this process, its rows as lines of JSON")
    parser.add_argument("--out", type=Path, default=Path("outputs/device"), help="folder for tables and logs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that may end after that")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the processor")
    asked = parser.parse_args()
    if not asked.rehearse and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --rehearse does all of it with tiny shapes on the processor.")
    if asked.here:
        for row in SECTIONS[asked.here][1](False):
            print("ROW " + json.dumps(row), flush=True)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    names = list(SECTIONS) if asked.all else asked.only
    found = run(asked.out, names, asked.seconds, asked.rehearse)
    if failed := [name for name in names if found.get(name, {}).get("fault")]:
        sys.exit(f"{', '.join(failed)} failed: see above, and {asked.out / 'log.txt'}.")


def run(out: Path, names: list[str], seconds: float, rehearse: bool) -> dict[str, Any]:
    """Run the sections that have no results yet; return all results.

    Args:
        out: the folder of `results.json`, `tables.md` and `log.txt`.
        names: of the sections, in order.
        seconds: that all sections together may take; one that may not finish in time is not begun.
        rehearse: whether they run with tiny shapes on the processor.
    """
    end, path = time.monotonic() + seconds, out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": machine(rehearse)}
    for name in names:
        limit = SECTIONS[name][0]
        if name in results:
            continue
        if time.monotonic() + limit > end:
            print(f"{name}: not begun, it may take {limit} s. The same command goes on with it.", flush=True)
            continue
        log = out / "log.txt"
        results[name] = rehearsed(name) if rehearse else section([*COMMAND, "--here", name], name, limit, log)
        path.write_text(json.dumps(results, indent=1))
        (out / "tables.md").write_text(tables(results))
        print(table(name, results[name]), flush=True)
    return results


def rehearsed(name: str) -> dict[str, Any]:
    """Run one section with tiny shapes, here."""
    began, rows, fault = time.monotonic(), [], ""
    torch.set_num_threads(1)
    try:
        rows.extend(SECTIONS[name][1](True))
    except Exception as error:
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
    return {"rows": rows, "seconds": time.monotonic() - began, "fault": fault}


def section(command: list[str], name: str, limit: float, log: Path) -> dict[str, Any]:
    """Run one section in a process group of its own; what it printed goes to the log.

    Args:
        command: what is run.
        name: the section's.
        limit: seconds after which it is killed.
        log: the file that its output is added to.

    Returns:
        `rows`: what it printed as "ROW {…}"; `seconds`; `fault`: why it ended early, or "".
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            text, stopped = process.communicate(timeout=limit)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, stopped = process.communicate()[0], True
    with log.open("a") as file:
        file.write(f"== {name}: {time.monotonic() - began:.0f} s, status {process.returncode}\n{text}\n")
    rows = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")]
    fault = f"stopped after {limit} s" if stopped else f"ended with status {process.returncode}, see log.txt"
    return {"rows": rows, "seconds": time.monotonic() - began, "fault": fault if stopped or process.returncode else ""}


def tables(results: dict[str, Any]) -> str:
    """Return all results as Markdown."""
    head = "\n".join(f"{key}: {value}" for key, value in results["machine"].items())
    return "\n\n".join([head, *(table(name, results[name]) for name in SECTIONS if name in results)]) + "\n"


def table(name: str, found: dict[str, Any]) -> str:
    """Return one section as a Markdown table; what went wrong stands above it."""
    columns = list(dict.fromkeys(key for row in found["rows"] for key in row))
    lines = [f"## {name}, {found['seconds']:.0f} s", *([f"**{found['fault']}**"] if found["fault"] else [])]
    if columns:
        lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(_cell(row.get(column, '')) for column in columns)} |" for row in found["rows"]]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def machine(rehearse: bool) -> dict[str, Any]:
    """Describe the machine of the figures."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if rehearse:
        return {"device": "cpu (a rehearsal with tiny shapes: the figures say nothing)", **found}
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    shown = torch.cuda.get_device_properties(0)
    memory = f"{shown.total_memory / 2**30:.0f} GiB"
    return {
        "device": shown.name,
        "memory": memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        **found,
    }


if __name__ == "__main__":
    main()
