"""AdaMerging's loss: the entropy of a merged model's predictions, without labels."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.evaluation.accuracy import in_batches
from mergeflow.modality import Model, Predictions


def entropy_gradient(
    model: Model,
    tasks: Mapping[str, Predictions],
    state: Mapping[str, Tensor],
    batch_size: int = 16,
    seed: int = 0,
    step: int = 0,
) -> tuple[float, dict[str, Tensor]]:
    r"""Return the entropy of a model on one batch of each task, and its gradient in the weights.

    L = Σ_t 1/m Σ_i H(p_i) over the m predictions of a batch, H(p) = -Σ_c p_c log p_c

    Args:
        model: Its weights become those of the state.
        tasks: Examples by task; labels play no part.
        state: Weights by name.
        batch_size: B examples per task, drawn without replacement.
        seed: With `step` and the task's name, decides the batch.
        step: Which step it is.

    Returns:
        The loss, and its gradient by tensor name.

    Raises:
        MergeflowError: No task, a task without examples, or empty batches.

    Source: Yang et al., AdaMerging (ICLR 2024), section 3.2.2.
    """
    _check_examples(tasks, batch_size)
    model.module.eval()
    model.load(state)
    parameters = {name: value for name, value in model.module.named_parameters() if value.is_floating_point()}
    totals = {name: torch.zeros_like(value) for name, value in parameters.items()}
    loss = 0.0
    model.module.requires_grad_(True)
    for task in sorted(tasks):  # one task at a time: the graph of one batch is all that is held
        examples = tasks[task]
        generator = torch.Generator().manual_seed(_batch_seed(seed, task, step))
        chosen = torch.randperm(len(examples), generator=generator)[:batch_size]
        with torch.enable_grad():
            log_p = examples.log_p(model, chosen)
            entropy = -(log_p.exp() * log_p).sum(dim=1).mean()
            found = torch.autograd.grad(entropy, list(parameters.values()), allow_unused=True)
        loss += float(entropy.detach())
        for total, gradient in zip(totals.values(), found, strict=True):
            if gradient is not None:
                total += gradient
    return loss, totals


@torch.inference_mode()
def entropies(
    model: Model,
    tasks: Mapping[str, Predictions],
    state: Mapping[str, Tensor],
    batch_size: int = 256,
) -> dict[str, float]:
    """Return the mean entropy of a model's predictions on all examples of each task, in nats.

    Args:
        model: Its weights become those of the state.
        tasks: Examples by task; labels play no part.
        state: Weights by name.
        batch_size: Examples per forward pass.
    """
    _check_examples(tasks, batch_size)
    model.load(state)
    found = {}
    for task, examples in tasks.items():
        log_p = torch.cat([examples.log_p(model, rows) for rows in in_batches(len(examples), batch_size)]).double()
        found[task] = float(-(log_p.exp() * log_p).sum(dim=1).mean())
    return found


def _check_examples(tasks: Mapping[str, Predictions], batch_size: int) -> None:
    empty = sorted(task for task, found in tasks.items() if not len(found))
    if not tasks or empty or batch_size < 1:
        what = f"task '{empty[0]}' has none" if empty else f"found {len(tasks)} tasks, {batch_size} examples a batch"
        raise MergeflowError(f"adaptation needs examples of every task: {what}. Give some, or merge without adapting.")


def _batch_seed(seed: int, task: str, step: int) -> int:
    """A seed of its own for every task and step, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{task}".encode()).digest()[:7])
