"""How a project's examples are asked: without labels, one answer for each, a few at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergeflow.analysis.provable.answers import Answers, Asked, ask
from mergeflow.modalities.classification import Regression, Subset
from mergeflow.modality import Model, State


@dataclass(frozen=True)
class OneEach:
    """Examples of a project, one prediction of each: a language model makes one for every token."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log-probabilities [n, C], spread evenly over the predictions of `rows`."""
        lines: Tensor = self.source.log_p(model, rows)
        return lines[torch.linspace(0, len(lines) - 1, len(rows)).long()] if len(lines) > len(rows) else lines


@dataclass(frozen=True)
class OneNumber:
    """Examples of a task with one number each, whose log-probabilities are the same for every model."""

    source: Regression
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def logits(self, model: Model, rows: Tensor) -> Tensor:
        """Return the model's number for each of `rows`, [n, 1]."""
        return self.source.answers(model, self.chosen[rows])[:, None]


def one_each(examples: Subset) -> OneEach | OneNumber:
    """Return examples of a project, with one answer for each.

    Args:
        examples: those to ask about.
    """
    whole = examples.whole
    return OneNumber(whole, examples.chosen) if isinstance(whole, Regression) else OneEach(examples)


def ask_all(
    model: Model, base: State, experts: Mapping[str, State], sources: Mapping[str, Asked], batch_size: int
) -> Answers:
    """Return the answers of a base and its experts to every task that has samples.

    Args:
        model: a module that weights are loaded into; its weights are overwritten.
        base: the weights that the experts were tuned from.
    """
    return ask(model, base, experts, {task: source for task, source in sources.items() if len(source)}, batch_size)
