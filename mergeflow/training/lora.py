"""Low-rank adapters on a module's weight matrices, W + (alpha/rank)·B·A with W frozen, kept as PEFT folders.

PEFT writes the folder's configuration, and its models load the folder. The forward pass is ours, because PEFT's
attention layer adds B·A to W in every forward pass and subtracts it again: W drifts by rounding, and the output
projection gets 2·B·A (huggingface/peft pull request 3774, open with PEFT 0.21).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modality import Model, State
from mergeflow.training.settings import LoraSettings


class LoraModule(nn.Module):
    """A module with W + (alpha/rank)·B·A instead of each adapted weight matrix W; A and B alone are trained.

    B starts at 0, so it computes what the module does; A is drawn uniformly on ±1/√(inputs), as PEFT draws it.

    Args:
        module: the module; its weights are frozen, and stay as they are.
        settings: rank, scale and which submodules.
        seed: of A.

    Raises:
        MergeflowError: PEFT is not installed, or no submodule has one of the names.

    Source: Hu et al. 2022, equation 3.
    """

    def __init__(self, module: nn.Module, settings: LoraSettings, seed: int = 0) -> None:
        super().__init__()
        _require_peft()
        found = list(_matrices(module))
        for target in settings.targets:
            if target not in {target for target, _, _ in found}:
                raise unknown_name("entry of finetune.lora.targets", target, {target for target, _, _ in found})
        self.original, self.settings = module.requires_grad_(False), settings
        self.adapted = {weight: name for target, weight, name in found if target in settings.targets}
        generator = torch.Generator().manual_seed(seed)
        weights = [module.get_parameter(weight) for weight in self.adapted]
        drawn = [torch.empty(settings.rank, w.shape[1]).uniform_(-1, 1, generator=generator) for w in weights]
        down = [(values / math.sqrt(values.shape[1])).to(w) for values, w in zip(drawn, weights, strict=True)]
        self.down = nn.ParameterList([nn.Parameter(values) for values in down])
        self.up = nn.ParameterList([nn.Parameter(w.new_zeros(w.shape[0], settings.rank)) for w in weights])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module with the adapted weights returns."""
        return functional_call(self.original, self.merged(), args, kwargs)

    def merged(self) -> dict[str, Tensor]:
        """Return W + (alpha/rank)·B·A of every adapted matrix, by its name in the module."""
        factor = self.settings.alpha / self.settings.rank
        with torch.autocast(self.up[0].device.type, enabled=False):
            return {
                weight: self.original.get_parameter(weight).detach() + (up @ down) * factor
                for weight, down, up in zip(self.adapted, self.down, self.up, strict=True)
            }

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
        for name, down, up in zip(self.adapted.values(), self.down, self.up, strict=True):
            tensors[f"base_model.model.{name}.lora_A.weight"] = down.detach()
            tensors[f"base_model.model.{name}.lora_B.weight"] = up.detach()
        write_checkpoint(folder / "adapter_model.safetensors", tensors, {"format": "pt"})


@dataclass(frozen=True)
class LoraModel:
    """A model whose changes from the base are low-rank adapters.

    Attributes:
        base: The model with the base's weights.
        module: Its module with the adapters.
    """

    base: Model
    module: LoraModule

    @classmethod
    def of(cls, base: Model, settings: LoraSettings, seed: int = 0) -> "LoraModel":
        """Return the model with adapters that change nothing yet; `base` is frozen, see `LoraModule`.

        Args:
            base: the model, on its device.
            settings: rank, scale and targets.
            seed: of the adapters' first factors.
        """
        return cls(base, LoraModule(base.module, settings, seed))

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Return W + (alpha/rank)·B·A and all other weights by the base's names: the expert."""
        return {**self.base.state(), **self.module.merged()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Make `state` the frozen weights, and B zero."""
        self.base.load(state)
        for up in self.module.up:
            up.zero_()


def _matrices(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the last part of a submodule's name, its weight's name, PEFT's name for it; attention has two weights."""
    for name, part in module.named_modules():
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
