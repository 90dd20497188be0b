"""Stage `base`: the weights that every expert starts from, and each task's head."""

from mergeflow import layout
from mergeflow.data import load_manifest
from mergeflow.modalities.catalog import find_modality
from mergeflow.modality import Base
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write `base` : the shared weights, and `heads/<task>.safetensors`."""
    section = io.section("model")
    folder = io.out(layout.BASE)
    (folder / "heads").mkdir(parents=True)
    manifests = {task: load_manifest(io.dep(layout.manifest_folder(task))) for task in io.section("tasks")}
    base = Base(io.root, folder / layout.MODEL_FILE, folder / "heads", io.report)
    find_modality(section.modality).make_base(section, io.section("data"), manifests, base)
