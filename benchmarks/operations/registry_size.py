"""Time the registry's questions and a promotion where it has grown, beside MLflow's own search of the same versions.

    python -m benchmarks.operations.registry_size                   # 2,000 versions of 200 tasks
    python -m benchmarks.operations.registry_size --versions 100    # a smoke test
    python -m benchmarks.operations.registry_size --profile promote

Two versions are registered; the others are copies of the second one's rows in the database: a temporary file, or
an empty one that MLFLOW_TRACKING_URI names.
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sqlalchemy
import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.modalities.heads import Head, save_head
from mergeflow.modalities.vision.models import image_model, load_clip
from registry.artifacts import ModelFiles
from registry.gates import Evidence, GateSettings
from registry.promotion import Candidate, promote, register, rollback
from registry.store import Store, connect
from registry.versions import all_versions, list_versions, show

NAME = "merged"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--examples", type=int, default=500, help="validation examples of a task")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", choices=["list", "show", "promote", "rollback"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mergeflow-registry-") as folder:
        store = grown_registry(Path(folder), options.versions, options.tasks, options.examples)
        work: dict[str, Callable[[], object]] = {
            "list": lambda: list_versions(store, NAME),
            "show": lambda: show(store, NAME, "champion"),
            "promote": lambda: promote(store, NAME, 2, GateSettings()),
            "rollback": lambda: rollback(store, NAME),
        }
        if options.profile:
            if options.profile == "rollback":
                promote(store, NAME, 2, GateSettings())
            with cProfile.Profile() as profile:
                work[options.profile]()
            pstats.Stats(profile).sort_stats("cumulative").print_stats(40)
            return
        plain = timed(lambda: all_versions(store, NAME), options.repeat)
        print(f"{options.versions} versions, {options.tasks} tasks. MLflow's search of all versions: {plain:.2f} s")
        for name, do in work.items():
            seconds = timed(do, options.repeat if name in ("list", "show") else 1)
            print(f"{name:10} {seconds:6.2f} s  {seconds / plain:5.2f} of MLflow's search")


def timed(work: Callable[[], object], repeat: int) -> float:
    """Return the median of the seconds that some work takes."""
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def grown_registry(folder: Path, versions: int, tasks: int, examples: int) -> Store:
    """Make a registry of so many versions, the first of them champion."""
    store, names = connect(project_root=folder), [f"task{number:03}" for number in range(tasks)]
    files = model_files(folder, names)
    for seed, accuracy in enumerate((0.7, 0.8)):
        metrics = {f"validation/{task}": accuracy for task in names}
        evidence = evidence_of(names, accuracy, examples)
        register(store, NAME, Candidate(files, evidence, f"fingerprint-{seed}", metrics))
        if not seed:
            promote(store, NAME, 1, GateSettings())
    copy_rows(store.uri, versions)
    return store


def copy_rows(uri: str, versions: int) -> None:
    """Repeat the second version's rows until there are so many versions."""
    engine = sqlalchemy.create_engine(uri)
    with engine.begin() as connection:
        for table in ("model_versions", "model_version_tags"):
            columns = {column["name"] for column in sqlalchemy.inspect(engine).get_columns(table)} - {"version"}
            listed = ", ".join(sorted(columns))
            question = f"INSERT INTO {table} (version, {listed}) SELECT :new, {listed} FROM {table} WHERE version = 2"
            connection.execute(sqlalchemy.text(question), [{"new": number} for number in range(3, versions + 1)])
        connection.execute(sqlalchemy.text("ANALYZE"))  # as PostgreSQL does by itself a minute later


def model_files(folder: Path, tasks: list[str]) -> ModelFiles:
    """Write the pocket model with random weights, and a head for each task."""
    weights, head = folder / "merged.safetensors", folder / "head.safetensors"
    write_checkpoint(weights, image_model(load_clip("pocket-clip", seed=3)).state())
    matrix = torch.nn.functional.normalize(torch.randn(10, 128, generator=torch.Generator().manual_seed(1)))
    save_head(Head(matrix, 20.0, [str(number) for number in range(10)]), head)
    model = {"modality": "vision", "architecture": "pocket-clip", "pretrained": "none"}
    return ModelFiles(weights, dict.fromkeys(tasks, head), model, {"image_size": 32})


def evidence_of(tasks: list[str], accuracy: float, examples: int) -> Evidence:
    """Return the evidence of a model that is right on the first examples of each task."""
    scores = {task: (np.arange(examples) < accuracy * examples).astype(np.float32) for task in tasks}
    shares = dict.fromkeys(tasks, accuracy)
    return Evidence(shares, dict.fromkeys(tasks, 0.95), scores, dict.fromkeys(tasks, "digest"), True)


if __name__ == "__main__":
    main()
