"""Start-up: commands that need no torch import none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMMAND = """
import sys
from mergeflow.cli import main
try:
    main()
except SystemExit:
    pass
print([name for name in ("torch", "mlflow", "prefect", "pandas", "matplotlib") if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the results of a run, as far as the commands read them."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("dvc.yaml", "params.yaml", "studies/dvc.yaml", "studies/params.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    tasks = list(yaml.safe_load((ROOT / "params.yaml").read_text())["tasks"])
    row = {
        "name": "average",
        "args": {"scale": 1.0},
        "accuracy": dict.fromkeys(tasks, 0.5),
        "mean": 0.5,
        "normalised": 0.5,
    }
    (folder / "outputs/results").mkdir(parents=True)
    test = {"split": "test", "tasks": tasks, "winner": "average", "rows": [row]}
    (folder / "outputs/results/test.json").write_text(json.dumps(test))
    return folder


@pytest.mark.parametrize("words", [["--help"], ["results"], ["new", "birds"], ["run", "--help"], ["study"]])
def test_what_needs_no_torch_imports_none(words: list[str], project: Path) -> None:
    assert _run(project, COMMAND, *words) == "[]"


@pytest.mark.parametrize("words", [["registry", "list"], ["registry", "promote"]])
def test_the_registry_imports_mlflow_and_no_torch(words: list[str], project: Path) -> None:
    assert _run(project, COMMAND, *words) == "['mlflow', 'pandas']"


def _run(folder: Path, code: str, *words: str) -> str:
    """Return the last line of stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return (done.stderr.strip().splitlines() or [""])[-1]
