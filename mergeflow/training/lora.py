"""Low-rank adapters on the image tower, W + (alpha/rank)·B·A with W frozen, kept as PEFT folders.

PEFT writes the folder's configuration, and its models load the folder. The forward pass is ours, because PEFT's
attention layer adds B·A to W in every forward pass and subtracts it again: W drifts by rounding, and the output
projection gets 2·B·A (huggingface/peft pull request 3774, open with PEFT 0.21).
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.vision.models import ImageEncoder
from mergeflow.training.settings import LoraSettings


class LoraEncoder(nn.Module):
    """The encoder with W + (alpha/rank)·B·A in place of each adapted weight matrix W; A and B alone are trained.

    B starts at 0, so it computes what the encoder does; A is drawn uniformly on ±1/√(inputs), as PEFT draws it.

    Args:
        encoder: the encoder; its weights are frozen, and stay as they are.
        settings: rank, scale and which modules.
        seed: of A.

    Raises:
        MergeflowError: PEFT is not installed, or no module has one of the names.

    Source: Hu et al. 2022, equation 3.
    """

    def __init__(self, encoder: ImageEncoder, settings: LoraSettings, seed: int = 0) -> None:
        super().__init__()
        _require_peft()
        found = list(_matrices(encoder))
        for target in settings.targets:
            if target not in {target for target, _, _ in found}:
                raise unknown_name("entry of finetune.lora.targets", target, {target for target, _, _ in found})
        self.encoder, self.settings = encoder.requires_grad_(False), settings
        self.adapted = {weight: module for target, weight, module in found if target in settings.targets}
        generator = torch.Generator().manual_seed(seed)
        shapes = [encoder.get_parameter(weight).shape for weight in self.adapted]
        drawn = [torch.empty(settings.rank, inputs).uniform_(-1, 1, generator=generator) for _, inputs in shapes]
        self.down = nn.ParameterList([nn.Parameter(values / math.sqrt(values.shape[1])) for values in drawn])
        self.up = nn.ParameterList([nn.Parameter(torch.zeros(outputs, settings.rank)) for outputs, _ in shapes])
        self.to(encoder.mean.device)

    def forward(self, images: Tensor) -> Tensor:
        """Return unit features [B, D] of uint8 images [B, S, S, 3]."""
        features: Tensor = functional_call(self.encoder, self._merged(), (images,))
        return features

    @torch.no_grad()
    def encoder_state(self) -> dict[str, Tensor]:
        """Return W + (alpha/rank)·B·A and all other weights by the encoder's names: the expert."""
        return {**self.encoder.encoder_state(), **self._merged()}

    def save(self, folder: Path) -> None:
        """Write the adapter as a PEFT folder, which a recipe takes as an expert."""
        from peft import LoraConfig

        config = LoraConfig(
            r=self.settings.rank, lora_alpha=self.settings.alpha, target_modules=sorted(self.settings.targets)
        )
        config.inference_mode = True
        config.save_pretrained(str(folder))
        # PEFT keeps the names in a set, whose order changes from one process to the next.
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": sorted(self.settings.targets)}))
        tensors: dict[str, Tensor] = {}
        for module, down, up in zip(self.adapted.values(), self.down, self.up, strict=True):
            tensors[f"base_model.model.{module}.lora_A.weight"] = down.detach()
            tensors[f"base_model.model.{module}.lora_B.weight"] = up.detach()
        write_checkpoint(folder / "adapter_model.safetensors", tensors, {"format": "pt"})

    def _merged(self) -> dict[str, Tensor]:
        factor = self.settings.alpha / self.settings.rank
        with torch.autocast(self.encoder.mean.device.type, enabled=False):
            return {
                weight: self.encoder.get_parameter(weight).detach() + (up @ down) * factor
                for weight, down, up in zip(self.adapted, self.down, self.up, strict=True)
            }


def _matrices(encoder: ImageEncoder) -> Iterator[tuple[str, str, str]]:
    """Yield the last part of a module's name, its weight's name, and what PEFT calls it; attention has two weights."""
    for name, part in encoder.named_modules():
        target = name.rpartition(".")[2]
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            yield target, f"{name}.in_proj_weight", name
            yield target, f"{name}.out_proj.weight", f"{name}.base_layer.out_proj"
        elif isinstance(part, nn.Linear) and target != "out_proj":
            yield target, f"{name}.weight", name


def _require_peft() -> None:
    try:
        import peft  # noqa: F401
    except ModuleNotFoundError:
        raise MergeflowError("regime lora needs the package peft: install mergeflow[lora].") from None
