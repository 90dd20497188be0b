"""What statistics, AdaMerging and perplexity take of a CUDA device, before they start."""

from functools import partial
from types import SimpleNamespace

from torch import Tensor

from mergeflow.evaluation.adamerging import AdamergeOrder, entropy_gradient
from mergeflow.evaluation.statistics import StatisticOrder, diagonal_fisher, forward_rows, input_grams
from mergeflow.memory import Forecast, Need, Work, Workload, described, same_result
from mergeflow.modality import Model, Predictions


def estimate_statistic_memory(order: StatisticOrder) -> Forecast:
    """Predict what a statistic takes: of the Fisher information one example, of a Gram one batch."""
    workload = described(order.architecture, [order.task])
    if workload is None:
        return Forecast.on(order.device)

    def needs(rows: int) -> Need:  # sums are in float64, results in float32
        statistic = diagonal_fisher if order.kind == "fisher" else partial(input_grams, batch_size=rows)
        return workload.need(statistic, rows, sums=2)

    rows = 1 if order.kind == "fisher" else forward_rows(order)
    return Forecast.on(order.device, Work(f"statistics {order.kind}", needs, rows, same_result("--batch-size")))


def estimate_coefficients_memory(order: AdamergeOrder, device: str) -> Forecast:
    """Predict what a step of AdaMerging takes, whatever the number of tasks and experts."""
    workload = described(order.architecture, order.tasks.values())
    if workload is None:
        return Forecast.on(device)

    def way_out(rows: int) -> str:
        return f"Set --batch-size to {rows}: the batches, and so the result, are others"

    return Forecast.on(device, Work("adamerge: a step", partial(workload.need, two_steps), order.batch_size, way_out))


def two_steps(model: Model, examples: Predictions) -> dict[str, Tensor]:
    """Hold at once what two steps of AdaMerging hold, and return a gradient by tensor name.

    At the second step the first one's gradient is still there. The model's module is put into evaluation mode.
    """
    gradients: dict[str, Tensor] = {}
    for step in range(2):
        merged = {name: value.clone() for name, value in model.state().items()}
        gradients = entropy_gradient(model, {"one": examples, "other": examples}, merged, len(examples), 0, step)[1]
    return gradients


def estimate_perplexity_memory(config: str, batch_size: int, block: int, device: str) -> Forecast:
    """Predict what the perplexity of a split takes, by the model's config.json."""
    from mergeflow.modalities.causal.modality import MODALITY, perplexity

    workload = Workload.of(MODALITY, None, {"config": config}, SimpleNamespace(block=block), 1)
    assert workload is not None

    def judging(rows: int) -> Need:
        return workload.need(partial(perplexity, batch_size=rows), rows)

    return Forecast.on(device, Work("perplexity", judging, batch_size, same_result("--batch-size")))
