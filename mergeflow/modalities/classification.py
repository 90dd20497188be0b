"""Examples with one label or one number each, judged by a model's features and a head.

They are images, texts or rows of numbers; batches of images go to a CUDA device while it computes those before.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from mergeflow.data import load_split
from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import Head
from mergeflow.modalities.modules import activations
from mergeflow.modality import Examples, Metric, Model

_copying: dict[torch.device, Any] = {}  # one stream a device

Gather = Callable[[Tensor], tuple[Tensor, ...]]


class Ahead:
    """What was asked for before it is needed: rows, gathered by a thread of their own.

    Args:
        gather: Rows to tensors; it runs in another thread.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._coming: list[tuple[Tensor, Future[tuple[Tensor, ...]]]] = []

    def expect(self, rows: Tensor) -> None:
        """Begin to gather rows, int64 [n]. The same tensor object has to be taken later; the two last ones are kept."""
        self._coming = [*self._coming[-1:], (rows, _gatherer().submit(self._gather, rows))]

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the batch of these rows, int64 [n], gathered before or now; each tensor is [n, ...]."""
        for place, (expected, coming) in enumerate(self._coming):
            if expected is rows:
                del self._coming[: place + 1]
                return coming.result()
        return self._gather(rows)


@cache
def _gatherer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "gather")


def pinned_rows(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, ...] of a tensor and their numbers [n] in memory that a device reads without another copy."""
    room = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
    numbers = torch.empty(len(rows), dtype=rows.dtype, pin_memory=True)
    return torch.index_select(values, 0, rows, out=room), numbers.copy_(rows)


def carry(batch: Tensor, device: torch.device) -> Tensor:
    """Copy pinned memory [n, ...] to a CUDA device on a stream of its own; what computes with it waits for it."""
    if device not in _copying:
        _copying[device] = torch.cuda.Stream(device)
    copies, computes = _copying[device], torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        there = batch.to(device, non_blocking=True)
    computes.wait_stream(copies)
    there.record_stream(computes)  # its memory belongs to the stream of copies, which must not reuse it too early
    return there


class Inputs(Protocol):
    """Anything from which rows can be taken: a tensor, or several arrays side by side."""

    def __getitem__(self, rows: Tensor | slice, /) -> Any: ...


Observe = Callable[[nn.Module, Any, Sequence[str]], dict[str, Tensor]]


def _apply(module: nn.Module, inputs: Any) -> Tensor:
    features: Tensor = module(inputs)
    return features


@dataclass(frozen=True)
class Classification:
    """One split of a task whose examples have one label each.

    Attributes:
        inputs: N inputs; they may stay on disk. A batch of a tensor goes to the labels' device, pinned and beside
            what a CUDA device computes; others go to `encode`.
        labels: int64 [N] on the model's device, each below C.
        head: Features [n, D] to logits [n, C], on the model's device; none where the module gives logits.
        encode: Module and inputs to features; a call of the module by default.
        observe: Module, inputs and layers to what these give, where it is not simply their outputs in one call.
        metric: Its figure; None: the accuracy.
    """

    task: str
    inputs: Inputs
    labels: Tensor
    head: nn.Module | None = None
    encode: Callable[[nn.Module, Any], Tensor] = _apply
    observe: Observe | None = None
    metric: Metric | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy over `rows`, in nats: −(1/n) Σ_i log p(y_i | x_i).

        Example:
            >>> from mergeflow.modality import Network
            >>> data = Classification("pets", torch.zeros(2, 3), torch.tensor([0, 1]))
            >>> round(float(data.loss(Network(nn.Identity()), torch.arange(2))), 4)
            1.0986
        """
        inputs, labels = self._batch(rows)
        return cross_entropy(self._logits(model, inputs), labels)

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return 1 where the class with the largest logit is the right one, else 0: float32 [n].

        With a metric return the right class and the one with the largest logit, float64 [n, 2].
        """
        inputs, labels = self._batch(rows)
        answers = self._logits(model, inputs).argmax(dim=1)
        return (answers == labels).float() if self.metric is None else torch.stack([labels, answers], dim=1).double()

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log p(c | x_i), [n, C]."""
        return self.logits(model, rows).log_softmax(dim=1)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the named submodules for `rows`, [n, ...] each."""
        inputs = self._batch(rows)[0]
        if self.observe is not None:
            return self.observe(model.module, inputs, layers)
        return activations(model.module, layers, lambda: self.encode(model.module, inputs))

    def embeddings(self, model: Model, rows: Tensor) -> Tensor:
        """Return the head's inputs for `rows`, [n, D]."""
        return self.encode(model.module, self._batch(rows)[0])

    def prefetch(self, rows: Tensor) -> None:
        """Begin to gather `rows`, int64 [n], for a call after the next one; on the processor do nothing."""
        if self._carried:
            self._ahead.expect(rows)

    @property
    def _carried(self) -> bool:
        """Whether batches go from the processor's memory to a CUDA device."""
        return self.labels.is_cuda and isinstance(self.inputs, Tensor) and self.inputs.device.type == "cpu"

    @cached_property
    def _ahead(self) -> Ahead:
        inputs = self.inputs
        assert isinstance(inputs, Tensor)
        return Ahead(lambda rows: pinned_rows(inputs, rows))

    def _batch(self, rows: Tensor) -> tuple[Any, Tensor]:
        """Return inputs and labels of `rows`."""
        if self._carried:  # the rows too: an index on the processor would make the device wait
            inputs, there = (carry(part, self.labels.device) for part in self._ahead.take(rows))
            return inputs, self.labels[there]
        if isinstance(self.inputs, Tensor):
            # Copies whole rows: 14 times as fast as indexing, for 256 images of 32 pixels a side.
            return self.inputs.index_select(0, rows.to(self.inputs.device)).to(self.labels.device), self.labels[rows]
        return self.inputs[rows], self.labels[rows]

    def logits(self, model: Model, rows: Tensor) -> Tensor:
        """Return the logits [n, C] of `rows`."""
        return self._logits(model, self._batch(rows)[0])

    def _logits(self, model: Model, inputs: Any) -> Tensor:
        features = self.encode(model.module, inputs)
        # Under autocast too: logits have CLIP's temperature of up to 100, in bfloat16 they would be off by a quarter.
        with torch.autocast(features.device.type, enabled=False):
            features = features.float() if features.dtype.itemsize < 4 else features
            return features if self.head is None else self.head(features)


def check_classes(task: str, head: Head | None, class_names: Sequence[str]) -> None:
    """Refuse a head of other classes than the data's."""
    if head is not None and head.class_names != list(class_names):
        raise MergeflowError(
            f"task '{task}': the head has {len(head.class_names)} classes and the data {len(class_names)}, or "
            "their names differ: run `mergeflow run` so that both come from the same manifest."
        )


def open_split(
    array: str, task: str, folder: Path, split: str, head: Head | None, device: torch.device
) -> Classification:
    """Return a prepared split with one label for each example; the inputs stay on disk."""
    data = load_split(folder, split)
    check_classes(task, head, data.class_names)
    labels = torch.from_numpy(data.labels.copy()).to(device)
    return Classification(task, torch.from_numpy(data.arrays[array]), labels, head)


@dataclass(frozen=True)
class Regression:
    """One split of a task whose examples have one number each.

    Attributes:
        numbered: The inputs, the numbers as its labels (floating-point [N], on the model's device), and the head.
    """

    numbered: Classification
    metric: Metric | None

    @property
    def task(self) -> str:
        return self.numbered.task

    @property
    def head(self) -> nn.Module | None:
        return self.numbered.head

    def __len__(self) -> int:
        return len(self.numbered)

    def answers(self, model: Model, rows: Tensor) -> Tensor:
        """Return the model's number for each of `rows`, [n]."""
        return self.numbered.logits(model, rows)[:, 0]

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return the mean squared error over `rows`, a scalar [], in units squared: (1/n) Σ_i (f(x_i) − y_i)²."""
        answers = self.answers(model, rows)
        return mse_loss(answers, self.numbered.labels[rows].to(answers))

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return the right number and the model's for each of `rows`, float64 [n, 2]."""
        answers = self.answers(model, rows).double()
        return torch.stack([self.numbered.labels[rows].to(answers), answers], dim=1)

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        r"""Return log-probabilities, [n, 2], of the two numbers that lie one unit beside the model's own.

        Of a normal distribution around f(x) with variance 1, restricted to f(x) ± 1 as they are: its Fisher information
        is that of the whole distribution, (∇f)², whichever of the two is drawn; its entropy is log 2 and has no
        gradient, as the whole distribution's, so that nothing that lowers entropies moves a regression.
        """
        answers = self.answers(model, rows)
        neighbours = answers.detach()[:, None] + answers.new_tensor([-1.0, 1.0])
        return (-0.5 * (neighbours - answers[:, None]).square()).log_softmax(dim=1)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the named submodules for `rows`, [n, ...] each."""
        return self.numbered.features(model, rows, layers)

    def prefetch(self, rows: Tensor) -> None:
        """Begin to gather `rows`, int64 [n], for a call after the next one."""
        self.numbered.prefetch(rows)


@dataclass(frozen=True)
class Subset:
    """The examples `rows` of others, in that order.

    Attributes:
        chosen: Which of them, int64 [n].
    """

    whole: Examples
    chosen: Tensor

    @classmethod
    def first(cls, examples: Examples, count: int) -> "Subset":
        """Return the first `count` examples, or all where there are fewer.

        A split goes through the classes in turn or in random order, so the first are a fair sample.
        """
        return cls(examples, torch.arange(min(count, len(examples))))

    @property
    def task(self) -> str:
        return self.whole.task

    @property
    def head(self) -> nn.Module | None:
        return self.whole.head

    @property
    def metric(self) -> Metric | None:
        return self.whole.metric

    def __len__(self) -> int:
        return len(self.chosen)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        return self.whole.loss(model, self.chosen[rows])

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        return self.whole.scores(model, self.chosen[rows])

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        return self.whole.log_p(model, self.chosen[rows])

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the named submodules for `rows`, [n, ...] each."""
        return self.whole.features(model, self.chosen[rows], layers)
