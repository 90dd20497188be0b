"""Experts compressed into one file, and what each of them is worth when it is read back out of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.merging.compression.compressor import configure_compressor
from mergeflow.merging.compression.suite_file import Compressed, compress, extract_task
from studies.lab.inputs import Accuracy, Laboratory, State
from studies.lab.rows import Row


def measure_file(
    lab: Laboratory, experts: Mapping[str, State], name: str, args: dict[str, Any], splits: Sequence[str]
) -> tuple[dict[str, Accuracy], Row]:
    """Write one file with all tasks, read each back out of it, and return accuracies by split, and bytes.

    Args:
        lab: the study's inputs.
        experts: their weights by task.
        name: a compressor.
        args: its arguments.
        splits: on which each task's model is judged.
    """
    small = compress(configure_compressor(name, args), lab.base, experts)
    accuracy: dict[str, Accuracy] = {split: {} for split in splits}
    with TemporaryDirectory(dir=lab.io.scratch) as folder:
        path, base = Path(folder) / "suite.safetensors", lab.io.dep(layout.BASE_MODEL)
        small.write(path)
        for task in experts:
            state = extract_task(path, task, base)
            for split in splits:
                accuracy[split][task] = lab.accuracy(state, split, [task])[task]
        return accuracy, _bytes(path, small, next(iter(experts)), sum(t.nbytes for t in lab.base.values()))


def _bytes(path: Path, small: Compressed, task: str, base: int) -> Row:
    """Return the file's bytes, those of a task's own part and of the shared part, and what reading one task takes."""
    with open_checkpoint(path) as state:
        sizes = {name: info.nbytes for name, info in state.infos.items()}
    shared = sum(size for name, size in sizes.items() if name.startswith("shared/"))
    own = sum(size for name, size in sizes.items() if name.startswith(f"task/{task}/"))
    header = path.stat().st_size - sum(sizes.values())
    return {
        "file": path.stat().st_size,
        "shared": shared,
        "own": own,
        "one_task": header + shared + own,
        "all_experts": small.expert_bits // 8,
        "base": base,
        "needs_base": small.call.method.needs_base,
    }
