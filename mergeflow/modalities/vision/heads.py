"""Zero-shot classification heads from class prompts, and their files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import ClipModel


@dataclass(frozen=True)
class Head:
    """A frozen linear classifier on L2-normalised image features.

    Args:
        weight: one unit row per class, float32 [C, D].
        logit_scale: factor on the cosine, > 0.
        class_names: the C classes in label order.
    """

    weight: Tensor
    logit_scale: float
    class_names: list[str]

    def logits(self, features: Tensor) -> Tensor:
        r"""Return s · f Wᵀ.

        Args:
            features: L2-normalised image features [B, D].

        Returns:
            Logits [B, C], in the features' dtype and on their device.

        Example:
            >>> head = Head(torch.eye(2), 10.0, ["cat", "dog"])
            >>> head.logits(torch.tensor([[0.6, 0.8]])).tolist()
            [[6.0, 8.0]]

        Source: Radford et al. 2021 (CLIP), section 3.1.
        """
        return self.logit_scale * features @ self.weight.to(features).T

    def to(self, device: torch.device | str) -> "Head":
        """Return the head with its weight on a device."""
        return Head(self.weight.to(device), self.logit_scale, self.class_names)


@torch.no_grad()
def build_head(clip: ClipModel, class_names: Sequence[str], templates: Sequence[str]) -> Head:
    r"""Build a zero-shot head: for each class the mean of its prompts' text features.

    w_c = n(1/|P| Σ_p n(text(p(c)))) with n(x) = x / ||x||.

    Args:
        clip: the model whose text tower and logit scale are used.
        class_names: names in label order.
        templates: prompts in which `{}` stands for the class name.

    Returns:
        The head, float32 on the CPU.

    Raises:
        MergeflowError: if there is no class, no template, a class twice, or a template without `{}`.

    Source: Radford et al. 2021 (CLIP), section 3.1.4.
    """
    _check_prompts(class_names, templates)
    device = next(clip.model.parameters()).device
    clip.model.eval()
    rows = []
    for name in class_names:
        tokens = clip.tokenizer([template.replace("{}", name) for template in templates]).to(device)
        features = clip.model.encode_text(tokens).float()
        mean = torch.nn.functional.normalize(features, dim=-1).mean(dim=0)
        rows.append(torch.nn.functional.normalize(mean, dim=0))
    return Head(torch.stack(rows).cpu(), float(clip.model.logit_scale.exp()), list(class_names))


def _check_prompts(class_names: Sequence[str], templates: Sequence[str]) -> None:
    if not class_names or not templates:
        raise MergeflowError(
            f"a head needs at least one class and one template; found {len(class_names)} and {len(templates)}."
        )
    twice = sorted({name for name in class_names if list(class_names).count(name) > 1})
    if twice:
        raise MergeflowError(f"class names occur more than once: {', '.join(twice)}. Give every label its own name.")
    bare = [template for template in templates if "{}" not in template]
    if bare:
        raise MergeflowError(f"templates without a place for the class name: {bare}. Write {{}} where it belongs.")


def save_head(head: Head, path: str | Path) -> str:
    """Write a head as safetensors with its class names and scale in the metadata; return its fingerprint."""
    record = {"kind": "head", "class_names": json.dumps(head.class_names), "logit_scale": repr(head.logit_scale)}
    return write_checkpoint(path, {"weight": head.weight.contiguous().cpu()}, record)


def load_head(path: str | Path) -> Head:
    """Read a head that `save_head` wrote.

    Raises:
        MergeflowError: if the file is missing, truncated, or no head.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            record = file.metadata() or {}
            if record.get("kind") != "head":
                raise MergeflowError(f"{path} is no head: its record says {record.get('kind', 'nothing')!r}.")
            weight = file.get_tensor("weight")
    except (SafetensorError, OSError) as error:
        raise MergeflowError(
            f"cannot read the head {path}: {error}. Build it again with the stage that makes it."
        ) from error
    return Head(weight, float(record["logit_scale"]), json.loads(record["class_names"]))
