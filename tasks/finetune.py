"""Stage `finetune`: one expert."""

import json

import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.evaluation import accuracies
from mergeflow.training import TrainingSet, fine_tune
from tasks.runner import StageIO
from tasks.vision import BASE, choose_device, load_encoder, load_images


def run(io: StageIO) -> None:
    """Write `outputs/experts/<task>`: the expert's image encoder and `training.json`, its trajectory."""
    task, settings, device = io.item, io.section("finetune"), choose_device(io)
    batch_size = io.section("evaluation").batch_size
    torch.manual_seed(io.params.seed)
    encoder = load_encoder(io, BASE, device)
    train, validation = (load_images(io, split, task, device) for split in ("train", "validation"))

    def validate() -> float:
        return accuracies(encoder, {task: validation}, batch_size)[task]

    trajectory = fine_tune(
        encoder,
        train.head.logits,
        TrainingSet(task, train.images, train.labels),
        settings,
        io.section("seed"),
        io.scratch / "training_state.pt",
        validate,
        lambda done, total: io.report("steps", done, total),
    )
    folder = io.out(f"outputs/experts/{task}")
    folder.mkdir()
    record = {
        "task": task,
        "role": "expert",
        "architecture": io.section("model").architecture,
        "settings": settings.model_dump_json(),
        "seed": str(io.params.seed),
    }
    fingerprint = write_checkpoint(folder / "image_encoder.safetensors", encoder.encoder_state(), record)
    summary = {
        "task": task,
        "fingerprint": fingerprint,
        "settings": settings.model_dump(),
        "steps": trajectory.rows[-1].steps,
        "images": len(train.labels),
        "validation_accuracy": trajectory.rows[-1].validation_accuracy,
        "epochs": trajectory.as_json()["rows"],
    }
    (folder / "training.json").write_text(json.dumps(summary, indent=1) + "\n")
