"""How one model does on many tasks' examples: score by example, accuracy and loss by task; files of scores."""

import io
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mergeflow.merging.execution.device import has_room
from mergeflow.modalities.classification import resident
from mergeflow.modality import Examples, Model, device_of, prefetch
from mergeflow.training.arithmetic import forward_in
from mergeflow.training.compiling import Forward
from mergeflow.training.settings import Precision


@torch.inference_mode()
def example_scores(
    model: Model, examples: Examples, batch_size: int = 256, precision: Precision = "float32", pad: bool = False
) -> np.ndarray:
    """Return each example's score, [N], in the split's order, whose mean is the task's figure.

    Of classes it is 1 where right, else 0, in float32. Of another metric than the accuracy it is the figure and the
    example's influence on it, in float64.

    Args:
        batch_size: examples per forward pass; only rounding depends on it.
        pad: whether the last batch is made as large as the others, so that a compiled model needs no graph for it.
    """
    with forward_in(precision, device_of(model)):
        outcomes = [examples.scores(model, rows) for rows in _prefetched(examples, batch_size, pad)]
    scores = torch.cat(outcomes)[: len(examples)].cpu().numpy()
    return scores if examples.metric is None else examples.metric.shares(scores)


def accuracies(
    model: Model, tasks: Mapping[str, Examples], batch_size: int = 256, precision: Precision = "float32"
) -> dict[str, float]:
    """Return each task's accuracy, the mean of its scores, in [0, 1]; or its figure by another metric, at most 1."""
    return {task: _mean(example_scores(model, examples, batch_size, precision)) for task, examples in tasks.items()}


def _mean(scores: np.ndarray) -> float:
    return float(scores.mean(dtype=np.float64))


@torch.inference_mode()
def losses(
    model: Model, tasks: Mapping[str, Examples], batch_size: int = 256, precision: Precision = "float32"
) -> dict[str, float]:
    """Return each task's mean loss L_t; of classes the cross-entropy in nats. A multi-task loss is Σ_t L_t."""
    means = {}
    for task, examples in tasks.items():
        with forward_in(precision, device_of(model)):
            batches = _prefetched(examples, batch_size)
            total = sum(examples.loss(model, rows).double() * len(rows) for rows in batches)  # read once, at the end
        means[task] = float(total) / len(examples)
    return means


class Judge:
    """A model and how it is judged, as the section `evaluation` of params.yaml says it.

    From their second pass on, inputs stay on a CUDA device that has room for them beside what the first pass took.

    Args:
        model: Its weights may change between two calls.
        batch_size: Examples per forward pass; only rounding depends on it.
        compile: Whether these go through torch.compile, or without it where it fails. Scores of inputs of one shape
            take one graph, losses another one for the last batches.
    """

    def __init__(
        self, model: Model, batch_size: int = 256, precision: Precision = "float32", compile: bool = False
    ) -> None:
        self._forward = Forward(model, compile, "evaluation.compile")
        self._batch_size, self._precision = batch_size, precision
        self._judged: dict[int, tuple[weakref.ref[Examples], Examples | None]] = {}  # by id; copies on the card

    def scores(self, examples: Examples) -> np.ndarray:
        """Return each example's score, [N], as `example_scores`."""
        placed, settings = self._placed(examples), (self._batch_size, self._precision, self._forward.compiled)
        return self._forward.run(lambda model: example_scores(model, placed, *settings))

    def accuracies(self, tasks: Mapping[str, Examples]) -> dict[str, float]:
        return {task: _mean(self.scores(examples)) for task, examples in tasks.items()}

    def losses(self, tasks: Mapping[str, Examples]) -> dict[str, float]:
        placed = {task: self._placed(examples) for task, examples in tasks.items()}
        return self._forward.run(lambda model: losses(model, placed, self._batch_size, self._precision))

    def _placed(self, examples: Examples) -> Examples:
        # What nothing else uses is forgotten with its copy: an id is free for other examples then.
        self._judged = {key: pair for key, pair in self._judged.items() if pair[0]() is not None}
        placed = examples
        if id(examples) in self._judged:
            copy = self._judged[id(examples)][1]
            placed = resident(examples if copy is None else copy, has_room)
        self._judged[id(examples)] = weakref.ref(examples), None if placed is examples else placed
        return placed


def _prefetched(examples: Examples, size: int, pad: bool = False) -> Iterator[Tensor]:
    """Yield the rows in batches, the next one already on its way; with `pad` the last row fills the last batch up."""
    count = len(examples)
    padded = -(-count // size) * size if pad else count
    batches = [rows.clamp(max=count - 1) for rows in torch.arange(padded).split(size)]
    for rows, coming in zip_longest(batches, batches[1:]):
        if coming is not None:
            prefetch(examples, coming)
        yield rows


# Scores example by example, in a file of NumPy's format `.npz`.


def write_scores(path: Path, scores: Mapping[str, np.ndarray]) -> None:
    """Write the scores of each task; the same scores are the same bytes whatever Python and NumPy write them.

    `numpy.savez` leaves the version of the format in the file's headers to Python, and releases of one Python differ.

    Args:
        scores: task → float32 [n] in [0, 1], in the split's order.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for task, values in scores.items():
            content = io.BytesIO()
            np.save(content, values, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{task}.npy"), content.getvalue())


def read_scores(path: Path) -> dict[str, np.ndarray]:
    """Read the scores that `write_scores` or `numpy.savez` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)
