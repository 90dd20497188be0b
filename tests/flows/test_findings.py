"""What the embedded suite must show, asserted on the metrics of the real pipeline with the project's params.yaml."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.dvc_commands import changes
from tasks.project.graph import load_graph
from tests.flows.small_project import ROOT, run_in

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # three minutes: the whole pipeline, as `make demo` runs it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project after `make demo`: this one when it has run and nothing is stale, else a copy that is run here."""
    if not changes(ROOT, load_graph(ROOT)):
        return ROOT
    target = tmp_path_factory.mktemp("demo")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    assert run_in(target, "git", "init", "-q").returncode == 0
    done = run_in(target, "mergeflow", "run", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def accuracy(folder: Path) -> dict[str, float]:
    """Mean test accuracy in points of the base, the experts and each method's chosen merge."""
    metrics = json.loads((folder / "outputs/results/metrics.json").read_text())
    return {name: 100 * row["mean"] for name, row in metrics.items()}


def test_base_average_task_arithmetic_cart_and_experts_stand_in_this_order(accuracy: dict[str, float]) -> None:
    assert 35 <= accuracy["zero_shot"] <= 70
    assert accuracy["zero_shot"] < accuracy["average"] <= accuracy["task_arithmetic"] <= accuracy["cart"]
    assert accuracy["individual"] >= 88
    assert accuracy["individual"] - accuracy["average"] >= 8


def test_the_best_scale_of_task_arithmetic_lies_inside_the_grid(folder: Path) -> None:
    selection = json.loads((folder / "outputs/results/selection.json").read_text())
    assert selection["methods"]["task_arithmetic"]["at_grid_edge"] == []


def test_carts_best_rank_lies_inside_the_grid(folder: Path) -> None:
    rows = json.loads((folder / "outputs/sweeps/cart.json").read_text())["candidates"]
    best: dict[float, float] = {}
    for row in rows:
        ratio = row["args"]["rank_ratio"]
        best[ratio] = max(best.get(ratio, 0.0), row["normalised"])
    ratios = sorted(best)
    top = max(ratios, key=lambda ratio: best[ratio])
    assert ratios[0] < top < ratios[-1]
    assert best[top] - best[ratios[0]] > 0.01


def test_task_vectors_are_nearly_orthogonal(folder: Path) -> None:
    cosine = json.loads((folder / "outputs/results/geometry.json").read_text())["cosine"]
    assert max(abs(value) for i, row in enumerate(cosine) for j, value in enumerate(row) if i != j) < 0.15


def test_no_image_is_in_two_splits(folder: Path) -> None:
    from mergeflow.data import load_split

    for task in (folder / "outputs/data/manifests").iterdir():
        seen: set[bytes] = set()
        for split in ("train", "validation", "test"):
            images = load_split(folder / f"outputs/data/{split}/{task.name}", split).images
            contents = {image.tobytes() for image in images}
            assert not contents & seen, f"{task.name}: {split}"
            seen |= contents
