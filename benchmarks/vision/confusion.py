"""Ablation of the embedded base: captions confused or not, all else equal (same drawings, steps, order, weights' seed).

Run:      python benchmarks/vision/confusion.py OUT_FOLDER                 both arms, a third of the budget
          python benchmarks/vision/confusion.py OUT_FOLDER --base pocket8  the shipped base itself
Time:     about 20 minutes on two idle cores; finished parts found in OUT_FOLDER are kept
Result:   the row of pocket8 in docs/data.md
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.evaluation import accuracies, mean
from mergeflow.merging import FactorCache, MethodCall, configure, prepare
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import POCKET, build_head, image_model, load_clip
from mergeflow.modality import Model
from mergeflow.training import FineTuneSettings, fine_tune
from suites.pocket import SuiteTask, get_suite
from suites.pocket.pretraining import PretrainSettings, pretrain

TASKS = get_suite("pocket8").tasks
ARMS = {"confused": 0.7, "right": 0.0}
GRIDS = {
    "task_arithmetic": [
        {"scale": s} for s in (0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
    ],
    "ties": [{"keep": 0.2, "scale": s} for s in (0.25, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5)],
    "cart": [
        {"rank_ratio": r, "scale": s}
        for r in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.6)
        for s in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    ],
}
FINE_TUNE = FineTuneSettings(steps=300, batch_size=32, learning_rate=4e-4, precision="float32", save_every=1000)

State = dict[str, torch.Tensor]


def labelled(encoder_base: str, task: SuiteTask, split: str) -> Classification:
    """Return a split of a task with the head of a base.

    Args:
        encoder_base: the weights of the base that builds the head.
        task: a task of the suite.
        split: train, validation or test.
    """
    images, labels = (torch.from_numpy(part) for part in task.arrays(split))
    head = build_head(load_clip(POCKET, encoder_base), task.class_names, task.templates)
    return Classification(task.name, images, labels, head)


def make_expert(base: str, name: str, folder: str) -> None:
    """Fine-tune the base on a task; it runs in a worker with one thread, and not at all where the expert is there.

    Args:
        base: the base's weights.
        name: the task's.
        folder: where the expert goes, as `<name>.safetensors`.
    """
    path = Path(folder) / f"{name}.safetensors"
    if path.exists():
        return
    torch.set_num_threads(1)
    model, data = image_model(load_clip(POCKET, base)), labelled(base, TASKS[name], "train")
    fine_tune(model, [data], FINE_TUNE, 0, path.with_suffix(".resume"), lambda: 0.0)
    write_checkpoint(path, model.state())


def evaluate(model: Model, state: State, data: dict[str, Classification]) -> dict[str, float]:
    """Return the accuracies of a state, by task.

    Args:
        model: the network, whose weights are overwritten.
        state: the weights to judge.
        data: labelled images by task.
    """
    model.load(state)
    return accuracies(model, data)


def title(call: MethodCall) -> str:
    """Return a method's name with the arguments that its grid varies."""
    varied = {name for args in GRIDS[call.name] for name in args}
    return f"{call.name} ({', '.join(f'{name} {value}' for name, value in call.args.items() if name in varied)})"


def measure(base_path: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return test accuracies by row; every method's arguments are chosen on validation."""
    model = image_model(load_clip(POCKET, base_path))
    base = {name: tensor.clone() for name, tensor in model.state().items()}
    experts = {}
    for task in TASKS:
        with open_checkpoint(folder / f"{task}.safetensors") as file:
            experts[task] = {name: file[name] for name in file}
    validation = {name: labelled(base_path, task, "validation") for name, task in TASKS.items()}
    test = {name: labelled(base_path, task, "test") for name, task in TASKS.items()}
    rows = {"zero-shot": evaluate(model, base, test), "individual": {}}
    for task, expert in experts.items():
        rows["individual"] |= evaluate(model, expert, {task: test[task]})
    rows["average"] = evaluate(model, prepare(configure("average", {}), base, experts).at(1.0), test)
    for method, grid in GRIDS.items():
        groups: dict[MethodCall, list[MethodCall]] = {}
        for args in grid:
            call = configure(method, args)
            groups.setdefault(call.without_scale(), []).append(call)
        cache, results = FactorCache(), []
        for calls in groups.values():
            direction = prepare(calls[0], base, experts, cache=cache)
            scored = [(mean(evaluate(model, direction.at(call.scale), validation)), call) for call in calls]
            best, call = max(scored, key=lambda entry: entry[0])
            results.append((best, title(call), evaluate(model, direction.at(call.scale), test)))
        if len(results) > 1:
            rows |= {name: accuracy for _, name, accuracy in results}
        _, name, accuracy = max(results, key=lambda entry: entry[0])
        rows[f"{name}, chosen on validation"] = accuracy
    return rows


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print test accuracies in per cent as a Markdown table."""
    print(f"\n{title}\n\n| | {' | '.join(TASKS)} | mean |\n|---|{'---|' * (len(TASKS) + 1)}")
    for row, accuracy in rows.items():
        cells = " | ".join(f"{100 * accuracy[task]:.1f}" for task in TASKS)
        print(f"| {row} | {cells} | {100 * mean(accuracy):.2f} |")


def main() -> None:
    """Make what is missing of both arms and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--passes", type=int, default=140_000)
    parser.add_argument("--base", help="measure this base alone: a shipped one's name or a file")
    args = parser.parse_args()
    for arm, confusion in {args.base: None}.items() if args.base else ARMS.items():
        folder, started = args.out / Path(arm).stem, time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        base = args.base or str(folder / "base.safetensors")
        if confusion is not None and not Path(base).exists():
            pretrain(PretrainSettings(images=args.images, passes=args.passes, confusion=confusion), base)
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            list(pool.map(make_expert, [base] * len(TASKS), TASKS, [str(folder)] * len(TASKS)))
        print_table(arm, measure(base, folder))
        print(f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
