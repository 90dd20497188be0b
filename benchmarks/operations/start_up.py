"""How long commands take before they work: processor time, beside that of what they cannot do without.

Command    python -m benchmarks.operations.start_up (about a minute)
Prints     median processor seconds of three runs of each command, and the ratio to its base: the imports that every
           command makes, or, for the registry's, MLflow's client and one query of the same database
"""

import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
RUNS = 3
BARE = "import typer, rich.table, pydantic, yaml"
CLIENT = "from mlflow import MlflowClient; MlflowClient('sqlite:///mlflow.db').search_registered_models()"
COMMANDS = {
    "methods": BARE,
    "new scratch": BARE,
    "check recipe.yaml": BARE,
    "results": BARE,
    "study": BARE,
    "registry list": CLIENT,
    "registry promote": CLIENT,
}


def main() -> None:
    table = Table("command", "processor s", "of base", title="Start-up")
    with TemporaryDirectory() as place:
        folder = _project(Path(place))
        bases = {code: _seconds([sys.executable, "-c", code], folder) for code in (BARE, CLIENT)}
        for words, base in COMMANDS.items():
            command = [sys.executable, "-m", "mergeflow.cli", *words.split()]
            seconds = _seconds(command, folder, remove="scratch")
            table.add_row(words, f"{seconds:.2f}", f"{seconds / bases[base]:.1f} x of {bases[base]:.2f}")
    Console().print(table)


def _project(folder: Path) -> Path:
    """Return a folder with a project's choices, its studies, a recipe, and a registry that MLflow has set up."""
    for name in ("params.yaml", "dvc.yaml", "studies/params.yaml", "studies/dvc.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    write = "import torch; from safetensors.torch import save_file\n" + "\n".join(
        f"save_file({{'a.weight': torch.ones(4, 4)}}, '{name}.safetensors')" for name in ("base", "one", "two")
    )
    subprocess.run([sys.executable, "-c", write], cwd=folder, check=True)
    (folder / "recipe.yaml").write_text(
        "method: ties\nbase: base.safetensors\nexperts: [one.safetensors, two.safetensors]\nout: merged.safetensors\n"
    )
    subprocess.run([sys.executable, "-c", CLIENT], cwd=folder, check=True, capture_output=True)
    return folder


def _seconds(command: list[str], folder: Path, remove: str = "nothing") -> float:
    """Return the median processor time of a command, its first run left out."""
    seconds = []
    for _ in range(RUNS + 1):
        subprocess.run(["rm", "-rf", str(folder / remove)], check=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(seconds[1:])


if __name__ == "__main__":
    main()
