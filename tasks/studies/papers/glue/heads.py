"""Trained heads of a study: those that a run left, those fitted to a merge's features, and scores with either."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mergeflow import layout
from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import Head
from mergeflow.modality import Examples
from tasks.models import modality_of
from tasks.studies.inputs import Accuracy, State, StudyInputs
from tasks.training import head_file

Heads = Mapping[str, dict[str, Tensor]]
"""By task the weights of its head."""


def trained_jointly(inputs: StudyInputs, run: str, seed: int) -> bool:
    """Return whether a training run made one model for all tasks.

    Args:
        inputs: the study's inputs.
        run: its name.
        seed: of the run.
    """
    return (_folder(inputs, run, seed) / "model").exists()


def left_heads(inputs: StudyInputs, run: str, seed: int) -> Heads:
    """Return the heads of a training run.

    Args:
        inputs: the study's inputs.
        run: its name.
        seed: of the run.
    """
    folder = _folder(inputs, run, seed)
    if trained_jointly(inputs, run, seed):
        return {task: read_state(head_file(folder / "model", inputs.tasks, task)) for task in inputs.tasks}
    return {task: read_state(folder / "experts" / task / layout.HEAD_FILE) for task in inputs.tasks}


def _folder(inputs: StudyInputs, run: str, seed: int) -> Path:
    return inputs.io.dep(layout.study_run(run)) / f"seed_{seed}"


@torch.no_grad()
def put_on(inputs: StudyInputs, split: str, heads: Heads) -> None:
    """Judge a split with these heads from now on.

    Args:
        inputs: the study's inputs, whose examples stay as they are.
        split: train, validation or test.
        heads: of every task.
    """
    for task, examples in inputs.examples(split).items():
        _head(task, examples).load_state_dict(heads[task])


def judged(inputs: StudyInputs, heads: Heads, state: State, split: str, tasks: Sequence[str] | None = None) -> Accuracy:
    """Return the figure of each task, a fraction in [−1, 1], of a model whose features these heads read.

    Args:
        inputs: the study's inputs.
        heads: of every task.
        state: the model's weights.
        split: train, validation or test.
        tasks: those to look at; all of the study by default.
    """
    put_on(inputs, split, heads)
    return inputs.accuracy(state, split, tasks)


def probed_heads(inputs: StudyInputs, state: State) -> Heads:
    """Return heads that are fitted to the features that a model gives for the training examples.

    Args:
        inputs: the study's inputs.
        state: the model's weights.

    Raises:
        MergeflowError: the project's tasks have no trained heads.
    """
    warm = modality_of(inputs.io).warm
    if warm is None:
        raise MergeflowError("the study glue fits heads, but the tasks of this modality have none that are trained.")
    section = inputs.io.section("model").model_copy(update={"head": "probed"})
    inputs.model.load(state)
    found = {}
    for task, examples in inputs.examples("train").items():
        warm(section, inputs.model, examples)
        found[task] = {name: value.detach().clone() for name, value in _head(task, examples).state_dict().items()}
    return found


def _head(task: str, examples: Examples) -> Head:
    if not isinstance(examples.head, Head) or not examples.head.trained:
        raise MergeflowError(f"task '{task}' has no trained head: the study glue is of encoders with a head a task.")
    return examples.head
