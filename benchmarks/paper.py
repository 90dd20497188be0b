"""The studies of worlds/pictures-vit-s on a card, whole, in pieces that end in time and go on where they stopped.

    python -m benchmarks.paper --out RESULTS --seconds 560    # on CUDA; again, until it says that all is measured
    python -m benchmarks.paper --out RESULTS --record         # keeps the rows as the studies' records; needs no card
    python -m benchmarks.paper --out RESULTS --rehearse       # small, on the processor, with drawn pictures

Before, where packages can be fetched: python worlds/real-pictures/inputs/make.py --out FOLDER --pack
worlds/pictures-vit-s/inputs, 20 MB. Nothing else is fetched. It needs the packages of `benchmarks.device`, and pandas.

A unit is one seed of one training run and what the studies measure of it. Units run side by side on one card, each in
a process and a project of its own below outputs/paper. On the same machine the command goes on with the rounds that are
there; on another one with the units whose rows RESULTS has, which are few small files.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml

from benchmarks.device import ROOT, machine
from mergeflow import layout
from mergeflow.checkpoints import fingerprint, read_state, write_text
from mergeflow.data import load_split
from mergeflow.modalities.vision.models import load_clip
from mergeflow.plugins import load_file
from studies.lab.records import write_record
from studies.lab.study import ROWS, write_rows
from tasks.project.graph import load_graph
from tasks.project.stage import CHOICES, MAIN, STUDIES
from tasks.project.studies import Study
from tasks.project.study_graph import write_study_graph
from tasks.running.runner import run_stage

WORLD = ROOT / "worlds/pictures-vit-s"
MAKE = ROOT / "worlds/real-pictures/inputs/make.py"
MIMA, RANKS = "pictures_mima", "pictures_rank_curve"
EPOCHS = 16  # of pre-training

# What a rehearsal changes in both files of choices.
SMALL: dict[str, Any] = {
    "tasks": {"left": "parquet:inputs/left", "right": "parquet:inputs/right"},
    "data": {"image_size": 32},
    "model": {"architecture": "pocket-clip"},
    "finetune": {"steps": 8, "batch_size": 4, "precision": "float32"},
    "run": {"device": "cpu"},
}
SMALL_CHOICES: dict[str, Any] = {
    "seeds": [0, 1],
    "runs": {f"mima_{n}": {"regime": "iterative", "iterative": {"rounds": n}} for n in (1, 2)},
    "studies": {
        MIMA: {"rounds": [1, 2], "keep": 0.2, "budgets": [], "at": [1, 2], "kept": []},
        RANKS: {
            "run": "mima_1",
            "suites": [{"tasks": 2, "ratios": [0, 0.08, 1], "tuned": [0.08]}],
            "scales": {"centred": [1.0, 1.4], "original": [0.5, 1.0]},
        },
    },
}


def main() -> None:
    """Parse the command line; measure for a while, or keep what is measured as records, or measure one unit here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/paper-results"), help="folder of rows and facts")
    parser.add_argument("--seconds", type=float, default=560, help="after which it stops, by default 560")
    # Half of the cores keep a card busy; with more, more units are unfinished when the machine goes.
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="units at a time")
    parser.add_argument("--rehearse", action="store_true", help="small, on the processor")
    parser.add_argument("--record", action="store_true", help="run nothing: make records of the rows")
    parser.add_argument("--unit", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.unit:
        measure(asked.unit)
        return
    began = time.monotonic()
    project = ROOT / "outputs/paper" if not asked.rehearse else asked.out.absolute() / "project"
    results = Results(asked.out.absolute(), lay_out(project, asked.rehearse))
    if asked.record:
        results.record(project if asked.rehearse else WORLD)
        return
    if not asked.rehearse and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --rehearse does all of it on the processor with drawn pictures.")
    results.begin(machine(asked.rehearse))
    make_base(project, epochs=1 if asked.rehearse else EPOCHS)
    failed = run_units(project, results, began + asked.seconds, asked.workers)
    left = len(results.waiting)
    print("all is measured" if not left else f"{left} of {len(results.units)} units left: the same command goes on")
    if failed:
        sys.exit(f"{', '.join(failed)} failed: see {results.log}.")


# The project


def lay_out(project: Path, rehearse: bool) -> dict[str, Any]:
    """Write the files of a project like the world's, or of a smaller one to rehearse; return the studies' choices."""
    values, choices = (yaml.safe_load((WORLD / name).read_text()) for name in ("params.yaml", CHOICES))
    inputs = project / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    if rehearse:
        values = {
            key: {**part, **SMALL.get(key, {})} if isinstance(part, dict) else part for key, part in values.items()
        }
        values["tasks"], choices = SMALL["tasks"], SMALL_CHOICES
    for task in values["tasks"]:
        if rehearse:
            draw_task(inputs / task)
        else:
            link(WORLD / "inputs" / task, inputs / task)
    link(ROOT / MAIN, project / MAIN)
    (project / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (project / "studies").mkdir(exist_ok=True)
    (project / CHOICES).write_text(yaml.safe_dump(choices, sort_keys=False))
    return dict(choices)


def link(there: Path, here: Path) -> None:
    if not there.exists():
        sys.exit(f"{there} is missing: `python {MAKE.relative_to(ROOT)} --out FOLDER --pack {there.parent}` writes it.")
    here.unlink(missing_ok=True)
    here.symlink_to(there)


def draw_task(folder: Path) -> None:
    """Write a task of random pictures, whose classes differ a little in their grey."""
    make, random = load_file(MAKE), np.random.default_rng(len(folder.name))

    def drawn(label: int) -> Any:
        picture = random.integers(0, 150, (28, 28)) + random.integers(0, 90) + 15 * label
        return make.Row(make.png(make.Image.fromarray(picture.astype(np.uint8))), label)

    counts = {"train": 8, "validation": 4, "test": 8}
    rows = {split: [drawn(label) for label in [0, 1, 2] * count] for split, count in counts.items()}
    make.write_task(folder, ["dark", "grey", "light"], rows)


def make_base(project: Path, epochs: int) -> None:
    """Prepare the tasks, pre-train the model on half of their classes, and write the base, where that is not done."""
    stages = load_graph(project).values()
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(run_stage, project), [stage for stage in stages if stage.name == "prepare"]))
    values = yaml.safe_load((project / "params.yaml").read_text())
    if not (project / values["model"]["pretrained"]).exists():
        splits = {task: load_split(project / layout.split("train", task), "train") for task in values["tasks"]}
        clip = load_clip(values["model"]["architecture"], device=values["run"]["device"])
        settings = {"precision": values["finetune"]["precision"], "deterministic": True}
        load_file(MAKE).pretrain(clip, splits, project / "inputs", epochs, **settings)
    run_stage(project, next(stage for stage in stages if stage.name == "base"))


# Units


def run_units(project: Path, results: "Results", deadline: float, workers: int) -> list[str]:
    """Measure units side by side until the deadline; return those that failed."""
    waiting, failed = list(results.waiting), list[str]()
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    for unit in results.facts["units"]:  # whose project a kill may have left
        shutil.rmtree(project / "units" / unit, ignore_errors=True)
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < workers:
                unit = waiting.pop(0)
                running[unit] = (start(project, unit, results), time.monotonic())
            for unit, (process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[unit]
                took = time.monotonic() - began
                print(f"{unit}: {took:.0f} s" + (", failed" if process.returncode else ""), flush=True)
                if process.returncode:
                    failed.append(unit)
                else:
                    results.keep(unit, project / "units" / unit, took)
            time.sleep(0.1)
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()
    return failed


def start(project: Path, unit: str, results: "Results") -> subprocess.Popen[bytes]:
    """Begin to measure a unit in a project of its own, which has the data and the base of all."""
    folder = project / "units" / unit
    (folder / "studies").mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / layout.OUTPUTS).mkdir(exist_ok=True)
    for name in ("params.yaml", MAIN, layout.DATA, layout.BASE):
        link(project / name, folder / name)
    (folder / CHOICES).write_text(yaml.safe_dump(choices_of(unit, results.choices), sort_keys=False))
    write_study_graph(folder)
    # The lock of a card lies in the folder for temporary files: units that have one each share the card.
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.paper", "--unit", str(folder)]
    with results.log.open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def choices_of(unit: str, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the studies' choices for one seed and one training run."""
    run, seed = unit.rsplit("_", 1)
    rounds = choices["runs"][run]["iterative"]["rounds"]
    studies = {MIMA: {**choices["studies"][MIMA], "rounds": [rounds]}}
    if choices["studies"][RANKS]["run"] == run:
        studies[RANKS] = choices["studies"][RANKS]
    return {"seeds": [int(seed)], "runs": {run: choices["runs"][run]}, "studies": studies}


def measure(folder: Path) -> None:
    """Train and measure a unit, here."""
    for stage in load_graph(folder, studies=True).values():
        if stage.file == STUDIES:
            run_stage(folder, stage)


class Results:
    """What is measured: the rows of each study, each with its unit, and the facts of the machine and the units."""

    def __init__(self, folder: Path, choices: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.choices, self.folder, self.log, self._facts = choices, folder, folder / "log.txt", folder / "facts.json"
        # With most rounds first, which take longest; seed by seed, so that an end too early leaves whole seeds.
        self.units = [f"{run}_{seed}" for seed in choices["seeds"] for run in reversed(choices["runs"])]

    @property
    def facts(self) -> dict[str, Any]:
        return dict(json.loads(self._facts.read_text())) if self._facts.exists() else {"units": {}}

    @property
    def waiting(self) -> list[str]:
        return [unit for unit in self.units if unit not in self.facts["units"]]

    def begin(self, here: dict[str, Any]) -> None:
        """Note the machine; refuse one that is not like the machine of the earlier units."""
        facts = self.facts
        before = facts.setdefault("machine", here)
        if any(before[key] != here[key] for key in ("device", "torch")):
            sys.exit(f"{self.folder} was measured on {before}, and this is {here}: give another folder with --out.")
        write_text(self._facts, json.dumps(facts, indent=1))

    def keep(self, unit: str, project: Path, seconds: float) -> None:
        """Add the rows of a unit, then its facts; remove its project."""
        for study in self.choices["studies"]:
            if (rows := project / layout.study(study) / ROWS).exists():
                mine = [{"unit": unit, **row} for row in pq.read_table(rows).to_pylist()]
                others = [row for row in self.rows(study) if row["unit"] != unit]
                making = self.folder / f".{study}"
                write_rows(sorted([*others, *mine], key=lambda row: self.units.index(row["unit"])), making)
                making.replace(self.folder / f"{study}.parquet")
        facts, base = self.facts, fingerprint(read_state(project / layout.BASE_MODEL))
        facts["units"][unit] = {"seconds": round(seconds), "base": base}
        write_text(self._facts, json.dumps(facts, indent=1))
        shutil.rmtree(project)

    def whole(self, study: str) -> list[dict[str, Any]]:
        """Return the rows of all units as one run of the study has them: those of no seed are of its first run."""
        first = f"{next(iter(self.choices['runs']))}_{self.choices['seeds'][0]}"
        counted = [row for row in self.rows(study) if row.get("seed") is not None or row["unit"] == first]
        return [{key: value for key, value in row.items() if key != "unit" and value is not None} for row in counted]

    def rows(self, study: str) -> list[dict[str, Any]]:
        path = self.folder / f"{study}.parquet"
        return list(pq.read_table(path).to_pylist()) if path.exists() else []

    def record(self, world: Path) -> None:
        """Make the rows those of the studies' last run in a world, and records of the repository."""
        if self.waiting:
            sys.exit(f"{len(self.waiting)} of {len(self.units)} units are not measured: {', '.join(self.waiting)}.")
        if not (world / MAIN).exists():
            (world / MAIN).write_bytes((ROOT / MAIN).read_bytes())
        write_study_graph(world)
        facts = self.facts
        card, bases = facts["machine"], {unit["base"] for unit in facts["units"].values()}
        home = ROOT if world == WORLD else world
        for address, stage in load_graph(world, studies=True).items():
            if not stage.is_study:
                continue
            study = Study(world, stage)
            study.folder.mkdir(parents=True, exist_ok=True)
            write_rows(self.whole(stage.name), study.folder / ROWS)
            path = write_record(home, study).with_suffix(".json")
            made = json.loads(path.read_text()) | {
                "hardware": f"{card['device']}, {card['cores']} cores",
                "seconds": sum(unit["seconds"] for unit in facts["units"].values()),
            }
            write_text(path, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
            print(f"{address}: {path.with_suffix('.parquet')}, of {len(bases)} pre-trained bases")


if __name__ == "__main__":
    main()
