"""The engine holds blocks, not experts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.merging import configure
from mergeflow.merging.learned import learn
from studies.theory.peak_memory import peak_tensor_bytes


@pytest.mark.slow
def test_the_engine_s_memory_does_not_grow_with_the_number_of_experts(tmp_path):
    """Peak memory of a process that merges 4 and 16 experts of 48 MB: blocks of them are held, not the experts."""
    code = """
import os, sys, torch
from pathlib import Path
from mergeflow.checkpoints import write_checkpoint
from mergeflow.merging import make_recipe, merge
folder = Path(sys.argv[1])
state = {f"w{i}": torch.full((1024, 512), float(i)) for i in range(24)}
write_checkpoint(folder / "base.safetensors", state)
for i in range(16):
    os.link(folder / "base.safetensors", folder / f"{i}.safetensors")
del state
def peak(count):
    Path("/proc/self/clear_refs").write_text("5")
    experts = [str(folder / f"{i}.safetensors") for i in range(count)]
    recipe = {"method": "ties", "base": str(folder / "base.safetensors"), "experts": experts}
    merge(make_recipe(recipe), out=folder / "out.safetensors")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
peak(2)
print(peak(4), peak(16))
"""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc to measure a peak")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    few, many = map(float, done.stdout.split())
    assert many - few < 0.25 * 12 * 48


SPECTRAL = {
    "cart": {},
    "low_rank": {},
    "wudi": {"steps": 1},
    "tsv": {"matrices": ["*.mlp.*"]},
    "iso_c": {"matrices": ["*.mlp.*"]},
    "iso_cts": {"matrices": ["*.mlp.*"]},
    "knots": {"matrices": ["*.mlp.*"], "then": "task_arithmetic"},
    "adamerging": {"on": "cart"},
    "regmean": {},
}


@pytest.mark.nightly
def test_what_a_spectral_method_only_averages_passes_in_blocks(tmp_path):
    """Peak memory of merges of 4 experts with an embedding of 16 MB, which is averaged, and a small treated matrix."""
    code = """
import json, os, sys, torch
from pathlib import Path
from mergeflow.checkpoints import write_checkpoint
from mergeflow.merging import check_recipe, make_recipe, merge
from mergeflow.merging.execution.engine import default_workers
from mergeflow.merging.files.plan import process_bytes
folder = Path(sys.argv[1])
state = {"0.mlp.weight": torch.eye(64), "token_embedding": torch.ones(4096, 1024)}
write_checkpoint(folder / "base.safetensors", state)
del state
for i in range(4):
    os.link(folder / "base.safetensors", folder / f"{i}.safetensors")
    write_checkpoint(folder / f"gram{i}.safetensors", {"0.mlp.weight": torch.eye(64)})
def peak(method, args):
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])
    experts = {f"e{i}": str(folder / f"{i}.safetensors") for i in range(4)}
    grams = {"gram": {f"e{i}": str(folder / f"gram{i}.safetensors") for i in range(4)}} if method == "regmean" else {}
    recipe = {"method": method, "args": args, "base": str(folder / "base.safetensors"), "experts": experts}
    made = make_recipe({**recipe, "data": grams, "out": str(folder / "out.safetensors")})
    merge(made, workers=2, buffer=0)
    held = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) - before
    planned = check_recipe(made, buffer=0).peak_memory - process_bytes(default_workers(), True)
    return held / 1024, planned / 2**20
methods = json.loads(sys.argv[2])
peak("cart", {})
print(json.dumps({method: peak(method, args) for method, args in methods.items()}))
"""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc to measure a peak")
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(SPECTRAL)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    stack = (4 + 3) * 16
    assert {method: numbers for method, numbers in peaks.items() if max(numbers) > 0.3 * stack} == {}


@pytest.mark.parametrize("on", ["task_vectors", "cart"])
def test_learning_coefficients_holds_one_model_however_many_experts(on, tmp_path):
    """Bytes of tensors alive at once while AdaMerging learns from 2 and from 12 experts that lie in files."""

    def state(seed):
        generator = torch.Generator().manual_seed(seed)
        return {f"{i}.mlp.weight": torch.randn(96, 64, generator=generator) for i in range(6)}

    for number in range(13):
        write_checkpoint(tmp_path / f"{number}.safetensors", state(number))
    size = 6 * 96 * 64 * 4

    def peak(count):
        base, *experts = (open_checkpoint(tmp_path / f"{number}.safetensors") for number in range(count + 1))
        call = configure("adamerging", {"on": on, "granularity": "layer", "steps": 2})
        named = {f"e{number}": expert for number, expert in enumerate(experts)}
        return peak_tensor_bytes(lambda: learn(call, base, named, lambda state, step: (1.0, state)))

    few, many = peak(2), peak(12)
    assert many - few < 0.1 * size
    assert many < 4 * size


@pytest.mark.slow
def test_inner_products_of_many_blocks_leave_no_holes_in_memory():
    """Peak memory of a merge of a tensor of 2^26 elements, which takes no memory itself, by two workers."""
    code = """
import torch
from pathlib import Path
from mergeflow.merging import configure
from mergeflow.merging.execution.engine import Engine
from mergeflow.merging.execution.reader import model_of
from mergeflow.merging.execution.reader import Stacks
base, *experts = ({"w": torch.full((1,), float(n)).expand(2**26)} for n in range(3))
named = dict(zip("ab", experts))
engine = Engine(configure("slerp"), Stacks(base, named, model_of(base, named)), workers=2)
Path("/proc/self/clear_refs").write_text("5")
before = int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])
engine.run(lambda unit, stack, result: None)
print((int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) - before) / 1024)
"""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc to measure a peak")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 64
