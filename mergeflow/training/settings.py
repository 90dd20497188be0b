"""How an expert is fine-tuned: the settings of one run, frozen and validated."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FineTuneSettings(BaseModel):
    """Settings of one fine-tuning run. The defaults are those for a real CLIP.

    Attributes:
        regime: `steps` trains for `steps` optimiser steps; `one_epoch` passes over the training images once.
        steps: optimiser steps, at least 1; not used by `one_epoch`.
        batch_size: images per step, at least 1. The last batch of an epoch is smaller when it has to be.
        learning_rate: peak learning rate of AdamW, above 0.
        weight_decay: decoupled weight decay, at least 0.
        warmup: share of the steps with a linearly rising learning rate, in [0, 1).
        schedule: `cosine` falls to 0 after the warm-up; `constant` stays.
        gradient_clip: largest 2-norm of the whole gradient; 0 turns clipping off.
        precision: `bfloat16` computes the forward pass under autocast; weights and optimiser stay float32.
        save_every: steps between two saved states from which a killed run continues.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    regime: Literal["steps", "one_epoch"] = "steps"
    steps: int = Field(2000, ge=1)
    batch_size: int = Field(128, ge=1)
    learning_rate: float = Field(1e-5, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    warmup: float = Field(0.1, ge=0.0, lt=1.0)
    schedule: Literal["cosine", "constant"] = "cosine"
    gradient_clip: float = Field(1.0, ge=0.0)
    precision: Literal["float32", "bfloat16"] = "float32"
    save_every: int = Field(100, ge=1)

    def total_steps(self, images: int) -> int:
        """Return the number of optimiser steps for a training set of `images` images."""
        return self.steps if self.regime == "steps" else -(-images // self.batch_size)
