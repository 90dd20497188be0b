"""How an expert is fine-tuned: the settings of one run, frozen and validated."""

from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.schema import Frozen

TOGETHER = ("joint", "iterative")  # regimes that train all tasks in one run

Precision = Literal["float32", "tf32", "bfloat16"]
Regime = Literal["one_epoch", "steps", "epochs", "full_batch_gd", "joint", "iterative", "lora", "linearised"]


class IterativeSettings(Frozen, strict=True):
    """Settings of iterative merge-and-tune.

    Attributes:
        rounds: N rounds of tuning; between two rounds the tasks' models are merged and all restart from the merge.
        per_round: `steps` gives every round K = S/N of the S = `finetune.steps` steps; `one_epoch` one pass over the
            task's examples.
        merge: the catalog method between the rounds. `average` is MIMA; `task_arithmetic` with a scale is ATM. It is
            checked by `training.between.merge_between`, because these settings are those of every regime, and most
            regimes depend on no merge method.
        args: the method's arguments.
        optimiser: what becomes of a task's optimiser state at a merge: `kept` or `reset`.
        schedule: the learning rate's course: once over the `whole` budget, or anew `per_round`.
    """

    rounds: int = Field(8, ge=1)
    per_round: Literal["steps", "one_epoch"] = "steps"
    merge: str = "average"
    args: dict[str, Any] = Field(default_factory=dict)
    optimiser: Literal["kept", "reset"] = "reset"
    schedule: Literal["whole", "per_round"] = "whole"


class LoraSettings(Frozen, strict=True):
    """Low-rank adapters W + (alpha/rank)·B·A on weight matrices of the model.

    Attributes:
        rank: of B·A, at least 1.
        alpha: scale of the update, at least 1.
        targets: endings of the names of the modules that get an adapter; by default those of open_clip's towers.
    """

    rank: int = Field(8, ge=1)
    alpha: int = Field(16, ge=1)
    targets: list[str] = Field(default_factory=lambda: ["attn", "c_fc", "c_proj"], min_length=1)


class FineTuneSettings(Frozen, strict=True):
    """Settings of one fine-tuning run. The defaults are those for a real CLIP.

    Attributes:
        regime: `one_epoch`: one pass over the training examples. `steps`, `epochs`: that many of them.
            `full_batch_gd`: plain gradient descent θ ← θ − η ∇L with the exact gradient over all examples, one step
            an epoch, for `epochs`; of the optimiser's settings it uses `learning_rate` alone. `joint`: one model on all
            tasks. `iterative`: rounds of merging and tuning. `lora`: `steps` steps of low-rank adapters.
            `linearised`: `steps` steps in the tangent space of the base.
        steps: optimiser steps; for `iterative`, of all rounds together.
        epochs: passes over the examples for `epochs` and `full_batch_gd`.
        batch_size: examples per step and task, at least 1. The last batch of an epoch is smaller when it has to be.
        accumulate: parts into which a batch is split to save memory; their gradients are summed in a fixed order.
        optimiser: `adamw`, or `sgd` with `momentum`.
        momentum: of SGD, in [0, 1).
        learning_rate: its peak.
        weight_decay: decoupled for AdamW, of the gradient for SGD.
        warmup: share of the steps with a linearly rising learning rate.
        schedule: `cosine` falls to 0 after the warm-up; `constant` stays.
        gradient_clip: largest 2-norm of the whole gradient; 0 turns clipping off.
        precision: `bfloat16` computes the forward pass under autocast; weights and optimiser stay float32. `tf32` lets
            a CUDA device cut the factors of float32 products to 11 bits; the processor computes as for `float32`.
        fused: AdamW as one kernel a step; without it the last bits differ.
        batch_norm: `frozen`: BatchNorm normalises with the base's running statistics, which stay, so that experts and
            merges share them. `updated`: it normalises with those of each batch and follows them, as a net that starts
            from random weights needs.
        deterministic: the same bits from run to run on a CUDA device too.
        compile: run the model through torch.compile, or without it where it fails.
        save_every: steps between two saved states from which a killed run continues.
        keep_epochs: keep the weights θ_t of every epoch.
        sampling: of `joint`: `sum` minimises Σ_t L_t, one batch of every task a step; `proportional` draws mixed
            batches from all examples, so that tasks count by their size.
    """

    regime: Regime = "steps"
    steps: int = Field(2000, ge=1)
    epochs: int = Field(1, ge=1)
    batch_size: int = Field(128, ge=1)
    accumulate: int = Field(1, ge=1)
    optimiser: Literal["adamw", "sgd"] = "adamw"
    momentum: float = Field(0.0, ge=0.0, lt=1.0)
    learning_rate: float = Field(1e-5, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    warmup: float = Field(0.1, ge=0.0, lt=1.0)
    schedule: Literal["cosine", "constant"] = "cosine"
    gradient_clip: float = Field(1.0, ge=0.0)
    precision: Precision = "float32"
    fused: bool = True
    batch_norm: Literal["frozen", "updated"] = "frozen"
    deterministic: bool = False
    compile: bool = False
    save_every: int = Field(100, ge=1)
    keep_epochs: bool = False
    sampling: Literal["sum", "proportional"] = "sum"
    iterative: IterativeSettings = Field(IterativeSettings.model_validate({}))
    lora: LoraSettings = Field(LoraSettings.model_validate({}))

    @field_validator("regime", mode="before")
    @classmethod
    def _check_regime(cls, regime: Any) -> Any:
        if isinstance(regime, str) and regime not in get_args(Regime):
            raise unknown_name("regime", regime, get_args(Regime))
        return regime

    @model_validator(mode="after")
    def _rounds_fit(self) -> Self:
        if self.regime == "iterative":
            self.steps_per_round(1)  # whether the rounds divide the steps does not depend on the length of an epoch
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimiser steps of the whole run, given those of one pass over the examples."""
        if self.regime in ("epochs", "full_batch_gd"):
            return self.epochs * steps_per_epoch
        if self.regime == "one_epoch":
            return steps_per_epoch
        if self.regime == "iterative" and self.iterative.per_round == "one_epoch":
            return self.iterative.rounds * steps_per_epoch
        return self.steps

    def steps_per_round(self, steps_per_epoch: int) -> int:
        """Return K = S/N of the regime `iterative`; refuse N that does not divide S."""
        total, rounds = self.total_steps(steps_per_epoch), self.iterative.rounds
        if total % rounds:
            lower = total // rounds * rounds
            fitting = " or ".join(str(steps) for steps in (lower, lower + rounds) if steps)
            raise MergeflowError(
                f"regime iterative: {total} steps cannot be shared equally by {rounds} rounds: "
                f"set finetune.steps to {fitting}, or choose rounds that divide {total}."
            )
        return total // rounds
