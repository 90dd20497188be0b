"""Small nets as a modality: the nets are merged; every task has a trained linear head, or none has one."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification, open_split
from mergeflow.modalities.heads import Head, save_head
from mergeflow.modalities.toy.sections import DataSection, ModelSection
from mergeflow.modality import Base, Modality, Model, Network

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "linear": nn.Identity}


class FeedForward(nn.Module):
    r"""f(x) = φ(W_L φ(W_{L−1} ... φ(W_1 x))), or W_L φ(W_{L−1} ... φ(W_1 x)) for logits.

    Args:
        widths: D_0 (input), ..., D_L (features); layer l has the weight W_l of shape [D_l, D_{l−1}].
        activation: φ, a name of `ACTIVATIONS`.
        seed: of the weights, whose entries are N(0, 2 / fan-in).
        logits: whether the last layer has no activation.
    """

    def __init__(
        self,
        widths: Sequence[int],
        activation: str,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        logits: bool = False,
    ) -> None:
        super().__init__()
        names = [activation] * (len(widths) - 2) + ["linear" if logits else activation]
        self.active = nn.ModuleList([ACTIVATIONS[name]() for name in names])
        generator = torch.Generator().manual_seed(seed)
        shapes = zip(widths[1:], widths[:-1], strict=True)
        drawn = [(2 / d) ** 0.5 * torch.randn(n, d, generator=generator, dtype=torch.float64) for n, d in shapes]
        self.layers = nn.ModuleList([nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=dtype) for w in drawn])
        for layer, weight in zip(self.layers, drawn, strict=True):
            layer.load_state_dict({"weight": weight})

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features [n, D_L] of inputs [n, D_0]."""
        hidden = inputs.to(next(self.parameters()))
        for layer, activation in zip(self.layers, self.active, strict=True):
            hidden = activation(layer(hidden))
        return hidden


def build(section: ModelSection, record: Mapping[str, str]) -> Model:
    """Return the net, its weights drawn by the section's seed; of the base's record nothing is needed."""
    dtype, bare = getattr(torch, section.dtype), section.head == "none"
    return Network(FeedForward(section.widths, section.activation, dtype, section.seed, logits=bare))


def check_base(section: ModelSection, data: DataSection, root: Path) -> None:
    """Check that the net takes the examples."""
    if data.inputs != section.widths[0]:
        raise MergeflowError(
            f"data.inputs is {data.inputs}, but model.widths begins with {section.widths[0]}: make them equal."
        )


def make_base(section: ModelSection, data: DataSection, manifests: Mapping[str, Any], base: Base) -> None:
    """Write the drawn net, and where tasks have heads a drawn one for each, which training goes on from."""
    check_base(section, data, base.root)
    write_checkpoint(base.model, build(section, {}).state(), {"role": "base"})
    if section.head != "none":
        for task, manifest in manifests.items():
            save_head(_drawn_head(section, task, manifest["class_names"]), base.head(task))
        return
    classes = {task: len(manifest["class_names"]) for task, manifest in manifests.items()}
    if greedy := [f"{task} has {count}" for task, count in classes.items() if count > section.widths[-1]]:
        raise MergeflowError(
            f"model.head is none and model.widths ends with {section.widths[-1]}, too few logits for the classes: "
            f"{', '.join(greedy)}. Let the widths end with {max(classes.values())}."
        )


def _drawn_head(section: ModelSection, task: str, class_names: list[str]) -> Head:
    seed = int.from_bytes(hashlib.sha256(f"{section.seed}/{task}".encode()).digest()[:7])
    width, dtype = section.widths[-1], getattr(torch, section.dtype)
    weight = torch.randn(len(class_names), width, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return Head(weight / width**0.5, 1.0, class_names, torch.zeros(len(class_names), dtype=dtype), trained=True)


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> Classification:
    """Return examples without content."""
    head = None if section.head == "none" else _drawn_head(section, "blank", [""] * classes)
    return Classification("blank", torch.zeros(count, data.inputs), torch.zeros(count, dtype=torch.int64), head)


MODALITY = Modality("toy", build, make_base, partial(open_split, "inputs"), blank=blank, check_base=check_base)
