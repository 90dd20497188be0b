"""Measure what a training step spends on its input and on the record that is kept of it.

    python -m benchmarks.training.loading                          # the embedded model, batch 32
    python -m benchmarks.training.loading --model ViT-B-32 --batch-size 16 --steps 2
    python -m benchmarks.training.loading --device cuda --model ViT-B-32 --batch-size 128

Input: choosing the batch's indices, gathering its decoded images on the device, normalising them. Record: the sums of
loss and gradients, each step. Row: what closes an epoch, once. On a CPU processor time
of one thread counts, on CUDA wall time.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import POCKET, ImageEncoder, load_clip
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, Trajectory, fine_tune, plan_batches

WARM = 2


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time a piece of work: processor time on a CPU, wall time on CUDA."""
    cuda = device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    if cuda:
        torch.cuda.synchronize(device)
    began = clock()
    work()
    if cuda:
        torch.cuda.synchronize(device)
    return clock() - began


def measure(model: str, batch_size: int, steps: int, images: int, device: torch.device) -> dict[str, float]:
    """Return seconds per step, `whole` and of it `input` and `record`; and per epoch, `row`.

    Args:
        model: an architecture of open_clip, or the embedded one.
        batch_size: images per step.
        steps: that are measured, after some that are not.
        images: how many random images there are.
        device: where training happens.
    """
    clip = load_clip(model, "pocket8" if model == POCKET else None, device)
    encoder, side = ImageEncoder(clip), clip.image_size
    pixels = torch.randint(0, 256, (images, side, side, 3), dtype=torch.uint8, device=device)
    width = encoder(pixels[:1]).shape[1]
    weight = torch.nn.functional.normalize(torch.randn(10, width, device=device), dim=1)
    head = Head(weight, 50.0, [str(label) for label in range(10)])
    data = Classification("random", pixels, torch.randint(0, 10, (images,), device=device), head)
    settings = FineTuneSettings(steps=steps, batch_size=batch_size, save_every=10**6)

    def train(count: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            chosen = settings.model_copy(update={"steps": count})
            fine_tune(Network(encoder), [data], chosen, 0, Path(folder) / "saved.pt", lambda: 0.0)

    def load() -> None:
        batches = plan_batches([images], settings, 0)
        for step in range(steps):
            for part in batches.parts(step):
                encoder.normalised_pixels(pixels[part.indices])

    gradients = [torch.randn_like(p) for p in encoder.parameters()]
    weights = [p.detach() for p in encoder.parameters()]
    trajectory = Trajectory()

    def record() -> None:
        for _ in range(steps):
            trajectory.add_gradients(gradients)
            trajectory.add_step(1.0, 1.0)

    train(WARM)
    load()
    times = {"whole": seconds(lambda: train(steps), device), "input": seconds(load, device)}
    each = {name: value / steps for name, value in {**times, "record": seconds(record, device)}.items()}
    return {**each, "row": seconds(lambda: trajectory.close_epoch(steps, weights, weights, 0.0), device)}


def main() -> None:
    """Parse the command line, measure, print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=POCKET)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    times = measure(options.model, options.batch_size, options.steps, options.images, device)
    print(f"{options.model}, batch {options.batch_size}, {options.steps} steps, {device}")
    print(f"step {1000 * times['whole']:.1f} ms")
    for part in ("input", "record"):
        print(f"  {part:6} {1000 * times[part]:8.2f} ms  {100 * times[part] / times['whole']:6.2f} %")
    print(f"row of an epoch {1000 * times['row']:.1f} ms")


if __name__ == "__main__":
    main()
