"""What a project's models and examples are: the three things that every stage, loop and study works on.

A *model* is a torch module with shared weights; merging combines these. *Examples* are one split of one task and know
how a model is judged on them. Training, evaluation, estimates and searches take both as they are, whatever they hold.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from mergeflow.errors import MergeflowError

State = Mapping[str, Tensor]


class Model(Protocol):
    """A model of a project: base, experts and merges are weights of it."""

    @property
    def module(self) -> nn.Module:
        """The torch module: its device, its mode, and the parameters that a gradient reaches."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the shared weights, those that are merged, by the module's own names."""
        ...

    def load(self, state: State) -> None:
        """Copy shared weights into the existing parameters, cheap enough for every candidate of a search.

        Raises:
            MergeflowError: listing every missing, unexpected and misshapen tensor.
        """
        ...


class Predictions(Protocol):
    """Examples without labels, from which entropy, Fisher information and Gram matrices are estimated."""

    def __len__(self) -> int: ...

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log-probabilities [m, C], one line for each prediction of the examples `rows` (int64 [n], m ≥ n)."""
        ...


class Metric(Protocol):
    """A figure of a task that is not the mean of scores by example, such as a correlation."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    def shares(self, outcomes: np.ndarray) -> np.ndarray:
        """Return one number for each example, [N], whose mean is the figure, of all examples' scores [N, ...]."""
        ...


class Examples(Predictions, Protocol):
    """One split of one task, on which models are judged. `rows` are int64 [n] on the CPU."""

    @property
    def task(self) -> str:
        """The task's name."""
        ...

    @property
    def head(self) -> nn.Module | None:
        """Weights of this task alone, which are never merged: frozen, trained beside the model, or none."""
        ...

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return the mean loss over `rows`, a scalar [], differentiable, in float32 or wider even under autocast."""
        ...

    @property
    def metric(self) -> Metric | None:
        """What makes one figure of all scores; None where that is their mean, an accuracy."""
        ...

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return one score in [0, 1] for each of `rows`, larger is better; or [n, ...], what the metric asks for."""
        ...

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the named submodules for `rows`, [n, ...] each.

        Raises:
            MergeflowError: the module has no submodule of such a name.
        """
        ...


@runtime_checkable
class Prefetching(Protocol):
    """Examples that bring a batch to the device while it computes another."""

    def prefetch(self, rows: Tensor) -> None:
        """Begin to bring examples; the call that asks for them is given this very tensor of rows, int64 [n]."""
        ...


def prefetch(examples: Predictions, rows: Tensor) -> None:
    """Announce to examples which rows, int64 [n], come after the next call, where they can make use of it."""
    if isinstance(examples, Prefetching):
        examples.prefetch(rows)


@dataclass(frozen=True)
class Network:
    """A model all of whose weights are shared.

    Example:
        >>> network = Network(nn.Linear(2, 1, bias=False))
        >>> network.load({"weight": torch.tensor([[1.0, 2.0]])})
        >>> network.state()
        {'weight': tensor([[1., 2.]])}
    """

    module: nn.Module

    def state(self) -> dict[str, Tensor]:
        """Return the weights by the module's names; the tensors share memory with the module."""
        return {name: value.detach() for name, value in self.module.state_dict().items()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        expected = self.state()
        if state.keys() != expected.keys() or any(state[name].shape != expected[name].shape for name in expected):
            check_fit(f"'{state.path}'" if hasattr(state, "path") else "the state", state, expected)
        for name, tensor in expected.items():
            tensor.copy_(state[name])


def check_fit(source: str, state: State, expected: State) -> None:
    """Compare the names and shapes of weights with a model's."""
    problems = [f"  {name}: missing" for name in expected if name not in state]
    problems += [f"  {name}: not expected" for name in state if name not in expected]
    problems += [
        f"  {name}: shape {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if problems:
        tower = all(name.startswith("visual.") for name in expected)
        raise MergeflowError(
            f"{source} does not fit the model, {len(problems)} differences:\n"
            + "\n".join(problems)
            + "\nChoose the architecture that the weights were trained with."
            + (" Of a CLIP give the image tower alone, the tensors `visual.*`." if tower else "")
        )


def device_of(model: Model) -> torch.device:
    """Return the device of a model's parameters; the processor where it has none."""
    first = next(model.module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


@dataclass(frozen=True)
class Base:
    """The files of a base, and the report of its making.

    Attributes:
        root: The project folder, which local files are named relative to.
        heads: The folder of the tasks' heads; a task without a head needs no file there.
        report: Called as `report(what, done, all)`.
    """

    root: Path
    model: Path
    heads: Path
    report: Callable[[str, int, int], None]

    def head(self, task: str) -> Path:
        return self.heads / f"{task}.safetensors"


@dataclass(frozen=True)
class Modality:
    """The kind of a project's models and examples.

    Attributes:
        build: The section `model`, and the record in the metadata of the base's weights, to a model with any weights:
            experts and registered models are rebuilt from these alone.
        make_base: The sections `model` and `data`, and each task's manifest, to the files of a base. Heads are written
            there too: frozen ones as they stay, trained ones as training starts from them.
        open: Task, folder of a prepared split, the split's name, the task's head and the device of it, to examples.
        tower: The section `model` to the part of the module that holds the parameters, and that the regime `linearised`
            linearises; "" for the whole module.
        warm: The section, the model with the base's weights and a task's training examples: fits the trained head
            before training begins. None: training starts from the head of the base.
        architecture: The section to a name that stands for the architecture outside of the project too, as
            `mergeflow linearity --architecture` takes it; to None where only the project and its base know it.
        blank: The model, the sections `model` and `data`, and numbers of examples and of classes, to examples of that
            size without content: device memory is predicted by them.
        check_base: The sections `model` and `data` and the project folder: refuses a base of such a name or size
            before any data are prepared; no weight is read.
    """

    name: str
    build: Callable[[Any, Mapping[str, str]], Model]
    make_base: Callable[[Any, Any, Mapping[str, Any], Base], None]
    open: Callable[[str, Path, str, Any, torch.device], Examples]
    tower: Callable[[Any], str] = lambda _: ""
    warm: Callable[[Any, Model, Examples], None] | None = None
    architecture: Callable[[Any], str | None] = lambda _: None
    blank: Callable[[Model, Any, Any, int, int], Examples] | None = None
    check_base: Callable[[Any, Any, Path], object] | None = None
