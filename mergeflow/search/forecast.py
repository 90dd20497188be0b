"""Estimate the CUDA memory of a sweep before it starts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from mergeflow.memory import Forecast, Need, Work, described, same_result
from mergeflow.merging.execution.engine import BUFFER, default_workers, device_bytes, units_of
from mergeflow.merging.files.plan import Inputs, open_inputs
from mergeflow.search.sweep import largest_rank_ratio
from mergeflow.search.sweep_file import Sweep

_CLASSES = 1000  # of a task that is not prepared yet: more than most have, and they take little
_KEEPING = ("cart", "low_rank")  # their factors stay on the device for the next rank or scale


def estimate_sweep_memory(sweep: Sweep, resolve: Callable[[str], str] | None = None) -> Forecast:
    """Estimate the memory of merging candidates and of judging them on images."""
    merging = max(_merging(sweep, resolve), key=lambda need: need.total)
    if sweep.model is None:  # a user's scorer: its memory is unknown
        return Forecast.on(sweep.device, _merging_work(merging))
    folders = [part.data for part in sweep.tasks.values() if part.data is not None]
    workload = described(sweep.model.architecture, folders, 1 if len(folders) == len(sweep.tasks) else _CLASSES)
    assert workload is not None
    judging = Work("sweep: judging", workload.judging, sweep.batch_size, same_result("batch_size"))
    merging = replace(merging, weights=judging.need.weights)
    return Forecast.on(sweep.device, _merging_work(merging), judging)


def _merging_work(need: Need) -> Work:
    return Work("sweep: merging", lambda _: need, 0, lambda _: "Set device to cpu")


def _merging(sweep: Sweep, resolve: Callable[[str], str] | None) -> Iterator[Need]:
    for method, space in sweep.methods.items():
        with open_inputs(sweep.recipe(method, {}), resolve) as inputs:
            units = list(units_of(inputs.call, inputs.model, inputs.base.infos, inputs.base.infos))
            taken = device_bytes(inputs.call, inputs.model, units, default_workers(), BUFFER)
            factors = _factors(inputs, largest_rank_ratio(method, space)) if method in _KEEPING else 0
            yield Need(0, sums=factors, merging=taken, rows=0)


def _factors(inputs: Inputs, rank_ratio: float) -> int:
    """Return the bytes of the factors that are kept of all matrices of all experts."""
    model, count = inputs.model, 0
    for unit in units_of(inputs.call, model, inputs.base.infos, model.shapes):
        if len(unit.shape) > 1:
            short, long = sorted((unit.shape[0], (unit.stop - unit.start) // unit.shape[0]))
            count += max(ceil(rank_ratio * short), short // 8) * (short + long)
    return count * len(model.experts) * model.dtype.itemsize
