"""Linear methods: sums of task vectors."""

from __future__ import annotations

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.method import NORMALIZE, Args, Copies, Parts, Stack, method


class AverageArgs(Args):
    normalize: bool = Field(True, description="divide the weights by their sum; else Σ w_t θ_t is taken as it is")

    @property
    def needs_base(self) -> bool:
        return self.scale != 1


class TaskArithmeticArgs(Args):
    scale: float = Field(0.3, description="factor of the summed task vectors; any real number, 1/T is the average")
    normalize: bool = Field(False, description=NORMALIZE)


class PassthroughArgs(Args):
    scale: float = Field(1.0, description="factor of the weights; by filters of names, 0 switches parts of a model off")

    @property
    def needs_base(self) -> bool:
        return False


@method(
    "passthrough",
    PassthroughArgs,
    elementwise=True,
    anchor="0",
    weights="none",
    experts=(1, 1),
    on_device=Copies(0, 5.5),
)
def passthrough(stack: Stack, args: PassthroughArgs) -> Parts:
    """One model as it is: the last step behind slices of layers, or of other steps.

    θ = scale · θ_1

    Property:
        With scale 1 and without a base the result is the model, bit for bit.

    Source:
        Kim et al., SOLAR 10.7B (NAACL 2024), section 2: depth up-scaling, layers of a model put one behind the other.
    """
    tau = stack.taus[0]
    # −0 + x is x for every x, −0 among them; 0 + x is not.
    return torch.full_like(stack.base, -0.0), torch.where(tau == 0, stack.base, stack.base + tau)


@method(
    "average",
    AverageArgs,
    elementwise=True,
    weights="shares",
    linear=lambda args: args.normalize,
    on_device=lambda args: Copies(1, 3 if args.normalize else 4),
)
def average(stack: Stack, args: AverageArgs) -> Parts:
    """Mean of the experts; with weights, their soup.

    θ = θ0 + scale · Σ w_t τ_t / Σ w_t, or θ0 + scale · (Σ w_t θ_t − θ0) without `normalize`

    Property:
        With scale 1 the result is the mean of the experts, whatever the base.

    Source:
        Wortsman et al., Model soups (ICML 2022), the uniform soup of section 2.
    """
    if not args.normalize:
        # Σ w_t θ_t − θ0, with θ_t = θ0 + τ_t.
        return stack.base, stack.weighted.sum(0) + stack.base * (sum(stack.model.weights) - 1)
    total = float(torch.tensor(stack.model.weights, dtype=torch.float64).sum())
    return stack.base, stack.weighted.sum(0) / total


@method("task_arithmetic", TaskArithmeticArgs, elementwise=True, linear=True, on_device=Copies(1, 2))
def task_arithmetic(stack: Stack, args: TaskArithmeticArgs) -> Parts:
    """Sum of the task vectors.

    θ = θ0 + scale · Σ w_t τ_t, over Σ w_t with `normalize`

    Property:
        Scale 1/T is the average; a negative scale unlearns.

    Source:
        Ilharco et al., Editing models with task arithmetic (ICLR 2023), section 2.
    """
    return stack.base, stack.total(stack.weighted, args.normalize)
