"""A finished run with made-up figures: what the stages leave behind, written by hand."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.project.graph import load_graph
from tasks.project.stage import StageIO

PROJECT = Path(__file__).parents[2]
TASKS = ("digits", "street", "signs", "textures", "land", "aerial", "scenes", "vehicles")
GRIDS: dict[str, dict[str, list[Any]]] = {
    "average": {"scale": [1.0]},
    "task_arithmetic": {"scale": [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]},
    "ties": {"keep": [0.1, 0.2], "scale": [0.4, 0.6, 0.8, 1.0, 1.2]},
    "cart": {"rank_ratio": [0.02, 0.04, 0.08, 0.16, 0.32], "scale": [0.75, 1.0, 1.5, 2.0, 3.0]},
}
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes a finished run, without figures, into `tmp_path` and returns the folder."""
    return partial(write_run, tmp_path)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("drawn")
    return draw(write_run(folder), folder / "scratch")


@pytest.fixture
def finished(make_run: MakeRun, drawn: dict[str, bytes]) -> Path:
    return place(make_run(), drawn)


def draw(root: Path, scratch: Path) -> dict[str, bytes]:
    from mergeflow import layout
    from tasks.figures import run

    stage = load_graph(PROJECT)["figures"]
    run(StageIO(stage, root, scratch, params=None))  # type: ignore[arg-type]  # the stage reads none
    return {path.name: path.read_bytes() for path in sorted((scratch / "building" / layout.FIGURES).iterdir())}


def place(root: Path, figures: dict[str, bytes]) -> Path:
    folder = root / "outputs/results/figures"
    folder.mkdir()
    for name, svg in figures.items():
        (folder / name).write_bytes(svg)
    return root


def write_run(
    root: Path,
    tasks: Sequence[str] = TASKS,
    grids: Mapping[str, Mapping[str, list[Any]]] = GRIDS,
    optional: bool = True,
    source: str = "suite:pocket8",
) -> Path:
    individual = {task: 0.98 - 0.04 * index for index, task in enumerate(tasks)}
    sweeps = {method: _candidates(number, grid, individual) for number, (method, grid) in enumerate(grids.items())}
    selection = _selection(list(tasks), sweeps, grids, individual)
    _write(root / "outputs/results/selection.json", selection)
    _write(root / "outputs/results/test.json", _test(selection, individual))
    for method, rows in sweeps.items():
        record = {"method": method, "split": "validation", "individual": individual, "candidates": rows}
        _write(root / f"outputs/sweeps/{method}.json", record)
    params = yaml.safe_load((PROJECT / "params.yaml").read_text())
    params |= {"tasks": dict.fromkeys(tasks, source), "sweep": {name: dict(grid) for name, grid in grids.items()}}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    _write_parts(root, list(tasks), individual)
    if optional:
        _write_extras(root, list(tasks), selection["winner"])
    return root


def _candidates(number: int, grid: Mapping[str, list[Any]], individual: Mapping[str, float]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{}]
    for name, values in grid.items():
        rows = [{**row, name: value} for row in rows for value in values]
    return [_scored(args, 0.62 + 0.04 * number, grid, individual) for args in rows]


def _scored(args: dict[str, Any], height: float, grid: Any, individual: Mapping[str, float]) -> dict[str, Any]:
    share = height
    for name, value in args.items():
        numbers = [v for v in grid[name] if isinstance(v, int | float)]
        if len(numbers) > 1 and isinstance(value, int | float):
            middle = math.log(numbers[len(numbers) // 2])
            share -= 0.06 * (math.log(value) - middle) ** 2
    shares = {task: max(share + 0.05 * math.sin(3 * index), 0.02) for index, task in enumerate(individual)}
    accuracy = {task: shares[task] * individual[task] for task in individual}
    return {
        "args": args,
        "accuracy": accuracy,
        "mean": sum(accuracy.values()) / len(accuracy),
        "normalised": sum(shares.values()) / len(shares),
    }


def _selection(tasks: list[str], sweeps: Any, grids: Any, individual: Any) -> dict[str, Any]:
    chosen = {}
    for method, rows in sweeps.items():
        best = max(rows, key=lambda row: row["normalised"])
        recipe = {
            "method": method,
            "args": best["args"],
            "base": "outputs/base/model.safetensors",
            "experts": {task: f"outputs/experts/{task}/model.safetensors" for task in tasks},
            "fingerprints": {task: f"{index:064x}" for index, task in enumerate(tasks)},
        }
        edges = ["scale"] if best["args"].get("scale") == max(grids[method].get("scale", [0])) > 1 else []
        chosen[method] = {
            "args": best["args"],
            "recipe": recipe,
            "fingerprint": "ab" * 32,
            "candidates": len(rows),
            "at_grid_edge": edges,
            "validation": {key: best[key] for key in ("accuracy", "mean", "normalised")},
        }
    winner = max(chosen, key=lambda method: chosen[method]["validation"]["normalised"])
    return {"tasks": tasks, "winner": winner, "individual": individual, "methods": chosen}


def _test(selection: dict[str, Any], individual: dict[str, float]) -> dict[str, Any]:
    tasks = selection["tasks"]

    def row(name: str, args: Any, shares: Mapping[str, float]) -> dict[str, Any]:
        accuracy = {task: shares[task] * individual[task] for task in tasks}
        means = (sum(values.values()) / len(tasks) for values in (accuracy, shares))
        return {
            "name": name,
            "args": args,
            "accuracy": accuracy,
            **dict(zip(("mean", "normalised"), means, strict=True)),
        }

    zero = {task: 0.42 + 0.05 * math.cos(index) for index, task in enumerate(tasks)}
    rows = [row("zero_shot", {}, zero), row("individual", {}, dict.fromkeys(tasks, 1.0))]
    for number, (method, choice) in enumerate(selection["methods"].items()):
        validated = choice["validation"]["accuracy"]
        shares = {
            task: validated[task] / individual[task] - 0.02 + 0.06 * math.sin(number + 2 * index)
            for index, task in enumerate(tasks)
        }
        rows.append(row(method, choice["args"], shares))
    examples = dict.fromkeys(tasks, 500)
    return {"split": "test", "tasks": tasks, "examples": examples, "winner": selection["winner"], "rows": rows}


def _write_parts(root: Path, tasks: list[str], individual: dict[str, float]) -> None:
    cosine = [[1.0 if a == b else 0.21 * math.cos(a * b + 1) for b in range(len(tasks))] for a in range(len(tasks))]
    geometry = {"tasks": tasks, "cosine": cosine, "relative_norm": dict.fromkeys(tasks, 0.06)}
    _write(root / "outputs/results/geometry.json", geometry)
    for index, task in enumerate(tasks):
        epochs = [
            {
                "epoch": epoch,
                "steps": 47 * epoch,
                "loss": (2.0 + 0.1 * index) * math.exp(-0.5 * epoch),
                "gradient_norm": 1.0,
                "distance": 0.5 * epoch,
                "validation_accuracy": individual[task] * (1 - 0.5 * math.exp(-0.8 * epoch)),
            }
            for epoch in range(1, 8)
        ]
        summary = {"task": task, "fingerprint": f"{index:064x}", "settings": {"learning_rate": 4e-4}, "steps": 300}
        summary |= {"examples": 1500, "validation_accuracy": individual[task], "epochs": epochs}
        _write(root / f"outputs/experts/{task}/training.json", summary)


def _write_extras(root: Path, tasks: list[str], winner: str) -> None:
    for number, stage in enumerate([*(f"finetune@{task}" for task in tasks), "select", "evaluate"]):
        record = {
            "stage": stage,
            "started": 1.79e9 + 20 * number,
            "seconds": 18.5 - number,
            "peak_memory_mib": 900 + number,
        }
        _write(root / f".mergeflow/records/{stage}.json", record)
    reason = "there is no champion yet: the first complete model becomes it"
    decision = {
        "promote": True,
        "gates": [
            {
                "name": "metrics",
                "passed": True,
                "reason": f"the candidate has every validation figure of {len(tasks)} tasks",
            },
            {"name": "champion", "passed": True, "reason": reason},
        ],
        "numbers": {"normalised": 0.74},
    }
    registration = {"model": "mergeflow-pocket8", "version": "1", "aliases": ["champion"], "decision": decision}
    registration |= {"champion": "1", "candidate": None, "method": winner}
    _write(root / "outputs/registration.json", registration)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))
