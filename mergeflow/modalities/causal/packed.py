"""Blocks of text as examples: the loss is the mean over tokens, the score the share that is predicted right."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergeflow.modalities.activations import activations
from mergeflow.modalities.causal.blocks import Blocks
from mergeflow.modality import Model

IGNORED = -100  # the target where nothing is predicted: behind a block's end


@dataclass(frozen=True)
class PackedText:
    """One split of a task of texts; an example is a block.

    A token is predicted from those before it in its block; the first one of a block is not predicted.

    Attributes:
        task: The task's name.
        blocks: All tokens, on the processor.
        device: Where batches go.
    """

    task: str
    blocks: Blocks
    device: torch.device
    head: None = None
    metric: None = None

    def __len__(self) -> int:
        return len(self.blocks.lengths)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        r"""Return −(1/M) Σ log p(x_j | x_<j) over the M predicted tokens of `rows`, a scalar [], in nats."""
        logits, targets = self._predicted(model, rows)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return the next-token accuracy of each of `rows`, float32 [n] in [0, 1].

        It is the share of a block's predicted tokens that are the likeliest one.
        """
        logits, targets = self._predicted(model, rows)
        right = (logits.argmax(dim=2) == targets).sum(dim=1)
        return right / (targets != IGNORED).sum(dim=1)

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log p(· | x_<j) for every predicted token of `rows`, [m, V]; m is n·(block − 1), less at the end."""
        logits, targets = self._predicted(model, rows)
        return logits[targets != IGNORED].log_softmax(dim=1)

    def token_losses(self, model: Model, rows: Tensor) -> Tensor:
        """Return −log p of each predicted token of `rows`, one block after the other, float32 [m]."""
        logits, targets = self._predicted(model, rows)
        found = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return found[targets.flatten() != IGNORED]

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return what the named submodules give for `rows`, [n, block, ...] each."""
        ids = self.blocks.ids[rows].to(self.device, torch.int64)
        return activations(model.module, layers, lambda: model.module(ids))

    def _predicted(self, model: Model, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, block, V] in float32 or wider, and the token that each place predicts, [n, block]."""
        ids = self.blocks.ids[rows].to(self.device, torch.int64)
        places = torch.arange(1, ids.shape[1] + 1)
        following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        inside = (places < self.blocks.lengths[rows][:, None]).to(self.device)
        logits: Tensor = model.module(ids)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        return logits, following.masked_fill(~inside, IGNORED)
