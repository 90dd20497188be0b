"""Start-up: commands that need no torch import none."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

from mergeflow.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
COMMAND = """
import sys
from mergeflow.cli import main
for words in sys.argv[1:]:
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit:
        pass
    heavy = [name for name in ("torch", "mlflow", "prefect", "pandas", "matplotlib") if name in sys.modules]
    print(words, heavy, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the results of a run, as far as the commands read them."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("dvc.yaml", "params.yaml", "studies/dvc.yaml", "studies/params.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    tasks = list(yaml.safe_load((ROOT / "params.yaml").read_text())["tasks"])
    scores = {"args": {}, "accuracy": dict.fromkeys(tasks, 0.5), "mean": 0.5, "normalised": 0.5}
    rows = [{"name": name, **scores} for name in ("zero_shot", "individual", "average")]
    (folder / "outputs/results").mkdir(parents=True)
    test = {"split": "test", "tasks": tasks, "winner": "average", "rows": rows}
    (folder / "outputs/results/test.json").write_text(json.dumps(test))
    return folder


def test_what_needs_no_torch_imports_none_and_the_version_is_that_of_the_package(project: Path) -> None:
    done = _run(project, "--version", "--help", "results", "new birds", "run --help", "study")
    assert imported(done) == ["[]"] * 6
    assert done.stdout.startswith(f"mergeflow {version('mergeflow')}\n")


@pytest.fixture(scope="module")
def recipes(project: Path) -> Path:
    """A base and two experts, and recipes that read them whole, in steps, and as layers of a mixture."""
    for seed, name in enumerate(("base", "a", "b")):
        generator = torch.Generator().manual_seed(seed)
        tensors = {f"h.{layer}.attn.weight": torch.randn(6, 4, generator=generator) for layer in range(2)}
        write_checkpoint(project / f"{name}.safetensors", {**tensors, "steps": torch.tensor(seed)})
    inputs = {"base": "base.safetensors", "experts": {"a": "a.safetensors", "b": "b.safetensors"}}
    step = {"steps": {"first": {"method": "ties", **inputs}}, "experts": {"a": "step:first", "b": "b.safetensors"}}
    recipes = {
        "ties": {"method": "ties", **inputs, "dtype": "bfloat16"},
        "cart": {"method": "cart", **inputs, "args": {"rank_ratio": 0.5}},
        "slerp": {"method": "slerp", **step},
    }
    for name, recipe in recipes.items():
        (project / f"{name}.yaml").write_text(yaml.safe_dump({**recipe, "out": "merged.safetensors"}))
    return project


def test_checking_a_recipe_imports_no_torch(recipes: Path) -> None:
    methods = ["ties", "cart", "slerp"]
    done = _run(recipes, *(f"check {method}.yaml" for method in methods))
    assert [f"method        {method}" in done.stdout for method in methods] == [True] * 3
    assert imported(done) == ["[]"] * 3


@pytest.mark.slow
def test_the_registry_imports_mlflow_and_no_torch(project: Path) -> None:
    assert imported(_run(project, "registry list", "registry promote")) == ["['mlflow', 'pandas']"] * 2


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", COMMAND, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def imported(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return of each command the heavy modules that are imported when it ends."""
    return [line[line.rindex("[") :] for line in done.stderr.splitlines() if line.endswith("]") and "[" in line]
