"""Sweeps end to end: against plain merges, deterministic, resumable after a kill, and useful."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from mergeflow.checkpoints import open_checkpoint, read_state
from mergeflow.commands.sweep import add_commands
from mergeflow.data import load_split
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import accuracies, normalised
from mergeflow.merging import configure, load_recipe, merge, prepare
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.search.sweep import SweepResult, run_sweep
from mergeflow.search.sweep_file import make_sweep
from tests.command import invoke
from tests.evaluation.small import TASKS, load_head, sweep_values

ROOT = Path(__file__).parents[2]
STUDY = {
    "search": {"trials": 5, "sampler": "tpe", "seed": 3},
    "methods": {
        "average": {},
        "cart": {"rank_ratio": [0.04, 0.16], "scale": {"low": 0.5, "high": 3.0, "step": 0.5}},
        "ties": {"keep": {"low": 0.05, "high": 0.5, "log": True}, "scale": 1.0},
    },
}


def sweep(world: Path, folder: Path, **changes: Any) -> SweepResult:
    return run_sweep(make_sweep(sweep_values(world, **changes)), folder)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("trials.parquet", "winner.yaml")}


def plain_accuracy(world: Path, state: dict[str, torch.Tensor], split: str = "validation") -> dict[str, float]:
    model = image_model(load_clip("pocket-clip"))
    model.load(state)
    data = {}
    for task in sorted(TASKS):
        rows = load_split(world / "data" / task, split)
        head = load_head(world / "heads" / f"{task}.safetensors")
        data[task] = Classification(task, torch.from_numpy(rows.images.copy()), torch.from_numpy(rows.labels), head)
    return accuracies(model, data)


@pytest.fixture(scope="module")
def grid(world: Path, tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    return sweep(world, tmp_path_factory.mktemp("grid"))


@pytest.mark.slow
def test_every_trial_is_the_plain_merge(world: Path, grid: SweepResult):
    base = dict(open_checkpoint(world / "base.safetensors"))
    experts = {task: dict(open_checkpoint(world / "experts" / f"{task}.safetensors")) for task in TASKS}
    individual = {task: plain_accuracy(world, state)[task] for task, state in experts.items()}
    assert grid.individual == individual
    assert grid.base.accuracy == plain_accuracy(world, base)
    assert len(grid.trials) == 10
    for trial in grid.trials:
        call = configure(trial.method, trial.args)
        accuracy = plain_accuracy(world, prepare(call, base, experts).at(call.scale))
        assert trial.score.accuracy == accuracy
        assert trial.score.normalised == normalised(accuracy, individual)


def test_one_direction_serves_every_scale_and_the_files_say_all(grid: SweepResult):
    assert grid.prepared == 4
    assert grid.scored == 10 + 1 + 3
    table = pq.read_table(grid.folder / "trials.parquet")
    assert table.column_names[:3] == ["trial", "method", "args"]
    assert table.column("mean").to_pylist() == [trial.score.mean for trial in grid.trials]
    assert json.loads(table.column("args")[9].as_py())["rank_ratio"] == 0.16
    assert {f"accuracy.{task}" for task in TASKS} < set(table.column_names)
    references = json.loads(table.schema.metadata[b"mergeflow.references"])
    assert references == {"base": grid.base.accuracy, "individual": grid.individual}


def test_the_winner_is_a_recipe_that_merges_to_its_score(world: Path, grid: SweepResult):
    best = max(trial.score.normalised or 0 for trial in grid.trials)
    assert grid.winner == next(trial for trial in grid.trials if trial.score.normalised == best)
    recipe = load_recipe(grid.folder / "winner.yaml")
    assert recipe == grid.recipe
    merged = dict(open_checkpoint(merge(recipe).path))
    assert plain_accuracy(world, merged) == grid.winner.score.accuracy
    base = plain_accuracy(world, dict(open_checkpoint(world / "base.safetensors")), "test")
    assert sum(plain_accuracy(world, merged, "test").values()) > sum(base.values()), "on images never seen"


def test_a_second_run_scores_nothing(grid: SweepResult):
    before = files(grid.folder)
    again = run_sweep(grid.sweep, grid.folder)
    assert (again.scored, again.prepared) == (0, 0)
    assert files(grid.folder) == before


def test_a_wider_grid_keeps_what_is_known(world: Path, tmp_path: Path):
    methods = {"task_arithmetic": {"scale": [0.2, 0.4]}}
    sweep(world, tmp_path, methods=methods)
    wider = sweep(world, tmp_path, methods={"task_arithmetic": {"scale": [0.2, 0.3, 0.4]}, "average": {}})
    assert wider.scored == 2
    assert [trial.varied.get("scale") for trial in wider.trials] == [0.2, 0.3, 0.4, None]


def test_edges_are_marked(grid: SweepResult):
    marked = {t.varied["scale"]: t.edges for t in grid.trials if t.method == "task_arithmetic"}
    assert marked == {0.2: ("scale",), 0.4: (), 0.6: ("scale",)}


@pytest.mark.slow
def test_a_search_is_deterministic_and_replays_from_its_journal(world: Path, tmp_path: Path):
    whole = sweep(world, tmp_path / "whole", **STUDY)
    assert [sum(t.method == m for t in whole.trials) for m in ("average", "cart", "ties")] == [1, 5, 5]
    assert all(t.varied["scale"] in (0.5, 1, 1.5, 2, 2.5, 3) for t in whole.trials if t.method == "cart")
    # Stopped anywhere: the journal's first lines are all that is left.
    lines = (tmp_path / "whole/trials.jsonl").read_bytes().splitlines(keepends=True)
    for lines_left in (3, 8):
        part = tmp_path / f"part{lines_left}"
        part.mkdir()
        (part / "trials.jsonl").write_bytes(b"".join(lines[:lines_left]) + b'{"key": "torn')
        resumed = sweep(world, part, **STUDY)
        assert resumed.rows() == whole.rows()
        assert resumed.scored == len(lines) - lines_left
        assert (part / "trials.jsonl").read_bytes() == b"".join(lines)
        assert files(part)["trials.parquet"] == files(tmp_path / "whole")["trials.parquet"]


def test_results_of_other_inputs_are_refused(world: Path, grid: SweepResult):
    experts = sweep_values(world)["experts"]
    swapped = {**experts, "red": experts["blue"]}
    with pytest.raises(MergeflowError, match=r"results of other inputs \(expert red changed\)"):
        sweep(world, grid.folder, experts=swapped)


def test_what_does_not_fit_is_told_before_any_trial(world: Path, tmp_path: Path):
    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(MergeflowError, match=match):
            sweep(world, tmp_path, **changes)

    tasks = sweep_values(world)["tasks"]
    heads = {task: part["head"] for task, part in tasks.items()}
    refused("no checkpoint at", base=str(world / "missing.safetensors"))
    refused("image_size is 64.*takes 32", model={"architecture": "pocket-clip", "image_size": 64})
    refused("base .*differences(.|\n)*missing", base=tasks["red"]["head"], experts=heads)
    wrong = {**tasks, "red": {**tasks["red"], "head": tasks["blue"]["head"]}}
    refused("task 'red': the head has 3 classes", tasks=wrong)
    refused("unknown architecture 'pocket-clop'", model={"architecture": "pocket-clop"})
    if not torch.cuda.is_available():
        refused("no CUDA device", device="cuda")
    assert not (tmp_path / "trials.jsonl").exists()


def test_sources_are_prepared_once_and_heads_are_built(world: Path, tmp_path: Path):
    from PIL import Image

    pixels = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()
    for split in ("train", "val", "test"):
        for number, name in enumerate(("one", "two")):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            image = Image.fromarray(pixels ^ (17 * number + len(split)))
            for index in range(2):
                image.rotate(90 * index).save(tmp_path / "images" / split / name / f"{index}.png")
    changes = {
        "model": {"architecture": "pocket-clip", "pretrained": "pocket8"},
        "tasks": {"own": {"source": f"folder:{tmp_path / 'images'}", "expert": "red"}},
        "methods": {"average": {}},
    }
    first = sweep(world, tmp_path / "out", **changes)
    manifest = tmp_path / "out/data/own/manifest.json"
    stamp = manifest.stat().st_mtime_ns
    again = sweep(world, tmp_path / "out", **changes)
    assert (again.scored, manifest.stat().st_mtime_ns) == (0, stamp)
    assert first.rows() == again.rows()


def write_file(world: Path, folder: Path, **changes: Any) -> Path:
    place = folder / "small.yaml"
    place.write_text(yaml.safe_dump(sweep_values(world, **changes), sort_keys=False))
    return place


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("suite:pocket9", "unknown suite 'pocket9'"),
        ("suite:pocket8/digits?fraction=2", "fraction=2: found '2'"),
        ("folderr:x", "unknown kind of data source"),
    ],
)
def test_a_source_that_cannot_be_prepared_is_told_with_its_task(world: Path, tmp_path: Path, source: str, message: str):
    model = {"architecture": "pocket-clip", "pretrained": "pocket8"}
    place = write_file(world, tmp_path, model=model, tasks={"own": {"source": source, "expert": "red"}})
    done = invoke(add_commands, "sweep", place, "--out", tmp_path / "out")
    assert f"sweep '{place}', tasks.own, source '{source}': " in str(done.exception)
    assert message in str(done.exception)


def test_the_command_prints_the_table_and_the_recipe(world: Path, grid: SweepResult, tmp_path: Path):
    place = write_file(world, tmp_path)
    done = invoke(add_commands, "sweep", place, "--out", grid.folder, env={"COLUMNS": "140"})
    assert done.exit_code == 0, done.output
    assert f"{grid.winner.method} *" in done.output
    assert "scale 0.6!" in done.output
    assert (grid.folder / "winner.yaml").read_text().strip() in done.output
    state = read_state(world / "experts/red.safetensors")
    torch.save({"state_dict": state, "ema": {name: v + 1 for name, v in state.items()}}, tmp_path / "red.pt")
    values = yaml.safe_load(place.read_text())
    values["experts"]["red"] = str(tmp_path / "red.pt")
    place.write_text(yaml.safe_dump(values, sort_keys=False))
    assert "'ema', not read" in invoke(add_commands, "sweep", place, "--out", grid.folder).output


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_its_screen(grid: SweepResult, width: int):
    from rich.console import Console

    from mergeflow.commands.sweep import result_table

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(result_table(grid, width))
    text = console.export_text()
    assert "rank_ratio 0.04, scale 2!" in text
    assert ("grey" in text) == (width == 200)
    assert "…" not in text


def test_a_winner_that_is_no_better_than_the_base_is_not_praised(grid: SweepResult):
    from mergeflow.commands.sweep import remarks

    warning = "The winner is no better than the base"
    assert warning in "".join(remarks(replace(grid, base=grid.winner.score)))
    assert (warning in "".join(remarks(grid))) == (grid.winner.score.mean <= grid.base.mean)


def test_log_without_a_project_is_refused(tmp_path: Path):
    done = invoke(add_commands, "sweep", tmp_path / "s.yaml", "--log")
    assert isinstance(done.exception, MergeflowError)
    assert "project" in str(done.exception)


KILLED = """
import sys, torch
torch.set_num_threads(1)
from mergeflow.search.sweep import run_sweep
from mergeflow.search.sweep_file import load_sweep
run_sweep(load_sweep(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
def test_killed_it_continues_to_the_same_files(world: Path, grid: SweepResult, tmp_path: Path):
    """kill -9 while trials are scored; then the same command ends with the bytes of an uninterrupted run."""
    place, out = write_file(world, tmp_path), tmp_path / "out"
    journal = out / "trials.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(place), str(out)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 7:
            break
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    scored_before = journal.read_bytes().count(b"\n")
    assert scored_before < 15
    assert not (out / "winner.yaml").exists()
    resumed = run_sweep(grid.sweep, out)
    assert resumed.scored == 15 - scored_before
    assert resumed.rows() == grid.rows()
    assert (out / "trials.parquet").read_bytes() == (grid.folder / "trials.parquet").read_bytes()
    assert sorted(path.name for path in out.iterdir()) == ["trials.jsonl", "trials.parquet", "winner.yaml"]
