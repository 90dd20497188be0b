"""What statistics and AdaMerging take of a CUDA device, before they start."""

from functools import partial

from torch import Tensor

from mergeflow.evaluation.adamerging import AdamergeOrder, entropy_gradient
from mergeflow.evaluation.statistics import StatisticOrder, diagonal_fisher, forward_rows, input_grams
from mergeflow.memory import Forecast, Need, Work, fewer, forecast_on
from mergeflow.memory.described import described
from mergeflow.memory.forecast import TOO_SMALL
from mergeflow.modality import Model, Predictions


def foretell_statistic(order: StatisticOrder) -> Forecast:
    """Return what a statistic takes: of the Fisher information one example, of a Gram one batch.

    Args:
        order: what will be measured.

    Raises:
        MergeflowError: inputs that are missing.
    """
    found = described(order.architecture, [order.task])
    if found is None:
        return forecast_on(order.device)
    if order.kind == "fisher":
        # Sums in float64, of results in float32.
        need = found.need(diagonal_fisher, 1, sums=2)
        return forecast_on(order.device, Work("statistics fisher", need, lambda free: TOO_SMALL))
    rows = forward_rows(order)

    def gram(count: int) -> Need:
        return found.need(partial(input_grams, batch_size=count), count, sums=2)

    smaller = partial(fewer, "--batch-size", rows, gram, "the result is the same but for rounding")
    return forecast_on(order.device, Work("statistics gram", gram(rows), smaller))


def foretell_coefficients(order: AdamergeOrder, device: str) -> Forecast:
    """Return what a step of AdaMerging takes, whatever the number of tasks and experts.

    Args:
        order: what coefficients are learned from.
        device: the recipe's.

    Raises:
        MergeflowError: inputs that are missing.
    """
    found = described(order.architecture, order.tasks.values())
    if found is None:
        return forecast_on(device)

    def step(count: int) -> Need:
        return found.need(two_steps, count)

    smaller = partial(fewer, "--batch-size", order.batch_size, step, "the batches, and so the result, are others")
    return forecast_on(device, Work("adamerge: a step", step(order.batch_size), smaller))


def two_steps(model: Model, examples: Predictions) -> dict[str, Tensor]:
    """Hold at once what two steps of AdaMerging hold: at the second, the first one's gradient is still there.

    Args:
        model: Its module is put into evaluation mode.
        examples: One batch.

    Returns:
        The gradient by tensor name.
    """
    gradients: dict[str, Tensor] = {}
    for step in range(2):
        merged = {name: value.clone() for name, value in model.state().items()}
        gradients = entropy_gradient(model, {"one": examples, "other": examples}, merged, len(examples), 0, step)[1]
    return gradients
