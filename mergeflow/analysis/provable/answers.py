"""What a base and its experts answer to samples without labels."""

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergeflow.modalities.classification import Regression, Subset
from mergeflow.modality import Model, State


@dataclass(frozen=True)
class Answers:
    """Outputs of the base and of every expert on every task's samples."""

    experts: dict[str, dict[str, Tensor]]  # task → expert → outputs [n, C]; C may differ from task to task
    base: dict[str, Tensor]  # task → the base's outputs [n, C]
    what: str  # what the outputs are, for people: `logits` or `features`

    @property
    def changes(self) -> dict[str, dict[str, Tensor]]:
        """Task → expert → outputs less the base's: in the theory, whose base answers 0, the outputs themselves."""
        return {
            task: {expert: outputs - self.base[task] for expert, outputs in outputs_of.items()}
            for task, outputs_of in self.experts.items()
        }


@torch.inference_mode()
def ask(
    model: Model, base: State, experts: Mapping[str, State], sources: Mapping[str, Sized], batch_size: int = 256
) -> Answers:
    """Return the answers of a base and its experts.

    Args:
        model: a module that weights are loaded into, which are overwritten; it is put into evaluation mode, so that
            dropout is off and BatchNorm has its own statistics.
        sources: samples by the names of the experts, in their order. They give `logits`, or `log_p`, or else the
            `outputs` of the module.
    """
    model.module.eval()

    def answers(state: State) -> dict[str, Tensor]:
        model.load(state)
        return {task: _outputs(model, source, batch_size) for task, source in sources.items()}

    outputs = {expert: answers(state) for expert, state in experts.items()}
    named = {task: {expert: outputs[expert][task] for expert in experts} for task in sources}
    logits = all(_kind(source) != "outputs" for source in sources.values())
    return Answers(named, answers(base), "logits" if logits else "features")


def _kind(source: Any) -> str:
    return next(kind for kind in ("logits", "log_p", "outputs") if hasattr(source, kind))


def _outputs(model: Model, source: Any, batch_size: int) -> Tensor:
    answer = getattr(source, _kind(source))
    parts = [answer(model, rows).double().cpu() for rows in torch.arange(len(source)).split(batch_size)]
    whole = torch.cat(parts)
    # log p is the logits less a number for each sample, which says nothing of the classes.
    return whole - whole.mean(1, keepdim=True) if _kind(source) == "log_p" else whole


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
    """Return examples of a project, with one answer for each."""
    whole = examples.whole
    return OneNumber(whole, examples.chosen) if isinstance(whole, Regression) else OneEach(examples)
