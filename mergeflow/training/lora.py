"""Low-rank adapters on a module's weight matrices, W + (alpha/rank)·B·A with W frozen, kept as PEFT folders.

PEFT writes the folder's configuration, and its models load the folder. The forward pass is ours, because PEFT's
attention layer adds B·A to W in every forward pass and subtracts it again: W drifts by rounding, and the output
projection gets 2·B·A (huggingface/peft pull request 3774, open with PEFT 0.21).
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mergeflow.checkpoints import write_checkpoint
from mergeflow.checkpoints.names import stores_inputs_first
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modality import Model, State
from mergeflow.training.settings import LoraSettings


class LoraModule(nn.Module):
    """A module with W + (alpha/rank)·B·A instead of each adapted weight matrix W; A and B alone are trained.

    B starts at 0, so it computes what the module does; A is drawn uniformly on ±1/√(inputs), as PEFT draws it. Of a
    matrix that is stored [inputs, outputs] (Conv1D, as GPT-2 has it) the transpose of B·A is added.

    The module's weights are frozen, and stay as they are.

    Source: Hu et al. 2022, equation 3.
    """

    def __init__(self, module: nn.Module, settings: LoraSettings, seed: int = 0) -> None:
        super().__init__()
        if find_spec("peft") is None:
            raise MergeflowError("regime lora needs the package peft: install mergeflow[lora].")
        matrices = list(_matrices(module))
        if not matrices:
            raise MergeflowError("LoRA adapts linear layers, and the model has none: choose another finetune.regime.")
        for target in settings.targets:
            if target not in (targets := {target for target, _, _ in matrices}):
                raise unknown_name("entry of finetune.lora.targets", target, targets)
        self.original, self.settings = module.requires_grad_(False), settings
        self.adapted = {weight: name for target, weight, name in matrices if target in settings.targets}
        self.inputs_first = _inputs_first(module, self.adapted)
        generator = torch.Generator().manual_seed(seed)
        weights = [module.get_parameter(weight) for weight in self.adapted]
        sizes = [w.shape[::-1] if self.inputs_first else w.shape for w in weights]  # outputs, inputs
        drawn = [torch.empty(settings.rank, inputs).uniform_(-1, 1, generator=generator) for _, inputs in sizes]
        down = [(values / math.sqrt(values.shape[1])).to(w) for values, w in zip(drawn, weights, strict=True)]
        self.down = nn.ParameterList([nn.Parameter(values) for values in down])
        empty = [w.new_zeros(outputs, settings.rank) for w, (outputs, _) in zip(weights, sizes, strict=True)]
        self.up = nn.ParameterList([nn.Parameter(values) for values in empty])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with the adapted weights."""
        return functional_call(self.original, self.merged(), args, kwargs)

    def merged(self) -> dict[str, Tensor]:
        """Return W + (alpha/rank)·B·A of every adapted matrix, by its name in the module."""
        factor = self.settings.alpha / self.settings.rank
        with torch.autocast(self.up[0].device.type, enabled=False):
            return {
                weight: self.original.get_parameter(weight).detach()
                + ((up @ down).T if self.inputs_first else up @ down) * factor
                for weight, down, up in zip(self.adapted, self.down, self.up, strict=True)
            }

    def save(self, folder: Path) -> None:
        """Write the adapter as a PEFT folder, which a recipe takes as an expert."""
        from peft import LoraConfig

        config = LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.settings.alpha,
            target_modules=sorted(self.settings.targets),
            fan_in_fan_out=self.inputs_first,
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
    """

    base: Model
    module: LoraModule

    @classmethod
    def of(cls, base: Model, settings: LoraSettings, seed: int = 0) -> "LoraModel":
        """Return the model with adapters that change nothing yet; `base` is frozen, see `LoraModule`."""
        return cls(base, LoraModule(base.module, settings, seed))

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Return W + (alpha/rank)·B·A and all other weights by the base's names: the expert."""
        return {**self.base.state(), **self.module.merged()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Take `state` as the frozen weights, and set B to zero."""
        self.base.load(state)
        for up in self.module.up:
            up.zero_()


_OF_ATTENTION = nn.modules.linear.NonDynamicallyQuantizableLinear  # a part that MultiheadAttention never calls


def _matrices(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the last part of a submodule's name, its weight's name, PEFT's name for it; attention has two weights."""
    for name, part in module.named_modules():
        target = name.rpartition(".")[2]
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            yield target, f"{name}.in_proj_weight", name
            yield target, f"{name}.out_proj.weight", f"{name}.base_layer.out_proj"
        elif stores_inputs_first(part) or (isinstance(part, nn.Linear) and not isinstance(part, _OF_ATTENTION)):
            yield target, f"{name}.weight", name


def _inputs_first(module: nn.Module, weights: Iterable[str]) -> bool:
    """Return whether the adapted weights are stored [inputs, outputs]; one adapter has one setting for all."""
    names = {True: list[str](), False: list[str]()}
    for weight in weights:
        names[stores_inputs_first(module.get_submodule(weight.rpartition(".")[0]))].append(weight)
    if names[True] and names[False]:
        raise MergeflowError(
            f"finetune.lora.targets: {names[True][0]} is stored [inputs, outputs] and {names[False][0]} the other way, "
            "which one adapter cannot say: adapt layers of one kind."
        )
    return bool(names[True])
