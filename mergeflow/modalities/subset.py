"""Some examples of a split, as examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mergeflow.modality import Examples, Metric, Model


@dataclass(frozen=True)
class Subset:
    """The examples `rows` of others, in that order.

    Attributes:
        whole: The examples that it is a part of.
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
        """Return what the named submodules give for `rows`, [n, ...] each."""
        return self.whole.features(model, self.chosen[rows], layers)
