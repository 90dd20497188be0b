"""Merging on a device: which methods gain by it, and AdaMerging's memory."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.merging.devices import DEFAULTS, merge_there, table
from benchmarks.merging.shapes import DECODERS, MODELS, make_checkpoints
from benchmarks.on_device.common import Row, Shape, fresh, peak_gib, place, task
from mergeflow.evaluation.adamerging import entropy_gradient
from mergeflow.evaluation.statistics import diagonal_fisher, input_grams
from mergeflow.merging import Recipe, configure, make_recipe, merge
from mergeflow.merging.learned import learn
from mergeflow.modality import Model, Predictions

# Two spectral methods, of which most is expected, and the element-wise ones.
_FIRST = ("cart", "tsv", "ties", "dare", "task_arithmetic")


def vit_b_32(rehearse: bool) -> Iterator[Row]:
    """8 experts of ViT-B/32."""
    yield from _table(rehearse, "ViT-B-32", 8, *_FIRST, "della", "iso_c")


def vit_l_14(rehearse: bool) -> Iterator[Row]:
    """4 experts of ViT-L/14: 8 would not come through in the time."""
    yield from _table(rehearse, "ViT-L-14", 4, *_FIRST)


def decoder(rehearse: bool) -> Iterator[Row]:
    """3 experts of a decoder with 1.2 B parameters in bfloat16."""
    yield from _table(rehearse, "Llama-3.2-1B", 3, *reversed(_FIRST))  # the spectral ones take longest


def profile(rehearse: bool) -> Iterator[Row]:
    """Where the seconds of element-wise merges go: what the device computes and copies, and the processor's operations.

    Time that is in neither column is reading, writing and waiting of Python's threads.
    """
    for model in ["tiny"] if rehearse else ["ViT-B-32", "ViT-L-14"]:
        with TemporaryDirectory() as folder:
            base, experts = make_checkpoints(Path(folder), model, 4, place(rehearse))
            for method, args in {"task_arithmetic": {}, "ties": {"keep": 0.2}, "dare": {}}.items():
                names = {f"e{number}": str(path) for number, path in enumerate(experts)}
                recipe = make_recipe({
                    "method": method, "args": args, "base": str(base), "experts": names,
                    "device": str(place(rehearse)), "out": str(Path(folder) / "out.safetensors"),
                })  # fmt: skip
                merge(recipe)  # starts the device, warms the page cache
                yield {"model": model, "method": method, **_profiled(recipe)}


def _profiled(recipe: Recipe) -> Row:
    # Without the configuration only this thread's operations are seen; merging happens in others.
    every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every_thread) as profiler:
        took = merge(recipe).seconds
    events = profiler.key_averages()
    # An operation is given its kernels' time a second time.
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(event.self_device_time_total for event in on_device if event.key.startswith("Memcpy")) / 1e6
    computes = sum(event.self_device_time_total for event in on_device) / 1e6 - copies
    slowest = max(events, key=lambda event: event.self_cpu_time_total)
    return {
        "s": took, "s computing on the device": computes, "s copying": copies,
        "s of all threads in torch": sum(event.self_cpu_time_total for event in events) / 1e6,
        "most in": f"{slowest.key}, {slowest.self_cpu_time_total / 1e6:.2f} s",
    }  # fmt: skip


def _table(rehearse: bool, model: str, count: int, *methods: str) -> Iterator[Row]:
    """Yield the rows of `benchmarks.merging --device`; a rehearsal takes one method and a tiny model of that kind."""
    if rehearse:
        assert model in MODELS
        model, count, methods = "tiny-decoder" if model in DECODERS else "tiny", 2, methods[:1]
    with TemporaryDirectory() as folder:
        device = str(place(rehearse))
        _start(Path(folder), device, methods)
        base, experts = make_checkpoints(Path(folder), model, count, device)
        job = {"base": base, "experts": experts, "out": str(Path(folder) / "out.safetensors")}
        for row in table(merge_there, job, device, methods):
            here, there = row["cpu"]["seconds"], row[device]["seconds"]
            yield {
                "method": row["method"], "processor": here, "device": there, "ratio": here / there,
                "share of transfers": row["share"],
            }  # fmt: skip


def _start(folder: Path, device: str, methods: tuple[str, ...]) -> None:
    """Merge tiny models by each method: the device loads kernels and libraries when they are first used."""
    base, experts = make_checkpoints(folder, "tiny", 2, device)
    for method in methods:
        merge_there({
            "base": base, "experts": experts, "out": str(folder / "out.safetensors"), "method": method,
            "args": DEFAULTS[method], "device": device,
        })  # fmt: skip


def statistics(rehearse: bool) -> Iterator[Row]:
    """Fisher and Gram of one task: images a second on the device and on the processor, and where they differ most."""
    shape = Shape("pocket-clip", 4, 2, 4) if rehearse else Shape("ViT-B-32", 32, 2, 64)
    work: dict[str, Callable[[Model, Predictions], Mapping[str, Tensor]]] = {
        "fisher": diagonal_fisher,
        "gram": partial(input_grams, batch_size=shape.batch_size),
    }
    for name, measured in work.items():
        results: list[Mapping[str, Tensor]] = []
        rates, peak = [], 0.0
        for device in (torch.device("cpu"), place(rehearse)):
            torch.manual_seed(0)  # of the weights
            with fresh(device), task(shape, device) as (model, data):
                began = time.perf_counter()
                results.append(measured(model, data))  # its result lies on the processor: nothing is left to wait for
                rates.append(shape.count / (time.perf_counter() - began))
                peak = peak_gib(device)
        here, there = results
        largest = max(
            float((there[key] - value).abs().max() / value.abs().max().clamp(min=1e-30)) for key, value in here.items()
        )
        yield {
            "statistic": name, "model": shape.architecture, "images": shape.count, "images/s": rates[1],
            "on the processor": rates[0], "ratio": rates[1] / rates[0], "peak GiB": peak,
            "largest difference": largest,
        }  # fmt: skip


def adamerging(rehearse: bool) -> Iterator[Row]:
    """Layer-wise coefficients for 2, 4 and 8 experts: the device holds one batch's graph, whatever their number."""
    shape, device = Shape("pocket-clip" if rehearse else "ViT-B-32", 4 if rehearse else 16, 2, 16), place(rehearse)
    first = 0.0
    for count in (2, 3) if rehearse else (2, 4, 8):
        with fresh(device), task(shape, device) as (model, data):
            base = {name: value.cpu().clone() for name, value in model.state().items()}
            experts = {
                f"t{number}": {name: value + 1e-3 * torch.randn_like(value) for name, value in base.items()}
                for number in range(count)
            }
            tasks = dict.fromkeys(experts, data)
            call = configure("adamerging", {"steps": shape.steps, "granularity": "layer", "lr": 0.001})
            learn(call, base, experts, partial(_entropy, model, tasks, shape.batch_size), device=str(device))
        first = first or peak_gib(device)
        yield {
            "T": count, "peak GiB": peak_gib(device),
            "of that of T = 2": peak_gib(device) / first if first else 1.0,
        }  # fmt: skip


def _entropy(model: Any, tasks: Any, batch_size: int, state: Any, step: int) -> Any:
    return entropy_gradient(model, tasks, state, batch_size, 0, step)
