"""Start-up: commands that need no torch import none; the registry's cost little more than MLflow's own client."""

import json
import os
import resource
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
print([name for name in ("torch", "mlflow", "prefect", "pandas") if name in sys.modules], file=sys.stderr)
"""

# The import alone takes two thirds of this; MLflow's SQL store, which every local registry needs, takes the rest.
CLIENT = """
from mlflow import MlflowClient
MlflowClient("sqlite:///mlflow.db", "sqlite:///mlflow.db").search_registered_models()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the results of a run, as far as the commands read them."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("dvc.yaml", "params.yaml"):
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


@pytest.mark.parametrize("words", [["--help"], ["results"], ["new", "birds"], ["run", "--help"]])
def test_what_needs_no_torch_imports_none(words: list[str], project: Path) -> None:
    loaded, spent = _run(project, COMMAND, *words)
    assert loaded == "[]"
    _, least = _run(project, "import typer, rich.console, rich.table, yaml, pydantic", *words)
    assert spent <= max(0.6, 3 * least)  # seconds of CPU; 0.2 s on an idle core


@pytest.mark.parametrize("words", [["registry", "list"], ["registry", "promote"]])
def test_the_registry_costs_little_more_than_mlflows_client(words: list[str], project: Path) -> None:
    _run(project, COMMAND, *words)  # makes the database
    loaded, spent = _run(project, COMMAND, *words)
    assert loaded == "['mlflow', 'pandas']"
    _, client = _run(project, CLIENT)
    assert spent <= 1.5 * client


def _run(folder: Path, code: str, *words: str) -> tuple[str, float]:
    """Return the last line of stderr and the seconds of CPU, which other work on the machine changes little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Traceback" not in done.stderr, done.stderr
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (done.stderr.strip().splitlines() or [""])[-1], spent
