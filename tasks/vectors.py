"""Stage `vectors`: task vectors, their norms and their cosines."""

from mergeflow import layout
from mergeflow.analysis.geometry import cosine_matrix, norm
from mergeflow.checkpoints import fingerprint, write_checkpoint
from mergeflow.checkpoints.reader import BASE, KIND
from mergeflow.documents import Geometry, write_document
from tasks.models import load_states
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write `outputs/vectors/<task>.safetensors` (τ_t = θ_t − θ0, float32) and `outputs/results/geometry.json`.

    A file says that it is a task vector, and of which base, so that a merge treats it as one.
    """
    tasks = list(io.section("tasks"))
    base, experts = load_states(io, tasks)
    folder = io.out(layout.VECTORS)
    folder.mkdir()
    vectors, kind = {}, {KIND: "task_vector", BASE: fingerprint(base)}
    for done, (task, expert) in enumerate(experts.items(), start=1):
        vectors[task] = {name: expert[name].float() - base[name].float() for name in base}
        write_checkpoint(folder / f"{task}.safetensors", vectors[task], {"task": task, **kind})
        io.report("task vectors", done, len(tasks))
    base_norm = norm(base)
    geometry: Geometry = {
        "tasks": tasks,
        "cosine": cosine_matrix(list(vectors.values())),
        "relative_norm": {task: norm(vector) / base_norm for task, vector in vectors.items()},
    }
    write_document(io.out(layout.GEOMETRY), geometry)
