"""Questions with choices as examples: the choice that the model finds likeliest is its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergeflow.modalities.modules import activations
from mergeflow.modality import Model

# The log-likelihood of a choice that a question does not have. Not −∞, of which p·log p is not a number.
_ABSENT = -1e4


class _Batch(NamedTuple):
    """The choices of some questions, each behind its question.

    ids: int64 [c, L], the end token behind them. choice: bool [c, L], True where a token is predicted that belongs to
    the choice. places: which question, and which of its choices, int64 [c] each.
    """

    ids: Tensor
    choice: Tensor
    places: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Questions:
    r"""One split of a task of questions, each with choices of which one is right.

    The likelihood of a choice is that of its tokens behind the question's: ℓ_k = Σ_j log p(x_kj | question, x_k,<j). It
    is not divided by the choice's length.

    Attributes:
        ids: int32 [N, R]: the question's tokens, then those of each choice; it may lie on disk.
        ends: int32 [N, K + 1]: where the question and each choice end; what is behind the last repeats its end.
        answers: int64 [N], on the processor.
        end: The id that fills rows.
    """

    task: str
    ids: np.ndarray
    ends: np.ndarray
    answers: Tensor
    end: int
    device: torch.device
    head: None = None
    metric: None = None

    def __len__(self) -> int:
        return len(self.answers)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return −(1/M) Σ log p over the M tokens of the right choices of `rows`, a scalar [], in nats."""
        batch = self._batch(rows, self.answers[rows])
        log_p = self._tokens(model, batch)
        return -log_p[batch.choice].mean()

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return 1 where the right choice has the largest likelihood, else 0: float32 [n]."""
        return (self.likelihoods(model, rows).argmax(dim=1).cpu() == self.answers[rows]).float()

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log-probabilities of the choices, [n, K]: the log-softmax of their log-likelihoods."""
        return self.likelihoods(model, rows).log_softmax(dim=1)

    def likelihoods(self, model: Model, rows: Tensor) -> Tensor:
        """Return ℓ of each choice, [n, K] in nats; −10⁴ where a question has fewer than K choices."""
        batch = self._batch(rows)
        log_p = self._tokens(model, batch).masked_fill(~batch.choice, 0.0).sum(dim=1)
        likelihoods = log_p.new_full((len(rows), self.ends.shape[1] - 1), _ABSENT)
        return likelihoods.index_put(batch.places, log_p)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the named submodules for the right choices of `rows`, [n, L, ...] each."""
        batch = self._batch(rows, self.answers[rows])
        return activations(model.module, layers, lambda: model.module(batch.ids))

    def _tokens(self, model: Model, batch: _Batch) -> Tensor:
        """Return the log-probability of each place's next token, [c, L] in float32 or wider."""
        logits: Tensor = model.module(batch.ids)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        following = batch.ids.roll(-1, dims=1)
        return -cross_entropy(logits.transpose(1, 2), following, reduction="none")

    def _batch(self, rows: Tensor, only: Tensor | None = None) -> _Batch:
        """Return all choices of `rows`, or of each the choice `only`."""
        numbers = rows.numpy()
        ids, ends = np.asarray(self.ids[numbers]), np.asarray(self.ends[numbers])
        wanted = [
            (row, choice)
            for row in range(len(numbers))
            for choice in ([int(only[row])] if only is not None else range(int((np.diff(ends[row]) > 0).sum())))
        ]
        sequences = [
            np.append(ids[row, : ends[row, 0]], ids[row, ends[row, k] : ends[row, k + 1]]) for row, k in wanted
        ]
        longest = max(map(len, sequences))
        filled = np.full((len(sequences), longest), self.end, np.int64)
        choice = np.zeros((len(sequences), longest), bool)
        for line, ((row, _), tokens) in enumerate(zip(wanted, sequences, strict=True)):
            filled[line, : len(tokens)] = tokens
            choice[line, ends[row, 0] - 1 : len(tokens) - 1] = True  # a token is predicted by the place before it
        question, number = (torch.tensor(column, device=self.device) for column in zip(*wanted, strict=True))
        there, told_there = (torch.from_numpy(part).to(self.device) for part in (filled, choice))
        return _Batch(there, told_there, (question, number))
