"""Judging on a device: images a second in each precision and layout, and what a sweep's candidate adds to them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.on_device.common import Row, Shape, fresh, matmul_flops, peak_gib, place, seconds, task
from mergeflow.evaluation import CandidateScorer
from mergeflow.evaluation.accuracy import example_scores
from mergeflow.merging import configure
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Network
from mergeflow.training.arithmetic import arithmetic
from mergeflow.training.settings import Precision

# name: precision, whether compiled with one graph for one shape, channels last, pixels on the device
VARIANTS: dict[str, tuple[Precision, bool, bool, bool]] = {
    "float32": ("float32", False, False, False),
    "tf32": ("tf32", False, False, False),
    "bfloat16": ("bfloat16", False, False, False),
    "bfloat16, pixels on the device": ("bfloat16", False, False, True),
    "bfloat16, compiled": ("bfloat16", True, False, True),
    "bfloat16, channels last": ("bfloat16", False, True, True),
}


@arithmetic()
def judging(rehearse: bool) -> Iterator[Row]:
    """Every variant on random images, beside float32: the share of equal predictions is that of random weights."""
    shapes = [Shape("ViT-B-32", 256, 3, 2048), Shape("ViT-L-14", 256, 2, 512)]
    if rehearse:
        shapes = [Shape("pocket-clip", 4, 1, 8)]
    device = place(rehearse)
    peak = matmul_flops(device, rehearse)
    for shape in shapes:
        with task(shape, device) as (model, data):
            flops, rates, scores = forward_flops(model, data), list[float](), list[np.ndarray]()
            for name, (precision, compiled, channels_last, resident) in VARIANTS.items():
                if compiled and rehearse:
                    continue  # a compiler takes longer than all the rest
                if channels_last:
                    model.module.to(memory_format=torch.channels_last)
                judged: Any = torch.compile(model.module, dynamic=False) if compiled else model.module
                there = replace(data, inputs=data.inputs.to(device)) if resident else data  # type: ignore[union-attr]
                judge = partial(example_scores, Network(judged), there, shape.batch_size, precision)
                with fresh(device):
                    once = judge()
                    took = sum(seconds(judge, device) for _ in range(shape.steps))
                    memory = peak_gib(device)
                rates.append(shape.steps * shape.count / took)
                scores.append(once)
                yield {
                    "model": shape.architecture, "precision": name, "images/s": rates[-1],
                    "of float32": rates[-1] / rates[0], "of the bf16 peak": rates[-1] * flops / peak,
                    "same scores": float((once == scores[0]).mean()), "peak GiB": memory,
                }  # fmt: skip


def forward_flops(model: Network, data: Classification) -> float:
    """Return the floating-point operations of a forward pass for one image."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        data.scores(model, torch.arange(2))
    return counter.get_total_flops() / 2


@arithmetic()
def candidates(rehearse: bool) -> Iterator[Row]:
    """Seconds of a candidate of another scale beside those of its forward passes alone; the goal is at most 1.2."""
    shape = Shape("pocket-clip", 4, 1, 8) if rehearse else Shape("ViT-B-32", 256, 1, 2048)
    device = place(rehearse)
    with task(shape, device) as (model, data):
        base = {name: value.cpu().clone() for name, value in model.state().items()}
        experts = {
            f"expert_{number}": {name: value + 1e-3 * torch.randn_like(value) for name, value in base.items()}
            for number in range(2 if rehearse else 4)
        }
        scorer = CandidateScorer(model, {"random": data}, base, experts, precision="bfloat16")
        scorer.state(base)
        alone = seconds(partial(example_scores, model, data, shape.batch_size, "bfloat16"), device)
        for method, args in {"task_arithmetic": {}, "ties": {"keep": 0.2}}.items():
            calls = [configure(method, {**args, "scale": scale}) for scale in (0.1, 0.2, 0.3, 0.4)]
            first, *others = (seconds(partial(scorer.candidate, call), device) for call in calls)
            another = float(np.median(others))
            yield {
                "model": shape.architecture, "method": method, "s of the forward passes": alone,
                "s of the first": first, "s of another scale": another, "of the forward passes": another / alone,
            }  # fmt: skip
