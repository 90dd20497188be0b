"""Stage `base`: the weights that every expert starts from, and each task's head."""

from mergeflow import layout
from mergeflow.data import load_manifest
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.heads import save_head
from mergeflow.modality import Base
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write `outputs/base`: shared weights, and per task `heads/<task>.safetensors`, its head or that it has none.

    Each expert depends on its own task's file alone: what changes one head trains no other expert again.
    """
    section = io.section("model")
    folder = io.out(layout.BASE)
    (folder / "heads").mkdir(parents=True)
    manifests = {task: load_manifest(io.dep(layout.manifest_folder(task))) for task in io.section("tasks")}
    base = Base(io.root, folder / layout.MODEL_FILE, folder / "heads", io.report)
    MODALITIES.get(section.modality).make_base(section, io.section("data"), manifests, base)
    for task in manifests:
        if not base.head(task).exists():
            save_head(None, base.head(task))
