"""Measure the evaluation of a candidate beside transformers' plain loop: same model, same tokens, same run.

    python -m benchmarks.text.evaluation                        # the embedded suite and its base
    python -m benchmarks.text.evaluation --spread 0.5           # texts whose lengths differ as natural ones do
    python -m benchmarks.text.evaluation --layers 12 --width 768 --examples 64 --rounds 3

A pass of each: every validation example of every task is encoded once and answered by its task's head, in batches of
the same number of examples. The suite's sentences are of nearly one length; with `--spread s` texts of random tokens
take their place, whose lengths are log-normal around 24 tokens with the standard deviation s of the logarithm.

    mergeflow        `example_scores`: groups of like length, no mask where there is no padding
    plain            batches in the split's order, padded to their longest, with an attention mask: what `Trainer` and
                     `pipeline` do with a collator that pads
    whole            as plain, but padded to the longest text that the model is given, `padding="max_length"`

Passes are interleaved after one warm pass of each; ratios are medians over rounds, of processor time (wall time on
CUDA). `same` is the share of answers that agree.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from mergeflow.data import load_split
from mergeflow.data.address import open_source
from mergeflow.data.prepare import prepare_task
from mergeflow.evaluation import example_scores
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.text.modality import TextEncoder, Tokens, build_encoder, load_encoder
from mergeflow.modalities.text.preparation import SOURCES, TRANSFORMS, decoding
from mergeflow.modalities.text.sections import DataSection
from mergeflow.modality import Network

TASKS = ("sentiment", "paraphrase", "inference", "answers")


@dataclass(frozen=True)
class Task:
    """One task's tokens and head."""

    tokens: Tokens
    labels: Tensor
    head: Head


def _prepare(root: Path, base: str, device: torch.device, width: int, count: int, max_length: int) -> list[Task]:
    """Prepare the tasks of the suite in a folder of their own and give them random heads."""
    section, tasks = DataSection(tokenizer=base, max_length=max_length), []
    for name in TASKS:
        raw = open_source(name, "suite:sentences8", SOURCES, TRANSFORMS)
        prepare_task(raw, root / name, decoding(section, root))
        data = load_split(root / name, "validation")
        tokens = Tokens(
            data.ids[:count], np.array(data.lengths[:count], np.int64), data.arrays["segments"][:count], device
        )
        weight = torch.randn(len(data.class_names), width, generator=torch.Generator().manual_seed(0))
        labels = torch.from_numpy(np.array(data.labels[:count])).to(device)
        tasks.append(Task(tokens, labels, Head(weight, 1.0, data.class_names).to(device)))
    return tasks


def _spread(task: Task, width: float) -> Task:
    """Return a task with texts of random tokens, whose lengths are log-normal around 24."""
    chance, (count, most) = np.random.default_rng(0), task.tokens.ids.shape
    lengths = np.exp(chance.normal(np.log(24), width, count)).astype(np.int64).clip(4, most)
    ids = np.where(np.arange(most) < lengths[:, None], chance.integers(5, 100, (count, most)), 0).astype(np.int32)
    tokens = Tokens(ids, lengths, np.zeros_like(ids, np.uint8), task.tokens.device)
    return Task(tokens, task.labels, task.head)


@torch.inference_mode()
def _plain(model: nn.Module, tasks: list[Task], size: int, whole: bool = False) -> list[np.ndarray]:
    """Return answers as a loop over a padding collator gives them."""
    correct = []
    for task in tasks:
        answers = []
        for rows in torch.arange(len(task.labels)).split(size):
            lengths = task.tokens.lengths[rows.numpy()]
            longest = task.tokens.ids.shape[1] if whole else int(lengths.max())
            mask = torch.from_numpy(np.arange(longest) < lengths[:, None]).long().to(task.labels.device)
            ids, segments = (
                torch.from_numpy(values[rows.numpy(), :longest].astype(np.int64)).to(task.labels.device)
                for values in (task.tokens.ids, task.tokens.segments)
            )
            hidden = model(input_ids=ids, attention_mask=mask, token_type_ids=segments).last_hidden_state
            features = (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
            answers.append((task.head(features).argmax(dim=1) == task.labels[rows]).float())
        correct.append(torch.cat(answers).cpu().numpy())
    return correct


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--base", default="sentences8", help="folder or name of a BERT")
    options.add_argument("--spread", type=float, help="of the logarithm of lengths; the suite's own texts by default")
    options.add_argument("--layers", type=int, help="a BERT of that many layers with random weights, of --width")
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--examples", type=int, default=300)
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--device", default="cpu")
    options.add_argument("--max-length", type=int, default=64)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    with TemporaryDirectory() as scratch:
        encoder = _encoder(chosen.base, chosen.layers, chosen.width).to(device)
        tasks = _prepare(Path(scratch), chosen.base, device, encoder.width, chosen.examples, chosen.max_length)
        tasks = [_spread(task, chosen.spread) for task in tasks] if chosen.spread else tasks
        _measure(encoder, tasks, chosen.batch_size, chosen.rounds, device)


def _encoder(base: str, layers: int | None, width: int) -> TextEncoder:
    if layers is None:
        return load_encoder(base, Path(), "mean")[0]
    size = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }
    return build_encoder(json.dumps({"model_type": "bert", "vocab_size": 4000, **size}), "mean")


def _measure(encoder: TextEncoder, tasks: list[Task], size: int, rounds: int, device: torch.device) -> None:
    network, model = Network(encoder), encoder.get_submodule(encoder.part)
    examples = [Classification("task", task.tokens, task.labels, task.head) for task in tasks]
    ways: dict[str, Callable[[], list[np.ndarray]]] = {
        "mergeflow": lambda: [example_scores(network, task, size) for task in examples],
        "plain": partial(_plain, model, tasks, size),
        "whole": partial(_plain, model, tasks, size, whole=True),
    }
    answers = {name: np.concatenate(way()) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(_timed(way, device))
    count = sum(len(task.labels) for task in tasks)
    print(f"{count} examples of {len(tasks)} tasks, {size} a batch, {rounds} rounds, {torch.get_num_threads()} threads")
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds["mergeflow"], strict=True))
        same = (answers[name] == answers["mergeflow"]).mean()
        print(f"{name:12} {statistics.median(times):7.3f} s   {ratio:5.2f} × mergeflow's time   same {same:.4f}")


def _timed(way: Callable[[], object], device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


if __name__ == "__main__":
    main()
