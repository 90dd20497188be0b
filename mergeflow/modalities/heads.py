"""A linear classifier of one task on a model's features, frozen or trained, and its file."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError

_NO_HEAD = "no head"


class Head(nn.Module):
    r"""Logits s · f Wᵀ + b of features f.

    A zero-shot head of CLIP is frozen, has one unit row per class and no b.

    Args:
        weight: W, [C, D]; a row for each of the class names.
        logit_scale: s > 0.
        bias: b, [C].

    Source: Radford et al. 2021 (CLIP), section 3.1.
    """

    def __init__(
        self,
        weight: Tensor,
        logit_scale: float,
        class_names: Sequence[str],
        bias: Tensor | None = None,
        trained: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trained)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=trained)
        self.logit_scale, self.class_names = logit_scale, list(class_names)

    @property
    def trained(self) -> bool:
        return self.weight.requires_grad

    def forward(self, features: Tensor) -> Tensor:
        """Return logits [B, C] of features [B, D], in their dtype and on their device."""
        logits = self.logit_scale * features @ self.weight.to(features).T
        return logits if self.bias is None else logits + self.bias.to(features)


def drawn_head(task: str, class_names: Sequence[str], width: int) -> Head:
    """Return a head to be trained, with transformers' spread of .02 for new weights, decided by the task's name."""
    drawing = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(task.encode()).digest()[:7]))
    outputs = len(class_names) or 1
    weight = 0.02 * torch.randn(outputs, width, generator=drawing)
    return Head(weight, 1.0, class_names, torch.zeros(outputs), trained=True)


def save_head(head: Head | None, path: str | Path) -> str:
    """Write a head as safetensors with its class names and scale in the metadata; return its fingerprint.

    Of a task without a head the file says just that, so that a lost file is never taken for it.
    """
    if head is None:
        return write_checkpoint(path, {}, {"kind": _NO_HEAD})
    record = {"kind": "head", "class_names": json.dumps(head.class_names), "logit_scale": repr(head.logit_scale)}
    if head.trained:
        record["trained"] = "yes"
    tensors = {name: value.detach().contiguous().cpu() for name, value in head.named_parameters()}
    return write_checkpoint(path, tensors, record)


def load_head(path: str | Path) -> Head:
    """Read the head of a task that has one."""
    head = read_head(path)
    if head is None:
        raise MergeflowError(f"{path} says that its task has no head, but here one is needed.")
    return head


def read_head(path: str | Path) -> Head | None:
    """Read what `save_head` wrote: a head, or None where the task has none."""
    try:
        with safe_open(str(path), framework="pt") as file:
            record = file.metadata() or {}
            if record.get("kind") == _NO_HEAD:
                return None
            if record.get("kind") != "head":
                raise MergeflowError(f"{path} is not a head: its record says {record.get('kind', 'nothing')!r}.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise MergeflowError(
            f"cannot read the head {path}: {error}. Build it again with the stage that makes it."
        ) from error
    names, scale = json.loads(record["class_names"]), float(record["logit_scale"])
    return Head(tensors["weight"], scale, names, tensors.get("bias"), trained="trained" in record)
