"""Score merge candidates on tasks: one model, one direction for every scale, factorisations kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergeflow.evaluation.accuracy import Judge
from mergeflow.evaluation.averages import mean, normalised
from mergeflow.merging import MethodCall
from mergeflow.merging.execution.direction import CandidateMerger, configured
from mergeflow.modality import Examples, Model, State, device_of


@dataclass(frozen=True)
class Score:
    """How good a merged model is.

    Attributes:
        accuracy: Per task, in [0, 1].
        mean: Over tasks.
        normalised: Mean of merged / expert; missing where a task has no expert.
    """

    accuracy: dict[str, float]
    mean: float
    normalised: float | None


def score_of(accuracy: Mapping[str, float], individual: Mapping[str, float] | None) -> Score:
    """Summarise accuracies; `individual` are those of each task's own expert."""
    return Score(dict(accuracy), mean(accuracy), None if individual is None else normalised(accuracy, individual))


class CandidateScorer:
    """Merges candidates in memory, as `CandidateMerger` does, and scores them on examples.

    Args:
        model: What the merges are weights of, on its device; its weights are overwritten.
        base: θ0, in memory or lazy.
        statistics: Of data, for methods that need them: kind → expert → tensor.
        device: Where the merge's arithmetic happens.
        judging: Batch size, precision and compilation of the forward passes, as `Judge` takes them; merges are made in
            float32 or wider whatever these say.
    """

    def __init__(
        self,
        model: Model,
        tasks: Mapping[str, Examples],
        base: State,
        experts: Mapping[str, State],
        *,
        statistics: Mapping[str, Any] | None = None,
        device: str = "cpu",
        **judging: Any,
    ) -> None:
        self.model, self.tasks, self._judge = model, tasks, Judge(model, **judging)
        self.merger = CandidateMerger(base, experts, statistics=statistics, device=device)

    def renew_cache(self, rank_ratio: float) -> None:
        """Forget all factorisations and keep those to come up to a share of the rank."""
        self.merger.renew_cache(rank_ratio)

    def merge(self, call: MethodCall | str, **args: Any) -> dict[str, Tensor]:
        """Return the merged state dict of a candidate: a configured method, or a method's name with its arguments."""
        return self.merger.merge(configured(call, args))

    def candidate(self, call: MethodCall) -> dict[str, float]:
        """Return the accuracy of a candidate on every task."""
        return self.state(self.merger.merge_for(call, device_of(self.model)))

    @torch.inference_mode()
    def state(self, state: State, tasks: Mapping[str, Examples] | None = None) -> dict[str, float]:
        """Return the accuracy of a state dict on every task, or on those given."""
        self.model.load(state)
        return self._judge.accuracies(self.tasks if tasks is None else tasks)
