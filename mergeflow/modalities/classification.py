"""Examples with one label or number each, judged by a model's features and a head; heads can be fitted.

They are images, texts or rows of numbers; batches of images go to a CUDA device while it computes those before.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import call
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from mergeflow.data import load_split
from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import Head
from mergeflow.modalities.metrics import standardised
from mergeflow.modalities.modules import activations, likeliest
from mergeflow.modality import Examples, Metric, Model, device_of

_copying: dict[torch.device, Any] = {}  # one stream a device

Gather = Callable[[Tensor], tuple[Tensor, ...]]


class Ahead:
    """Gathers rows in a thread before they are needed."""

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


def pinned_rows(values: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers [n] of rows in memory that a device reads without another copy, and rows of the processor."""
    numbers = torch.empty(len(rows), dtype=rows.dtype, pin_memory=True).copy_(rows)
    if values.is_cuda:
        return (numbers,)
    room = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
    return numbers, torch.index_select(values, 0, rows, out=room)


def carry(batch: Tensor, device: torch.device) -> Tensor:
    """Copy pinned memory [n, ...] to a CUDA device on a stream of its own; what computes with it waits for it."""
    if device not in _copying:
        _copying[device] = torch.cuda.Stream(device)
    copies, computes = _copying[device], torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        carried = batch.to(device, non_blocking=True)
    computes.wait_stream(copies)
    carried.record_stream(computes)  # its memory belongs to the stream of copies, which must not reuse it too early
    return carried


class Inputs(Protocol):
    """Anything from which rows can be taken: a tensor, or several arrays side by side."""

    def __getitem__(self, rows: Tensor | slice, /) -> Any: ...


@dataclass(frozen=True)
class Labelled:
    """One split of a task whose examples have one label or number each.

    Attributes:
        inputs: N inputs; they may stay on disk. A batch of a tensor is copied to the labels' device, pinned and
            while a CUDA device computes; other batches go to `encode`.
        labels: On the model's device: classes below C, int64 [N], or numbers, floating-point [N].
        head: Features [n, D] to outputs [n, C] or [n, 1], on the model's device; none where the module gives these.
        encode: Module and inputs to features; a call of the module by default.
        observe: Module, inputs and layers to what these give, where it is not simply their outputs in one call.
        metric: Its figure; None: the accuracy.
    """

    task: str
    inputs: Inputs
    labels: Tensor
    head: nn.Module | None = None
    encode: Callable[[nn.Module, Any], Tensor] = call
    observe: Callable[[nn.Module, Any, Sequence[str]], dict[str, Tensor]] | None = None
    metric: Metric | None = None

    def __len__(self) -> int:
        return len(self.labels)

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
        if self.labels.is_cuda and isinstance(self.inputs, Tensor):
            self._ahead.expect(rows)

    @cached_property
    def _ahead(self) -> Ahead:
        inputs = self.inputs
        assert isinstance(inputs, Tensor)
        return Ahead(lambda rows: pinned_rows(inputs, rows))

    def _batch(self, rows: Tensor) -> tuple[Any, Tensor]:
        """Return inputs and labels of `rows`."""
        if not isinstance(self.inputs, Tensor):
            return self.inputs[rows], self.labels[rows]
        if self.labels.is_cuda:  # the rows go there too: an index on the processor would make the device wait
            indices, *inputs = (carry(part, self.labels.device) for part in self._ahead.take(rows))
            return inputs[0] if inputs else self.inputs.index_select(0, indices), self.labels[indices]
        # Copies whole rows: 14 times as fast as indexing, for 256 images of 32 pixels a side.
        return self.inputs.index_select(0, rows.to(self.inputs.device)).to(self.labels.device), self.labels[rows]

    def _judged(self, model: Model, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [n, ...] for `rows`, and what is right."""
        inputs, right = self._batch(rows)
        features = self.encode(model.module, inputs)
        # Under autocast too: logits have CLIP's temperature of up to 100, in bfloat16 they would be off by a quarter.
        with torch.autocast(features.device.type, enabled=False):
            features = features.float() if features.dtype.itemsize < 4 else features
            return features if self.head is None else self.head(features), right


class Classification(Labelled):
    """One split of a task whose examples have one class each."""

    def logits(self, model: Model, rows: Tensor) -> Tensor:
        """Return the logits [n, C] of `rows`."""
        return self._judged(model, rows)[0]

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy over `rows`, a scalar [], in nats: −(1/n) Σ_i log p(y_i | x_i)."""
        return cross_entropy(*self._judged(model, rows))

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return 1 where the class with the largest logit is the right one, else 0: float32 [n].

        With a metric return the right class and the one with the largest logit, float64 [n, 2].
        """
        logits, labels = self._judged(model, rows)
        answers = likeliest(logits)
        return (answers == labels).float() if self.metric is None else torch.stack([labels, answers], dim=1).double()

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log p(c | x_i), [n, C]."""
        return self.logits(model, rows).log_softmax(dim=1)


def check_classes(
    task: str,
    head: Head | None,
    class_names: Sequence[str],
    way_out: str = "Run `mergeflow run` so that both come from the same manifest.",
) -> None:
    """Refuse a head of other classes than the data's."""
    if head is None or (given := head.class_names) == list(class_names):
        return
    pairs = (f": {a!r} / {b!r} (head / data)" for a, b in zip(given, class_names, strict=False) if a != b)
    counts = f"the head has {len(given)} classes and the data {len(class_names)}"
    raise MergeflowError(f"task '{task}': {counts}{next(pairs, '')}. {way_out}")


def open_split(
    array: str, task: str, folder: Path, split: str, head: Head | None, device: torch.device
) -> Classification:
    """Return a prepared split with one label for each example; the inputs stay on disk."""
    data = load_split(folder, split)
    check_classes(task, head, data.class_names)
    labels = torch.from_numpy(data.labels.copy()).to(device)
    return Classification(task, torch.from_numpy(data.arrays[array]), labels, head)


class Regression(Labelled):
    """One split of a task whose examples have one number each."""

    def answers(self, model: Model, rows: Tensor) -> Tensor:
        """Return the model's number for each of `rows`, [n]."""
        return self._judged(model, rows)[0][:, 0]

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return the mean squared error over `rows`, a scalar [], in units squared: (1/n) Σ_i (f(x_i) − y_i)²."""
        outputs, right = self._judged(model, rows)
        return mse_loss(outputs[:, 0], right.to(outputs))

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return the right number and the model's for each of `rows`, float64 [n, 2]."""
        outputs, right = self._judged(model, rows)
        return torch.stack([right.double(), outputs[:, 0].double()], dim=1)

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        r"""Return log-probabilities, [n, 2], of the numbers one unit below and above the model's answer.

        Of a normal distribution around f(x) with variance 1, restricted to f(x) ± 1 as they are: its Fisher information
        is that of the whole distribution, (∇f)², whichever of the two is drawn; its entropy is log 2 and has no
        gradient, as the whole distribution's, so that nothing that lowers entropies moves a regression.
        """
        answers = self.answers(model, rows)
        neighbours = answers.detach()[:, None] + answers.new_tensor([-1.0, 1.0])
        return (-0.5 * (neighbours - answers[:, None]).square()).log_softmax(dim=1)


@dataclass(frozen=True)
class Subset:
    """The examples `chosen`, int64 [n], of others, in that order."""

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
        return self.whole.features(model, self.chosen[rows], layers)


def resident(examples: Examples, fits: Callable[[torch.device, int], bool]) -> Examples:
    """Return examples whose inputs stay on the device of their labels, if they fit there; others as they are.

    Args:
        fits: Whether a device has room for so many bytes.
    """
    if isinstance(examples, Subset):
        return replace(examples, whole=resident(examples.whole, fits))
    if isinstance(examples, Labelled) and isinstance(examples.inputs, Tensor):
        inputs, device = examples.inputs, examples.labels.device
        if inputs.device != device and fits(device, inputs.nbytes):
            return replace(examples, inputs=inputs.to(device))
    return examples


Fold = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
MOST = 10_000  # examples: more move a linear head on some hundred features by less than its training does
_BATCH = 256
_ROUNDING = 1e-6  # of a feature's largest value, or of the middle spread: what float32 leaves of a constant
_SMALLEST = 1e-19  # its square is nothing in float32, in which heads are trained


def warm(section: Any, model: Model, examples: Examples) -> None:
    """Fit a task's head on the features of the base, where params.yaml says `head: probed`."""
    if section.head == "probed":
        assert isinstance(examples, Labelled)
        probe(model, examples)


@torch.no_grad()
def probe(model: Model, examples: Labelled) -> None:
    """Fit the trained head of training examples in place, to the features that a model gives."""
    head, targets = examples.head, examples.labels.cpu().numpy()
    assert isinstance(head, Head)
    rows = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:MOST].sort().values
    model.module.eval()
    embeddings = [examples.embeddings(model, part).double().cpu() for part in rows.split(_BATCH)]
    features, wanted = torch.cat(embeddings).numpy(), targets[rows.numpy()]
    if not np.isfinite(features).all():
        raise MergeflowError(
            f"task '{examples.task}': the base gives features that are NaN or infinite: no head can be fitted. "
            "Check its weights, and whether it needs a wider type than the one it is stored in."
        )
    numbers = wanted.dtype.kind == "f"
    weight, bias = ridge(features, wanted) if numbers else logistic(features, wanted, len(head.weight))
    device = device_of(model)
    head.weight.copy_(torch.from_numpy(weight).to(device))
    assert head.bias is not None
    head.bias.copy_(torch.from_numpy(bias).to(device))


def logistic(features: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the weights [C, D] and biases [C] of a multinomial logistic regression of labels [n] on features [n, D].

    argmin −(1/n) Σ_i log softmax(W z_i + b)_{y_i} + ‖W‖²/(2n) on features z with mean 0 and variance 1
    """
    from scipy.optimize import minimize  # a fifth of a second, which what fits no head need not wait for

    scaled, fold = _standardised(features)
    count, width = scaled.shape
    right = np.eye(classes)[labels]

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        weight, bias = values[: classes * width].reshape(classes, width), values[classes * width :]
        logits = scaled @ weight.T + bias
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        off = (np.exp(log_p) - right) / count
        slope = np.concatenate([(off.T @ scaled + weight / count).ravel(), off.sum(axis=0)])
        return float((weight**2).sum() / 2 - (log_p * right).sum()) / count, slope

    start = np.zeros(classes * (width + 1))
    values = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 300}).x
    return fold(values[: classes * width].reshape(classes, width), values[classes * width :])


def ridge(features: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the weights [1, D] and the bias [1] of a ridge regression of numbers y, [n], on features [n, D].

    argmin Σ_i (w·z_i + b − y_i)² + ‖w‖² on features z with mean 0 and variance 1
    """
    scaled, fold = _standardised(features)
    centre = numbers.mean()
    slope = np.linalg.solve(scaled.T @ scaled + np.eye(scaled.shape[1]), scaled.T @ (numbers - centre))
    return fold(slope[None, :], np.array([centre]))


def _standardised(features: np.ndarray) -> tuple[np.ndarray, Fold]:
    """Return features with mean 0 and variance 1, and what turns weights [R, D] and bias [R] on these into the others.

    A feature that hardly changes counts as constant: its weight would be so large that the gradient which reaches the
    encoder through it is all that the encoder learns from, or infinite. all-MiniLM-L6-v2 has one with a spread of
    1e-32 and one of 2e-9 among others of 0.3.
    """
    spread = standardised(features, _ROUNDING, _SMALLEST).spread
    usual = float(np.median(spread[spread > 0])) if spread.any() else 0.0
    scaled = standardised(features, _ROUNDING, max(_SMALLEST, _ROUNDING * usual))

    def fold(weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        varies = scaled.spread > 0
        return np.where(varies, weight / np.where(varies, scaled.spread, 1.0), 0.0), bias - weight @ scaled.mean

    return scaled.values, fold
