"""Fine-tuning on a device: images a second beside a plain loop, hours of MIMA, a step of a language model with LoRA."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.on_device.common import (
    Row,
    Shape,
    fresh,
    matmul_flops,
    peak_gib,
    place,
    seconds,
    step_flops,
    synchronize,
    task,
)
from mergeflow.checkpoints import write_checkpoint
from mergeflow.memory import Workload
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.modality import MODALITY
from mergeflow.modalities.vision.sections import DataSection, ModelSection
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, IterativeRun, fine_tune
from mergeflow.training.arithmetic import arithmetic

WARM = 0.4  # share of the steps before the clock starts: allocations, autotuning, compilation
# What says most comes first, and what takes longest last: a section that is stopped keeps the rows that it has.
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, compiled": {"precision": "bfloat16", "compile": True},
    "bfloat16, deterministic": {"precision": "bfloat16", "deterministic": True},
    "tf32": {"precision": "tf32"},
    "float32": {},
}


def finetune(rehearse: bool) -> Iterator[Row]:
    """Our loop and the plain one in each precision, as ratios of one run; the peak beside what is foretold of it."""
    shapes = [Shape("ViT-B-32", 128, 50, 2048), Shape("ViT-L-14", 64, 30, 1024)]
    variants = VARIANTS
    if rehearse:
        shapes, variants = [Shape("pocket-clip", 4, 5, 16)], {"float32": {}, "bfloat16": {"precision": "bfloat16"}}
    device = place(rehearse)
    peak = matmul_flops(device, rehearse)
    for shape in shapes:
        with task(shape, device) as (model, data):
            flops, foretold = step_flops(model, data), dict[bool, float]()
            for name, changes in variants.items():
                half = changes.get("precision") == "bfloat16"  # the other settings take the same memory, about
                if half not in foretold:
                    foretold[half] = foretold_gib(shape, changes, data.inputs.shape[1])
                with fresh(device, model):
                    ours = ours_per_second(model, data, shape, changes)
                    memory = peak_gib(device)
                with fresh(device, model), arithmetic(tf32=name == "tf32"):
                    plain = plain_per_second(model, data, shape, changes)
                yield {
                    "model": shape.architecture,
                    "precision": name,
                    "batch": shape.batch_size,
                    "images/s": ours,
                    "plain loop": plain,
                    "of the plain loop": ours / plain,
                    "TFLOP/s": ours * flops / 1e12,
                    "of the bf16 peak": ours * flops / peak,
                    "peak GiB": memory,
                    "foretold GiB": foretold[half],
                }


def foretold_gib(shape: Shape, changes: dict[str, Any], side: int) -> float:
    """Return the memory that `mergeflow check` predicts for a step.

    Args:
        shape: the model and the batch size.
        changes: as of `ours_per_second`.
    """
    section, data = ModelSection(architecture=shape.architecture, pretrained=""), DataSection(image_size=side)
    workload = Workload.of(MODALITY, section, {}, data, 10)
    assert workload is not None
    step, _ = workload.training(settings_of(shape, changes))
    return step.total / 2**30


def settings_of(shape: Shape, changes: dict[str, Any]) -> FineTuneSettings:
    """Return the settings of a run that saves nothing on its way."""
    plain = FineTuneSettings(steps=shape.steps, batch_size=shape.batch_size, save_every=10**6)
    return plain.model_copy(update=changes)


def ours_per_second(model: Network, data: Classification, shape: Shape, changes: dict[str, Any]) -> float:
    """Return the images a second of `fine_tune`, without the first steps.

    Args:
        model: the network, on its device.
        data: labelled images with their head.
        shape: steps and batch size.
        changes: settings of `FineTuneSettings`, such as `precision` and `compile`.
    """
    settings = settings_of(shape, changes)
    warm, clock, device = int(shape.steps * WARM), list[float](), data.labels.device

    def report(done: int, total: int) -> None:
        if done in (warm, total):
            synchronize(device)
            clock.append(time.perf_counter())

    with TemporaryDirectory() as folder:
        fine_tune(model, [data], settings, 0, Path(folder) / "state.pt", lambda: 0.0, report)
    return (shape.steps - warm) * shape.batch_size / (clock[1] - clock[0])


def plain_per_second(model: Network, data: Classification, shape: Shape, changes: dict[str, Any]) -> float:
    """Return the images a second of a loop as open_clip's `train_one_epoch` has it: loader, autocast, AdamW, clip.

    Args: As of `ours_per_second`.
    """
    device, bfloat16 = data.labels.device, changes.get("precision") == "bfloat16"
    module: Any = torch.compile(model.module) if changes.get("compile") else model.module
    optimiser = torch.optim.AdamW(model.module.parameters(), lr=1e-5, weight_decay=0.1)
    pixels, cuda = data.inputs, device.type == "cuda"
    assert isinstance(pixels, torch.Tensor)
    loader = DataLoader(
        TensorDataset(pixels, data.labels.cpu()), shape.batch_size, shuffle=True,
        num_workers=4 * cuda, pin_memory=cuda, persistent_workers=cuda,  # an epoch here is short: none starts processes
    )  # fmt: skip
    warm, done, began = int(shape.steps * WARM), 0, 0.0
    while done < shape.steps:
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimiser.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                features = module(images)
            assert data.head is not None
            nn.functional.cross_entropy(data.head(features.float()), labels).backward()
            nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
            optimiser.step()
            done += 1
            if done == warm:
                synchronize(device)
                began = time.perf_counter()
            if done == shape.steps:
                break
    synchronize(device)
    return (shape.steps - warm) * shape.batch_size / (time.perf_counter() - began)


def mima(rehearse: bool) -> Iterator[Row]:
    """Two tasks of one round of MIMA as they are on disk, and from them the hours of 8 tasks and 20 rounds."""
    shape = Shape("pocket-clip", 4, 4, 16) if rehearse else Shape("ViT-B-32", 128, 100, 2048)
    device, tasks, rounds = place(rehearse), 8, 20
    settings = FineTuneSettings.model_validate({
        "regime": "iterative", "steps": 2 * shape.steps, "batch_size": shape.batch_size, "precision": "bfloat16",
        "iterative": {"rounds": 2},
    })  # fmt: skip
    with TemporaryDirectory() as folder, task(shape, device) as (model, data):
        base = Path(folder) / "base.safetensors"
        write_checkpoint(base, model.state())
        run = IterativeRun(Path(folder) / "rounds", base, ("a", "b"), settings, 0)
        tuned = []
        for name in run.tasks:
            named = Classification(name, data.inputs, data.labels, data.head)
            tuned.append(seconds(lambda named=named: run.tune(1, model, named, lambda: 0.0), device))  # type: ignore[misc]
        merged = seconds(lambda: run.merge(1), device) * tasks / len(run.tasks)
    hours = rounds * (tasks * tuned[-1] + merged) / 3600
    yield {
        "model": shape.architecture, "steps a round": shape.steps, "batch": shape.batch_size,
        "s a task and round": tuned[-1], "the first": tuned[0], "s a merge of 8": merged,
        "predicted hours of 8 tasks, 20 rounds": hours,
    }  # fmt: skip


def causal(rehearse: bool) -> Iterator[Row]:
    """A training step of a random decoder of 1.2 B parameters with LoRA on its attention, in bfloat16."""
    missing = [name for name in ("transformers", "peft") if find_spec(name) is None]
    if missing:
        yield {"model": "decoder, 1.2 B", "skipped": f"{', '.join(missing)} not installed"}
        return
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    device, width, layers, length = place(rehearse), 2048, 22, 1024
    if rehearse:
        width, layers, length = 32, 2, 16
    config = LlamaConfig(
        vocab_size=32 if rehearse else 32000, hidden_size=width, intermediate_size=width * 11 // 4, 
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if rehearse else width // 64,
    )  # fmt: skip
    with fresh(device):
        with torch.device(device):
            plain: Any = LlamaForCausalLM(config).to(torch.bfloat16)
        model = get_peft_model(plain, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
        optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        tokens = torch.randint(0, config.vocab_size, (2 if rehearse else 4, length), device=device)

        def step() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()

        step()
        took = seconds(lambda: [step() for _ in range(2 if rehearse else 10)], device) / (2 if rehearse else 10)
        yield {
            "model": f"decoder, {sum(p.numel() for p in plain.parameters()) / 1e9:.2f} B", "batch": list(tokens.shape),
            "s a step": took, "tokens/s": tokens.numel() / took, "peak GiB": peak_gib(device),
        }  # fmt: skip
