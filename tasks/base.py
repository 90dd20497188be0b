"""Stage `base`: the pre-trained CLIP's image encoder, and one frozen zero-shot head per task."""

from mergeflow import layout
from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import save_head
from mergeflow.modalities.vision.heads import build_head
from mergeflow.modalities.vision.models import image_model, load_clip
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write `base` : the image encoder and `heads/<task>.safetensors`."""
    model = io.section("model")
    clip = load_clip(model.architecture, _pretrained(io))
    wanted, found = clip.image_size, io.section("data").image_size
    if wanted != found:
        raise MergeflowError(
            f"data.image_size is {found}, but {model.architecture} takes {wanted}: set it to {wanted}."
        )
    folder = io.out(layout.BASE)
    (folder / "heads").mkdir(parents=True)
    record = {"architecture": model.architecture, "pretrained": model.pretrained, "role": "base"}
    write_checkpoint(folder / "image_encoder.safetensors", image_model(clip).state(), record)
    for done, task in enumerate(io.section("tasks"), start=1):
        manifest = load_manifest(io.dep(layout.manifest_folder(task)))
        head = build_head(clip, manifest["class_names"], manifest["templates"])
        save_head(head, folder / "heads" / f"{task}.safetensors")
        io.report("heads", done, len(io.section("tasks")))


def _pretrained(io: StageIO) -> str:
    """A local file is named relative to the project folder."""
    name: str = io.section("model").pretrained
    local = io.root / name
    return str(local) if local.is_file() else name
