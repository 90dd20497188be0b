"""Examples with one number each, judged by a model's features and a head with one output: likeness, a rating."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mergeflow.modalities.classification import Classification
from mergeflow.modality import Metric, Model


@dataclass(frozen=True)
class Regression:
    """One split of a task whose examples have one number each.

    Attributes:
        numbered: The inputs, the numbers as its labels (floating-point [N], on the model's device), and the head.
        metric: Its figure, a correlation.
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
        found = self.answers(model, rows)
        return mse_loss(found, self.numbered.labels[rows].to(found))

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return the right number and the model's for each of `rows`, float64 [n, 2]."""
        found = self.answers(model, rows).double()
        return torch.stack([self.numbered.labels[rows].to(found), found], dim=1)

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        r"""Return log-probabilities, [n, 2], of the two numbers that lie one unit beside the model's own.

        Of a normal distribution around f(x) with variance 1, restricted to f(x) ± 1 as they are: its Fisher information
        is that of the whole distribution, (∇f)², whichever of the two is drawn; its entropy is log 2 and has no
        gradient, as the whole distribution's, so that nothing that lowers entropies moves a regression.
        """
        found = self.answers(model, rows)
        beside = found.detach()[:, None] + found.new_tensor([-1.0, 1.0])
        return (-0.5 * (beside - found[:, None]).square()).log_softmax(dim=1)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return what the named submodules give for `rows`, [n, ...] each."""
        return self.numbered.features(model, rows, layers)

    def prefetch(self, rows: Tensor) -> None:
        """Begin to gather `rows`, int64 [n], for a call after the next one."""
        self.numbered.prefetch(rows)
