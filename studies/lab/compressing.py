"""Experts compressed into one file, and what each of them is worth when it is read back out of it."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.merging.compression.catalog import configure_compressor
from mergeflow.merging.compression.suite_file import Compressed, compress, extract_task
from studies.lab.inputs import Laboratory, State
from studies.old.rows import Row


def measure(
    inputs: Laboratory, experts: dict[str, State], name: str, args: dict[str, Any], splits: Sequence[str]
) -> Row:
    """Write one file with all tasks, read each back out of it, and return accuracies and bytes.

    Args:
        inputs: the study's inputs.
        experts: their weights by task.
        name: a compressor.
        args: its arguments.
        splits: on which each task's model is judged; the row has one entry for each.
    """
    small = compress(configure_compressor(name, args), inputs.base, experts)
    found: Row = {split: {} for split in splits}
    with TemporaryDirectory(dir=inputs.io.scratch) as folder:
        path, base = Path(folder) / "suite.safetensors", inputs.io.dep(layout.BASE_MODEL)
        small.write(path)
        for task in experts:
            state = extract_task(path, task, base)
            for split in splits:
                found[split][task] = inputs.accuracy(state, split, [task])[task]
        return found | _bytes(path, small, next(iter(experts))) | {"base": sum(t.nbytes for t in inputs.base.values())}


def _bytes(path: Path, small: Compressed, task: str) -> Row:
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
        "needs_base": small.call.method.needs_base,
    }
