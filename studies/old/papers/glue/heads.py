"""Trained heads of a study: those that a run left, and those fitted to a merge's features."""

from pathlib import Path

from mergeflow import layout
from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from studies.lab.inputs import Heads, Laboratory, State
from tasks.models import modality_of
from tasks.training import head_file


def trained_jointly(inputs: Laboratory, run: str, seed: int) -> bool:
    """Return whether a training run made one model for all tasks.

    Args:
        inputs: the study's inputs.
        run: its name.
        seed: of the run.
    """
    return (_folder(inputs, run, seed) / "model").exists()


def left_heads(inputs: Laboratory, run: str, seed: int) -> Heads:
    """Return the heads of a training run.

    Args:
        inputs: the study's inputs.
        run: its name.
        seed: of the run.
    """
    folder = _folder(inputs, run, seed)
    if trained_jointly(inputs, run, seed):
        return {task: read_state(head_file(folder / "model", inputs.tasks, task)) for task in inputs.tasks}
    return inputs.run(run).heads(seed)


def _folder(inputs: Laboratory, run: str, seed: int) -> Path:
    return inputs.io.dep(layout.study_run(run)) / f"seed_{seed}"


def probed_heads(inputs: Laboratory, state: State) -> Heads:
    """Return heads that are fitted to the features that a model gives for the training examples.

    Args:
        inputs: the study's inputs, with heads.
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
    # The probe overwrites the heads that it is given: those of a copy.
    copied = inputs.with_heads(inputs.heads)
    for task, examples in copied.examples("train").items():
        warm(section, inputs.model, examples)
        assert examples.head is not None
        found[task] = {name: value.detach().clone() for name, value in examples.head.state_dict().items()}
    return found
