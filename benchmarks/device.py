"""Everything that only a CUDA device can show, in three pieces of less than 570 s, and the page's table of a card.

    python -m benchmarks.device --all --piece 1 --out RESULTS         # on CUDA; likewise 2 and 3, in any order
    python -m benchmarks.device --page docs/research/cards.md --out RESULTS  # writes the card's table; needs no card
    python -m benchmarks.device --only finetune mima --out RESULTS
    python -m benchmarks.device --all --out RESULTS --rehearse        # tiny shapes, on the processor

It needs a checkout with its library's packages: torch, open_clip, safetensors, pydantic, PyYAML, xxhash, blake3, NumPy,
SciPy, filelock, threadpoolctl, pyarrow, Pillow, scikit-learn and Matplotlib for the embedded suite, and pytest with
hypothesis for the tests; the section `causal` needs transformers and PEFT too. Nothing is downloaded. Each section runs
in a process of its own and is stopped when its time is over; what it had measured stays. A rehearsal runs them all in
one process, on one thread; a section that fails says so and the others follow. RESULTS holds log.txt and for each
piece a file such as piece-1.json, rows by section. The same command measures what is missing or ended with an error.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_device import judging, merging, pipeline, training
from mergeflow.training.arithmetic import arithmetic

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "benchmarks.device"]

# piece: section: seconds it may take, what it measures
PIECES: dict[int, dict[str, tuple[int, Any]]] = {
    1: {
        "judging": (170, judging.judging),
        "evaluation": (90, pipeline.evaluation),
        "finetune": (300, training.finetune),
    },
    2: {
        "candidates": (60, judging.candidates),
        "merging_vit_b_32": (130, merging.vit_b_32),
        "merging_vit_l_14": (130, merging.vit_l_14),
        "merging_1_2b": (110, merging.decoder),
        "merging_profile": (80, merging.profile),
        "statistics": (50, merging.statistics),
    },
    3: {
        "tests": (130, pipeline.tests),
        "pipeline": (250, pipeline.embedded),
        "mima": (60, training.mima),
        "causal": (50, training.causal),
        "adamerging": (70, merging.adamerging),
    },
}
STOPPED = "stopped after"  # how the fault of a section begins whose time was over
GOALS = {
    "judging": "L/14 ≥ 4 × float32, ≥ .4 of the peak; accuracy within .1 point",
    "evaluation": "times ours ≥ 1.3",
    "finetune": "of the plain loop ≥ .95, L/14 compiled ≥ .45 of the peak",
    "candidates": "of the forward passes ≤ 1.2",
    "merging_vit_l_14": "ratio of cart and tsv ≥ 8",
    "tests": "all pass",
    "pipeline": "within a point",
    "adamerging": "the same peak",
}


def main() -> None:
    """Parse the command line; run what is asked for, or one section in this process, or write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = [name for piece in PIECES.values() for name in piece]
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="every section")
    what.add_argument("--only", nargs="+", choices=sections, metavar="SECTION", help=f"of {', '.join(sections)}")
    what.add_argument("--here", choices=sections, help="one section in this process, its rows as lines of JSON")
    what.add_argument("--page", type=Path, help="write the table of --out's card into this page")
    parser.add_argument("--piece", type=int, choices=PIECES, help="with --all: this third of the sections")
    parser.add_argument("--out", type=Path, default=Path("outputs/device"), help="folder of the pieces and the log")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the processor")
    asked = parser.parse_args()
    if asked.page:
        asked.page.write_text(with_table(asked.page.read_text(), *read_pieces(asked.out)))
        return
    if not asked.rehearse and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --rehearse does all of it with tiny shapes on the processor.")
    if asked.here:
        work = next(piece[asked.here][1] for piece in PIECES.values() if asked.here in piece)
        with (
            arithmetic()
        ):  # as commands do; around a section, because a generator's decorator ends before its first row
            for row in work(False):
                print("ROW " + json.dumps(row), flush=True)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for piece in [asked.piece] if asked.piece else PIECES:
        names = [name for name in PIECES[piece] if asked.all or name in asked.only]
        results = run(asked.out, piece, names, asked.rehearse)
        failed += [name for name in names if results[name]["fault"]]
    if failed:
        sys.exit(f"{', '.join(failed)} failed: see above, and {asked.out / 'log.txt'}.")


def run(out: Path, piece: int, names: list[str], rehearse: bool) -> dict[str, Any]:
    """Run the sections of a piece that are missing or ended with an error; return all results of the piece.

    One that was stopped when its time was over keeps its rows: another try would be stopped at the same place.

    Args:
        rehearse: whether they run with tiny shapes on the processor.
    """
    path = out / f"piece-{piece}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": machine(rehearse)}
    for name in names:
        if name in results and (not results[name]["fault"] or results[name]["fault"].startswith(STOPPED)):
            continue
        limit, work = PIECES[piece][name]
        log = out / "log.txt"
        results[name] = rehearsed(work) if rehearse else section([*COMMAND, "--here", name], name, limit, log)
        path.write_text(json.dumps(results, indent=1))
        print("\n".join([f"{name}, {results[name]['seconds']:.0f} s", *lines(name, results[name])]), flush=True)
    return results


def rehearsed(work: Any) -> dict[str, Any]:
    """Run one section with tiny shapes, here."""
    began, rows, fault = time.monotonic(), [], ""
    torch.set_num_threads(1)
    try:
        with arithmetic():
            rows.extend(work(True))
    except Exception as error:
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
    return {"rows": rows, "seconds": time.monotonic() - began, "fault": fault}


def section(command: list[str], name: str, limit: float, log: Path) -> dict[str, Any]:
    """Run one section in a process group of its own; what it prints goes to the log at once.

    Args:
        limit: seconds after which it is killed.

    Returns:
        `rows`: what it printed as "ROW {…}"; `seconds`; `fault`: why it ended early, or "".
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began, fault = time.monotonic(), ""
    with log.open("ab+", buffering=0) as file:
        file.write(f"== {name}\n".encode())
        start = file.tell()
        # A group for the section's own processes, in this session: a machine ends it with the command.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, process_group=0)
        try:
            if process.wait(limit):
                fault = f"ended with status {process.returncode}, see log.txt"
        except subprocess.TimeoutExpired:
            fault = f"{STOPPED} {limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(start)
        printed = file.read().decode(errors="replace").splitlines()
    rows = [json.loads(line[4:]) for line in printed if line.startswith("ROW ")]
    return {"rows": rows, "seconds": time.monotonic() - began, "fault": fault}


def read_pieces(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the machine, and the results of all pieces in a folder by section, in the order of the pieces.

    Raises:
        SystemExit: there are none, or they were measured on different machines.
    """
    pieces = [json.loads(path.read_text()) for path in sorted(out.glob("piece-*.json"))]
    machines = [piece.pop("machine") for piece in pieces]
    devices = dict.fromkeys(f"{about['device']} (torch {about['torch']})" for about in machines)
    if len(devices) != 1:
        sys.exit(
            f"{out} needs pieces of one device, measured with one torch; found those of {', '.join(devices) or 'none'}."
        )
    measured = {name: results for piece in pieces for name, results in piece.items()}
    return machines[0], {name: measured[name] for piece in PIECES.values() for name in piece if name in measured}


def with_table(page: str, about: dict[str, Any], results: dict[str, Any]) -> str:
    """Return a page with a card's table: in place of its older one, or at the end.

    Args:
        page: Markdown; the table stands below a heading of the third level with the card's name.
    """
    heading = f"### {about['device']}\n"
    described = ", ".join(f"{key} {value}" for key, value in about.items() if key != "device")
    cells = [line for name, rows in results.items() for line in lines(name, rows)]
    table = (
        "\n".join([heading, f"{described}.\n", "| section, goal | case | measured |", "|---|---|---|", *cells]) + "\n"
    )
    before, there, after = page.partition(heading)
    following = re.search(r"^#{1,3} ", after, re.MULTILINE)
    rest_of_page = "" if following is None else "\n" + after[following.start() :]
    return (before if there else before.rstrip("\n") + "\n\n") + table + rest_of_page


def lines(name: str, results: dict[str, Any]) -> list[str]:
    """Return a section's rows of the table: what was measured on, and the figures; its fault in a row of its own."""
    first = f"`{name}`" + (f": {GOALS[name]}" if name in GOALS else "")
    rows = []
    for row in results["rows"]:
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key not in _CASES}
        case = ", ".join(str(value) for key, value in row.items() if key not in numbers)
        rows.append((case, ", ".join(f"{key} {_cell(value)}" for key, value in numbers.items())))
    if results["fault"]:
        rows.append(("", f"**{results['fault']}**"))
    cells = [("" if number else first, *row) for number, row in enumerate(rows)]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]


_CASES = ("batch", "T", "images", "steps a round")  # numbers that say what was measured on


def _cell(value: float) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.4g}"


def machine(rehearse: bool) -> dict[str, Any]:
    """Describe the machine of the figures."""
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if rehearse:
        return {"device": "cpu (a rehearsal with tiny shapes: the figures say nothing)", **facts}
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    shown = torch.cuda.get_device_properties(0)
    memory = f"{shown.total_memory / 2**30:.0f} GiB"
    return {
        "device": shown.name,
        "memory": memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        **facts,
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and no section stays on the card
    main()
