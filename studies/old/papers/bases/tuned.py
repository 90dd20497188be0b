"""What is tuned from a base: one expert for each task, and MIMA's merge, by the library's own training loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.evaluation import accuracies
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Model
from mergeflow.training import FineTuneSettings, IterativeRun, fine_tune

State = dict[str, Tensor]


@dataclass(frozen=True)
class Bench:
    """A base and the tasks, judged with the heads of the base's own text tower.

    Attributes:
        model: What weights are loaded into.
        base: θ0.
        train: Training examples by task.
        validation: Validation examples by task.
        folder: Of this base, in the stage's scratch.
    """

    model: Model
    base: State
    train: Mapping[str, Classification]
    validation: Mapping[str, Classification]
    folder: Path


def experts(
    bench: Bench, settings: FineTuneSettings, seed: int, report: Callable[[int, int], None]
) -> dict[str, State]:
    """Return θ_t of every task; those that are kept are not tuned again.

    Args:
        bench: the base and the tasks.
        settings: of the fine-tuning.
        seed: of the order of the batches.
        report: called with the tasks done and in all.
    """
    found = {}
    for done, (task, data) in enumerate(bench.train.items()):
        report(done, len(bench.train))
        path = bench.folder / f"seed_{seed}" / f"{task}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            bench.model.load(bench.base)
            fine_tune(bench.model, [data], settings, seed, path.with_suffix(".resume"), lambda: 0.0)
            write_checkpoint(path, bench.model.state())
        found[task] = read_state(path)
    return found


def merged_in_rounds(bench: Bench, settings: FineTuneSettings, seed: int, report: Callable[[int, int], None]) -> State:
    """Return MIMA's last average; rounds and tasks that are kept are not tuned again.

    Args:
        bench: the base and the tasks.
        settings: with `regime="iterative"`.
        seed: of the order of the batches.
        report: called with the rounds done and in all.
    """
    base = bench.folder / "tower.safetensors"
    if not base.exists():
        write_checkpoint(base, bench.base)
    run = IterativeRun(bench.folder / f"mima_{seed}", base, tuple(bench.train), settings, seed)
    for number in range(1, run.rounds + 1):
        report(number - 1, run.rounds)
        for task in run.waiting(number):
            judged = {task: bench.validation[task]}
            run.tune(number, bench.model, bench.train[task], lambda j=judged, t=task: accuracies(bench.model, j)[t])  # type: ignore[misc]
        run.merge(number)
    return read_state(run.merged(run.rounds))


def class_means(bench: Bench, state: State, task: str) -> Tensor:
    """Return the mean feature of each class on validation images, float64 [C, D], on the processor.

    Args:
        bench: the base and the tasks.
        state: the weights.
        task: whose images.
    """
    data = bench.validation[task]
    bench.model.load(state)
    with torch.inference_mode():
        parts = [data.embeddings(bench.model, rows) for rows in torch.arange(len(data)).split(256)]
    features = torch.cat(parts).double()
    there = data.labels.unique()
    return torch.stack([features[data.labels == label].mean(dim=0) for label in there]).cpu()
