"""Train experts on the project's tasks, in every regime; shared by the stages, the studies and `mergeflow finetune`."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.evaluation import LabelledImages, accuracies
from mergeflow.evaluation.accuracy import Encoder
from mergeflow.modalities.vision.models import ImageEncoder
from mergeflow.training import (
    Cost,
    FineTuneSettings,
    IterativeRun,
    LinearisedEncoder,
    LoraEncoder,
    TrainingSet,
    fine_tune,
)
from tasks.project.stage import StageIO
from tasks.vision import BASE, choose_device, load_encoder, load_images

Report = Callable[[int, int], None]
State = dict[str, torch.Tensor]
Tuned = ImageEncoder | LinearisedEncoder | LoraEncoder


@dataclass(frozen=True)
class Workbench:
    """What training needs of the project: the base, and a task's images on the device."""

    io: StageIO
    device: torch.device

    @classmethod
    def open(cls, io: StageIO) -> "Workbench":
        return cls(io, choose_device(io))

    def encoder(self) -> ImageEncoder:
        """Return a new image encoder with the base's weights."""
        return load_encoder(self.io, self.io.path(BASE), self.device)

    def images(self, task: str, split: str) -> LabelledImages:
        return load_images(self.io, split, task, self.device)

    def training_set(self, task: str) -> TrainingSet:
        data = self.images(task, "train")
        return TrainingSet(task, data.images, data.labels, data.head.logits)

    def validation(self, tasks: Sequence[str]) -> Callable[[Encoder], float]:
        """Return what computes an encoder's validation accuracy, the mean over `tasks`."""
        data = {task: self.images(task, "validation") for task in tasks}
        batch_size = self.io.section("evaluation").batch_size
        return lambda encoder: sum(accuracies(encoder, data, batch_size).values()) / len(data)


def train(
    bench: Workbench,
    tasks: Sequence[str],
    settings: FineTuneSettings,
    seed: int,
    scratch: Path,
    folder: Path,
    report: Report = lambda done, total: None,
) -> Cost:
    """Train one model in any regime but `iterative`: one task's expert, or with `joint` one model for several tasks.

    Args:
        bench: base and data.
        tasks: one task; several for `joint`.
        settings: the regime and its settings.
        seed: of the batch order and of new weights.
        scratch: folder for the resumable state; a killed run continues from it.
        folder: made, with `image_encoder.safetensors`, `training.json` and, by regime, `adapter/` and `epochs/`.
        report: called as `report(steps done, all steps)`.

    Returns:
        What it cost.

    Raises:
        MergeflowError: a task has no images, or the loss is no longer finite.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    encoder, validate = bench.encoder(), bench.validation(tasks)
    tuned = _tuned(encoder, settings, seed).to(bench.device)
    outcome = fine_tune(
        tuned,
        [bench.training_set(task) for task in tasks],
        settings,
        seed,
        scratch / "training_state.pt",
        lambda: validate(tuned),
        report,
        each_epoch=_keeper(tuned, scratch / "epochs") if settings.keep_epochs else lambda epoch: None,
    )
    folder.mkdir(parents=True)
    if settings.keep_epochs:
        shutil.copytree(scratch / "epochs", folder / "epochs")  # a run killed from here on needs them again
    if isinstance(tuned, LoraEncoder):
        tuned.save(folder / "adapter")
    state, extra = tuned.encoder_state(), dict[str, Any]()
    if settings.regime == "linearised":  # the expert's weights in the network that is not linearised
        encoder.load_encoder_state(state)
        extra["validation_accuracy_nonlinear"] = validate(encoder)
    rows = outcome.trajectory.as_json()
    write_expert(bench, folder, tasks, state, settings, seed, rows, extra)
    return outcome.cost


def write_expert(
    bench: Workbench,
    folder: Path,
    tasks: Sequence[str],
    state: State,
    settings: FineTuneSettings,
    seed: int,
    rows: list[dict[str, Any]],
    extra: dict[str, Any],
) -> None:
    """Write an expert's image encoder and `training.json`, its settings and trajectory."""
    name = ",".join(tasks)
    record = {
        "task": name,
        "role": "expert",
        "architecture": bench.io.choice("model").architecture,
        "settings": settings.model_dump_json(),
        "seed": str(seed),
    }
    fingerprint = write_checkpoint(folder / "image_encoder.safetensors", state, record)
    summary = {
        "task": name,
        "fingerprint": fingerprint,
        "settings": settings.model_dump(),
        "seed": seed,
        "steps": rows[-1]["steps"],
        "images": sum(len(bench.images(task, "train").labels) for task in tasks),
        "validation_accuracy": rows[-1]["validation_accuracy"],
        **extra,
        "epochs": rows,
    }
    (folder / "training.json").write_text(json.dumps(summary, indent=1) + "\n")


def tune_round(bench: Workbench, run: IterativeRun, number: int, task: str, report: Report) -> None:
    """Tune one task in one round of an iterative run."""
    encoder, validate = bench.encoder(), bench.validation([task])
    run.tune(number, encoder, bench.training_set(task), lambda: validate(encoder), report)


def write_last_round(bench: Workbench, run: IterativeRun, folder: Path) -> Cost:
    """Write every task's last expert below `folder`, its trajectory that of all rounds; return the whole cost."""
    total = Cost()
    for task in run.tasks:
        target = folder / task
        target.mkdir(parents=True)
        records = [run.record(number, task) for number in range(1, run.rounds + 1)]
        rows = [{**row, "round": record["round"]} for record in records for row in record["epochs"]]
        with open_checkpoint(run.expert(run.rounds, task)) as state:
            tensors = {name: state[name].clone() for name in state}
        write_expert(bench, target, [task], tensors, run.settings, run.seed, rows, {})
        total = sum((_cost(record["cost"]) for record in records), total)
    return total


def _tuned(encoder: ImageEncoder, settings: FineTuneSettings, seed: int) -> Tuned:
    """Return what the regime trains: the encoder itself, or the encoder with what is trained in its place."""
    if settings.regime == "lora":
        return LoraEncoder(encoder, settings.lora, seed)
    return LinearisedEncoder(encoder) if settings.regime == "linearised" else encoder


def _cost(record: dict[str, Any]) -> Cost:
    return Cost(**{name: value for name, value in record.items() if name != "images_per_second"})


def _keeper(encoder: Tuned, folder: Path) -> Callable[[int], None]:
    def keep(epoch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder / f"epoch_{epoch:03}.safetensors", encoder.encoder_state())

    return keep
