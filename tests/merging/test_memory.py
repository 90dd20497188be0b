"""The engine holds blocks, not experts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mergeflow.analysis.memory import peak_tensor_bytes
from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.merging import configure
from mergeflow.merging.learned.adamerging import learn


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
