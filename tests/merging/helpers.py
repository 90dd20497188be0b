"""State dicts for the tests of merging: awkward tensors, and a few numbers to check formulas by hand."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeflow.merging import Recipe, configure, make_recipe, methods, prepare
from mergeflow.merging.contract import State, awkward, statistics

__all__ = ["State", "awkward", "statistics"]  # what others have from here

# One row per method: arguments at the edge of their range, beside the defaults every test uses too.
EDGE: dict[str, list[dict[str, Any]]] = {
    "adamerging": [{"on": "cart", "init": -1.0}],
    "arcee_fusion": [{"scale": 0.5}],
    "average": [{"scale": -1.0}, {"normalize": False}],
    "breadcrumbs": [{"beta": 0.0, "gamma": 0.0}, {"beta": 1.0, "gamma": 0.0}, {"beta": 0.5, "gamma": 0.5}],
    "breadcrumbs_ties": [{"beta": 0.0, "gamma": 0.0}, {"reduce": "weighted_mean"}],
    "cart": [{"rank_ratio": 1.0}, {"rank_ratio": 1e-6, "rounding": "floor", "split_qkv": True, "matrices": "all"}],
    "consensus": [{"min_agree": 0}, {"min_agree": 3, "threshold": 0.0}],
    "dare": [{"drop": 0.0}, {"then": "ties", "keep": 0.5}, {"drop": 0.999, "seed": 7}],
    "dare_ties": [{"drop": 0.0, "keep": 0.5}, {"reduce": "sum"}],
    "della": [{"drop": 0.5, "window": 0.0}, {"then": "ties", "reduce": "sum"}],
    "della_ties": [{"drop": 0.5, "window": 0.0}, {"keep": 0.3}],
    "fisher": [{"eps": 1.0}],
    "iso_c": [{"matrices": ["embedding"]}, {"split_qkv": True}],
    "iso_cts": [{"common": 0.0}, {"common": 1.0}],
    "karcher": [{"iterations": 1}, {"tolerance": 10.0}],
    "knots": [{"then": "task_arithmetic"}, {"keep": 1.0}],
    "core_space": [{"then": "task_arithmetic"}, {"then": "tsv"}, {"then": "iso_c"}, {"keep": 1.0}],
    "lines": [{"of": "ties", "of_args": {"keep": 0.5}}, {"alpha": 0.0, "beta": 0.0}],
    "low_rank": [{"rank_ratio": 1.0}, {"rank_ratio": 0.5, "matrices": ["*.attn.*"]}],
    "magmax": [{"scale": 2.0}],
    "model_stock": [{"scale": 0.5}],
    "multislerp": [{"on": "weights"}, {"normalize": False}],
    "nearswap": [{"t": 0.0}, {"t": 10.0}],
    "nuslerp": [{"on": "weights"}, {"vectors": "rows"}, {"vectors": "columns"}],
    "passthrough": [{"scale": -1.0}, {"scale": 0.0}],
    "pcb": [{"keep": 1.0}, {"keep": 1e-9}],
    "ram": [{"epsilon": 0.0}, {"epsilon": 0.1}],
    "ram_plus": [{"over": "tensor"}, {"epsilon": 0.1, "r": 2.0}],
    "regmean": [{"off_diagonal": 0.0}, {"off_diagonal": 1.0}],
    "row_prune": [{"keep": 0.0}, {"keep": 1.0}, {"rows": "smallest", "matrices": "all", "split_qkv": True}],
    "sce": [{"keep": 0.0}, {"keep": 0.3}],
    "slerp": [{"scale": 0.5}],
    "task_arithmetic": [{"scale": 0.0}],
    "ties": [{"keep": 0.0}, {"keep": 1.0, "reduce": "sum"}, {"trim": "tensor"}],
    "tsv": [{"split_qkv": True}],
    "wudi": [{"steps": 0}, {"steps": 3, "lr": 1.0}],
}


def fitting(name: str, experts: dict[str, State]) -> dict[str, State]:
    """As many experts as a method takes."""
    return dict(list(experts.items())[: methods()[name].experts[1]])


def single_tensor(
    taus: Tensor, base: Tensor | None = None, name: str = "blocks.0.attn.weight"
) -> tuple[State, dict[str, State]]:
    """A model of a single float64 tensor, from its stack of task vectors [T, …]."""
    start = torch.zeros_like(taus[0]) if base is None else base
    return {name: start}, {f"e{index}": {name: start + tau} for index, tau in enumerate(taus)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def direction(
    merged_by: str,
    taus: Tensor,
    weights: Any = None,
    base: Tensor | None = None,
    name: str = "blocks.0.attn.weight",
    **args: Any,
) -> Tensor:
    """The direction in which a method moves a model of a single tensor, from its stack of task vectors."""
    start, experts = single_tensor(taus, base, name)
    (change,) = prepare(configure(merged_by, args), start, experts, weights).direction.values()
    return change


def svd_k(matrix: Tensor, k: int) -> Tensor:
    """The best approximation of rank k, by LAPACK."""
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[:, :k] * sigma[:k]) @ right[:k]


def orthogonal(matrix: Tensor) -> Tensor:
    """The polar factor, by LAPACK."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def agreeing_mean(taus: Tensor, keep: float) -> Tensor:
    """TIES of blocks [T, …], each trimmed to its largest entries, of which one at least stays."""
    flat = taus.reshape(len(taus), -1)
    cut = flat.abs().topk(max(1, int(keep * flat.shape[1] + 1e-9)), dim=1).values[:, -1:]
    trimmed = torch.where(flat.abs() >= cut * (1 - 1e-9), flat, 0)
    agreeing = torch.where(trimmed * trimmed.sum(0).sign() > 0, trimmed, 0)
    return (agreeing.sum(0) / (agreeing != 0).sum(0).clamp(min=1)).reshape(taus[0].shape)


def recipe(folder: Path, **changes: Any) -> Recipe:
    """A recipe for the files of the fixture `files`."""
    values = {
        "method": "task_arithmetic",
        "base": str(folder / "base.safetensors"),
        "experts": [str(folder / f"expert{index}.safetensors") for index in range(3)],
        "out": str(folder / "out.safetensors"),
    }
    return make_recipe({**values, **changes})


_KILLED = """
import sys, time
from mergeflow.merging import make_recipe, merge
import mergeflow.merging.streaming as module
real = module.StreamWriter.__enter__
def slow(self):
    writer = real(self)
    print("writing", self.path, flush=True)
    if sys.argv[2] in str(self.path):
        time.sleep(60)
    return writer
module.StreamWriter.__enter__ = slow
merge(make_recipe(eval(sys.argv[1])))
"""


def kill_at(values: dict[str, Any], where: str) -> None:
    """Merge in another process, and kill it while it writes the first file with `where` in its path."""
    command = [sys.executable, "-c", _KILLED, repr(values), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if where in line:
                break
        os.kill(process.pid, signal.SIGKILL)
