"""Low-rank adapters on the image tower, by PEFT: W + (alpha/rank)·B·A with W frozen."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from mergeflow.errors import MergeflowError
from mergeflow.training.settings import LoraSettings
from mergeflow.vision.models import ImageEncoder

if TYPE_CHECKING:
    from peft import PeftModel


def add_lora(encoder: ImageEncoder, settings: LoraSettings) -> "PeftModel":
    """Put adapters into `encoder.visual`; all other parameters stop being trained.

    B starts at 0, so the encoder computes what it did before. Source: Hu et al. 2022, equation 3.

    Args:
        encoder: the image encoder; changed in place. The adapters' A is drawn from torch's generator.
        settings: rank, scale and which modules.

    Returns:
        PEFT's model around `encoder.visual`, for `save_adapter` and `merge_lora`.

    Raises:
        MergeflowError: PEFT is not installed, or no module has one of the names.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise MergeflowError("regime lora needs the package peft: install mergeflow[lora].") from None
    names = {name.rpartition(".")[2] for name, module in encoder.visual.named_modules() if _can_adapt(module)}
    unknown = sorted(set(settings.targets) - names)
    if unknown:
        raise MergeflowError(
            f"finetune.lora.targets: the image tower has no weight matrix called {', '.join(unknown)}; "
            f"it has {', '.join(sorted(names))}."
        )
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets), bias="none")
    model: PeftModel = get_peft_model(encoder.visual, config)
    encoder.visual = model
    return model


def save_adapter(model: "PeftModel", folder: Path) -> None:
    """Write the adapter as a PEFT folder, which a recipe takes as an expert."""
    model.save_pretrained(str(folder))


def merge_lora(encoder: ImageEncoder) -> None:
    """Fold the adapters into the weights: the encoder is a plain one again, and computes the same but for rounding."""
    fold: Callable[[], nn.Module] = encoder.visual.merge_and_unload
    encoder.visual = fold()


def _can_adapt(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.MultiheadAttention | nn.Conv2d)
