"""Train experts on the project's tasks, in every regime; shared by the stages, the studies and `mergeflow finetune`."""

import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mergeflow import layout
from mergeflow.checkpoints import write_checkpoint
from mergeflow.documents import Training, write_document
from mergeflow.evaluation import accuracies
from mergeflow.modalities.heads import Head, save_head
from mergeflow.modality import Examples, Model
from mergeflow.training import (
    Cost,
    FineTuneSettings,
    LinearisedModel,
    LoraModel,
    fine_tune,
)
from mergeflow.training.loop import is_trained
from tasks.models import choose_device, load_base_head, load_examples, load_model, modality_of
from tasks.project.stage import StageIO

Report = Callable[[int, int], None]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Workbench:
    """What training needs of the project: the base, and a task's examples on the device.

    A task has one head for all its splits: validation judges with what training has made of it.

    Attributes:
        heads: of the tasks that were opened, as they are now.
        fitted: the same as training starts from them.
    """

    io: StageIO
    device: torch.device
    heads: dict[str, Head | None] = field(default_factory=dict)
    fitted: dict[str, Head | None] = field(default_factory=dict)

    @classmethod
    def open(cls, io: StageIO) -> "Workbench":
        return cls(io, choose_device(io))

    def renewed(self) -> "Workbench":
        """Return the same for another run of the same tasks, whose heads are as training starts from them."""
        return replace(self, heads={})

    def model(self) -> Model:
        return load_model(self.io, layout.BASE_MODEL, self.device)

    def examples(self, task: str, split: str = "train") -> Examples:
        return load_examples(self.io, split, task, self.device, self.head(task))

    def head(self, task: str) -> Head | None:
        """Return a task's head as training starts from it; the modality may fit it to the base's features."""
        if task not in self.fitted:
            head, warm = load_base_head(self.io, task, self.device), modality_of(self.io).warm
            if warm is not None and is_trained(head):
                training = load_examples(self.io, "train", task, self.device, head)
                warm(self.io.section("model"), self.model(), training)
            self.fitted[task] = head
        if task not in self.heads:
            self.heads[task] = deepcopy(self.fitted[task])
        return self.heads[task]

    def validation(self, tasks: Sequence[str]) -> Callable[[Model], float]:
        """Return a function that computes a model's validation accuracy, the mean over `tasks`."""
        data = {task: self.examples(task, "validation") for task in tasks}
        judging = self.io.section("evaluation")
        judged = partial(accuracies, tasks=data, batch_size=judging.batch_size, precision=judging.precision)
        return lambda model: sum(judged(model).values()) / len(data)


def train_in_stage(io: StageIO, tasks: Sequence[str], folder: Path) -> None:
    """Train one model by the settings of a stage, and note what it cost."""

    def report(done: int, total: int) -> None:
        io.report("steps", done, total)

    settings, seed = io.section("finetune"), io.section("seed")
    cost = train(Workbench.open(io), tasks, settings, seed, io.scratch / "training", folder, report)
    io.costs["training"] = cost.as_json()


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
        scratch: folder for the resumable state; a killed run continues from it.
        folder: made, with `model.safetensors`, the heads, `training.json` and, by regime, `adapter/` and `epochs/`.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    base, validate = bench.model(), bench.validation(tasks)
    tuned = tuned_model(base, settings, seed, modality_of(bench.io).tower(bench.io.section("model")))
    outcome = fine_tune(
        tuned,
        [bench.examples(task) for task in tasks],
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
    if isinstance(tuned, LoraModel):
        tuned.module.save(folder / "adapter")
    state, nonlinear = tuned.state(), None
    if settings.regime == "linearised":  # the expert's weights in the network that is not linearised
        base.load(state)
        nonlinear = validate(base)
    write_expert(bench, folder, tasks, state, settings, seed, outcome.trajectory.as_json(), nonlinear)
    return outcome.cost


def write_expert(
    bench: Workbench,
    folder: Path,
    tasks: Sequence[str],
    state: State,
    settings: FineTuneSettings,
    seed: int,
    rows: list[dict[str, Any]],
    nonlinear: float | None = None,
) -> None:
    """Write an expert's weights, its head or those of its tasks, and `training.json`, its settings and trajectory.

    Args:
        folder: made by the caller, empty of these files.
        nonlinear: validation accuracy of the network that is not linearised, for that regime.
    """
    name = ",".join(tasks)
    record = {
        "task": name,
        "role": "expert",
        **{key: str(value) for key, value in bench.io.section("model").model_dump().items()},
        "settings": settings.model_dump_json(),
        "seed": str(seed),
    }
    fingerprint = write_checkpoint(folder / layout.MODEL_FILE, state, record)
    for task in tasks:
        if (head := bench.examples(task).head) is not None:
            assert isinstance(head, Head)
            path = head_file(folder, tasks, task)
            path.parent.mkdir(exist_ok=True)
            save_head(head, path)
    summary: Training = {
        "task": name,
        "fingerprint": fingerprint,
        "settings": settings.model_dump(),
        "seed": seed,
        "steps": rows[-1]["steps"],
        "examples": sum(len(bench.examples(task)) for task in tasks),
        "validation_accuracy": rows[-1]["validation_accuracy"],
        "epochs": rows,
    }
    if nonlinear is not None:
        summary["validation_accuracy_nonlinear"] = nonlinear
    write_document(folder / layout.TRAINING_FILE, summary)


def head_file(folder: Path, tasks: Sequence[str], task: str) -> Path:
    return folder / layout.HEAD_FILE if len(tasks) == 1 else folder / "heads" / f"{task}.safetensors"


def tuned_model(base: Model, settings: FineTuneSettings, seed: int, tower: str) -> Model:
    """Return the module that the regime trains: the base itself, or the base with adapters or linearised."""
    if settings.regime == "lora":
        return LoraModel.of(base, settings.lora, seed)
    return LinearisedModel.of(base, tower) if settings.regime == "linearised" else base


def _keeper(model: Model, folder: Path) -> Callable[[int], None]:
    def keep(epoch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder / f"epoch_{epoch:03}.safetensors", model.state())

    return keep
