"""The allocator's settings: which commands choose them, and that no result depends on them."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from mergeflow.checkpoints import write_checkpoint
from mergeflow.commands import merging, sweep
from mergeflow.commands.allocation import return_freed_memory, reuse_freed_memory
from tests.command import invoke

# A process that holds a tensor of 16 MiB, and then another, and prints how many bytes the allocator has mapped apart:
# the field hblkhd of glibc's mallinfo2.
HOLDING = """
import ctypes, torch
from mergeflow.commands.allocation import reuse_freed_memory

class Counts(ctypes.Structure):
    _fields_ = [(f"field{index}", ctypes.c_size_t) for index in range(10)]

held = torch.ones(4 * 2**20)
ask = ctypes.CDLL(None).mallinfo2
ask.restype = Counts
print(ask().field4)
assert reuse_freed_memory()
more = torch.ones(4 * 2**20)
print(ask().field4)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc from 2.33 on")
def test_a_large_block_comes_from_what_was_freed_and_not_from_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDING], capture_output=True, text=True, check=True)
    default, reusing = map(int, done.stdout.split())
    assert default == reusing >= 16 * 2**20


FREED = """
from pathlib import Path
from mergeflow.commands.allocation import return_freed_memory
from tests.command import invoke

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("RssAnon"))

blocks = [bytearray(100_000) for _ in range(2000)]
del blocks[:-1]
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_what_lies_below_a_living_block_goes_back_to_the_system() -> None:
    freed = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(freed.stdout) > 150_000  # KiB, of 195 000


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not reuse_freed_memory()
    return_freed_memory()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "a", "b"):
        weights = {"attn.weight": torch.randn(300, 200, generator=generator), "bias": torch.zeros(4)}
        write_checkpoint(tmp_path / f"{name}.safetensors", weights)
    (tmp_path / "recipe.yaml").write_text(
        f"method: slerp\nargs: {{t: 0.3}}\nbase: {tmp_path}/base.safetensors\n"
        f"experts: {{a: {tmp_path}/a.safetensors, b: {tmp_path}/b.safetensors}}\nout: {tmp_path}/merged.safetensors\n"
    )
    return tmp_path / "recipe.yaml"


def test_merge_chooses_them_and_writes_the_same_bytes(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    app = Typer(pretty_exceptions_enable=False)
    merging.add_commands(app)
    written = []
    for choose in (lambda: calls.append(False), lambda: calls.append(reuse_freed_memory())):
        monkeypatch.setattr(merging, "reuse_freed_memory", choose)
        result = CliRunner().invoke(app, ["merge", str(recipe)])
        assert result.exit_code == 0, result.output
        written.append((recipe.parent / "merged.safetensors").read_bytes())
    assert len(calls) == 2
    assert written[0] == written[1]


def test_a_sweep_chooses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(sweep, "reuse_freed_memory", lambda: calls.append(True))
    invoke(sweep.add_commands, "sweep", tmp_path / "absent.yaml")
    assert calls == [True]
