"""Extras: merging needs none of them, and a missing one is one sentence with the line that installs it."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergeflow.errors import EXTRAS, not_installed

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "open_clip": "open_clip_torch",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "rouge_score": "rouge-score",
}
WITHOUT = f"""
import sys
for name in {sorted(EXTRAS)!r}:
    sys.modules[name] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {set(EXTRAS)!r} else found(name, package)
from mergeflow.cli import main
main()
"""


def test_every_extra_installs_what_it_is_named_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = " ".join(project["dependencies"])
    for module, extra in EXTRAS.items():
        name = DISTRIBUTIONS.get(module, module)
        assert any(line.startswith(name) for line in project["optional-dependencies"][extra]), module
        assert name not in always


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge")
    for number, name in enumerate(("base", "one", "two")):
        save_file({"layer.weight": torch.full((4, 4), float(number))}, folder / f"{name}.safetensors")
    files = {"base": "base.safetensors", "experts": {"one": "one.safetensors", "two": "two.safetensors"}}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"method": "ties", **files, "out": "merged.safetensors"}))
    return path


@pytest.mark.slow
def test_merging_needs_no_extra(recipe: Path) -> None:
    done = _without_extras(recipe.parent, "merge", recipe.name)
    assert done.returncode == 0, done.stderr
    assert (recipe.parent / "merged.safetensors").exists()


def test_a_missing_extra_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    done = _without_extras(tmp_path, "run")
    assert done.returncode == 2, done.stderr
    assert "pip install '/path/to/mergeflow[project]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_missing_modules_are_no_business_of_the_extras() -> None:
    assert not_installed("torch") is None
    assert not_installed(None) is None


def _without_extras(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
