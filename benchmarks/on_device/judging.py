"""Judging on a device: images a second in each precision, what it changes, and what a sweep's candidate adds."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.on_device.common import Row, Shape, fresh, matmul_flops, peak_gib, place, seconds, task
from benchmarks.vision.evaluation import Ours, draw
from mergeflow.evaluation import CandidateScorer, Judge, example_scores
from mergeflow.merging import configure
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import POCKET, load_clip
from mergeflow.modality import Network
from mergeflow.training.settings import Precision


def judging(rehearse: bool) -> Iterator[Row]:
    """Accuracy on the embedded suite by precision; then every way on random images, beside float32.

    There the share of equal predictions is that of random weights.
    """
    shapes = [Shape("ViT-B-32", 256, 3, 2000), Shape("ViT-L-14", 256, 2, 500)]
    if rehearse:
        shapes = [Shape("pocket-clip", 4, 1, 6)]
    device = place(rehearse)
    peak = matmul_flops(device, rehearse)
    yield from _embedded(device, 2 if rehearse else 300)
    for shape in shapes:
        with task(shape, device) as (model, data):
            flops, rates, scores = forward_flops(model, data), list[float](), list[np.ndarray]()
            for name, judge in _ways(model, shape.batch_size, rehearse):
                with fresh(device):
                    scores.append([judge(data) for _ in range(2)][1])  # the second pass keeps images on the device
                    took = sum(seconds(partial(judge, data), device) for _ in range(shape.steps))
                    memory = peak_gib(device)
                rates.append(shape.steps * shape.count / took)
                yield {
                    "model": shape.architecture, "precision": name, "images/s": rates[-1],
                    "of float32": rates[-1] / rates[0], "of the bf16 peak": rates[-1] * flops / peak,
                    "same scores": float((scores[-1] == scores[0]).mean()), "peak GiB": memory,
                }  # fmt: skip


def _ways(
    model: Network, batch_size: int, rehearse: bool
) -> Iterator[tuple[str, Callable[[Classification], np.ndarray]]]:
    for precision in get_args(Precision):
        yield precision, Judge(model, batch_size, precision).scores
    yield (
        "bfloat16, images from the processor",
        partial(example_scores, model, batch_size=batch_size, precision="bfloat16"),
    )
    if not rehearse:  # a compiler takes longer than all the rest
        yield "bfloat16, compiled", Judge(model, batch_size, "bfloat16", compile=True).scores


def _embedded(device: torch.device, count: int) -> Iterator[Row]:
    clip = load_clip(POCKET, "pocket8", device)
    pictures, points = draw(count, clip.image_size), list[float]()
    for precision in get_args(Precision):
        points.append(100 * float(torch.cat(Ours(clip, pictures, 256, precision).predict()).double().mean()))
        yield {
            "model": "pocket8", "precision": precision, "accuracy": points[-1],
            "points from float32": points[-1] - points[0],
        }  # fmt: skip


def forward_flops(model: Network, data: Classification) -> float:
    """Return the floating-point operations of a forward pass for one image."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        data.scores(model, torch.arange(2))
    return counter.get_total_flops() / 2


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
        judge = Judge(model, shape.batch_size, "bfloat16")
        _, _, alone = (seconds(partial(judge.scores, data), device) for _ in range(3))
        for method, args in {"task_arithmetic": {}, "ties": {"keep": 0.2}}.items():
            calls = [configure(method, {**args, "scale": scale}) for scale in (0.1, 0.2, 0.3, 0.4)]
            first, *others = (seconds(partial(scorer.candidate, call), device) for call in calls)
            another = float(np.median(others))
            yield {
                "model": shape.architecture, "method": method, "s of the forward passes": alone,
                "s of the first": first, "s of another scale": another, "of the forward passes": another / alone,
            }  # fmt: skip
