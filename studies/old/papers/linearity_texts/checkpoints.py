"""Published checkpoints of an encoder-decoder with texts to look at them on: a base, its experts, a file for each."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from torch import Tensor

from mergeflow.checkpoints import open_checkpoint
from mergeflow.linearity.networks import Opened, open_network
from mergeflow.linearity.pairs import check_related, check_samples
from studies.lab.linear_rows import TunedModels
from tasks.project.sections import Section


class Checkpoints(Section):
    """base: a model folder with config.json. experts: task → checkpoint. texts: task → `text:FILE`, one text a line."""

    base: str
    experts: dict[str, str] = Field(min_length=2)
    texts: dict[str, str]

    @model_validator(mode="after")
    def _same(self) -> Self:
        if set(self.experts) != set(self.texts):
            raise ValueError(
                f"names experts {', '.join(sorted(self.experts))} and texts of {', '.join(sorted(self.texts))}: "
                "expected the same tasks"
            )
        return self


def open_checkpoints(asked: Checkpoints, root: Path, count: int) -> TunedModels:
    """Return the models and the first texts of each task.

    Args:
        asked: where they are.
        root: the folder that relative paths begin at.
        count: texts of each task.

    Raises:
        MergeflowError: a file is not there or does not fit, an expert is of another base, or there are too few texts.
    """
    base = root / asked.base
    opened = open_network(str(base), {})
    start = _read(opened, base)
    tuned = {task: _read(opened, root / path) for task, path in asked.experts.items()}
    check_related(start, tuned)
    texts = {
        task: opened.read(f"text:{root / path.removeprefix('text:')}", count) for task, path in asked.texts.items()
    }
    check_samples(texts)
    return TunedModels(opened.model, start, tuned, texts)


def _read(opened: Opened, path: Path) -> dict[str, Tensor]:
    with open_checkpoint(path) as state:
        return opened.weights(str(path), {name: state[name].clone() for name in state})
