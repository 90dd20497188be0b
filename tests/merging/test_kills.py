"""Killed at any point, a merge leaves nothing under its output's name, and a sharded one goes on where it stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.merging import make_recipe, merge
from tests.merging.helpers import awkward, recipe

KILLED = """
import sys, time
from pathlib import Path
from mergeflow.merging import make_recipe, merge
import mergeflow.merging.files.job as module
folder = Path(sys.argv[1])
real = module.StreamWriter.commit
def slow(self, *a):
    done = real(self, *a)
    print("committed", self.path.name, flush=True)
    time.sleep(0.3 if "00001" in self.path.name else 60)
    return done
def stuck(self, name, start, piece):
    print("writing", flush=True)
    time.sleep(60)
if sys.argv[2] == "shards":
    module.StreamWriter.commit = slow
else:
    module.StreamWriter.write = stuck
merge(make_recipe(eval(sys.argv[3])))
"""


def kill_after(folder, mode, values, line):
    command = [sys.executable, "-c", KILLED, str(folder), mode, repr(values)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            if text.startswith(line):
                break
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_killed_half_way_a_file_leaves_nothing(files):
    before = sorted(files.iterdir())
    kill_after(files, "file", recipe(files).model_dump(mode="json"), "writing")
    assert sorted(files.iterdir()) == before


@pytest.mark.slow
def test_a_killed_sharded_merge_resumes(files):
    values = recipe(files, out=str(files / "out"), shard_size=600, method="ties").model_dump(mode="json")
    kill_after(files, "shards", values, "committed model-00002")
    assert not (files / "out").exists()
    partial = files / ".out.partial"
    written = {path.name: path.stat().st_mtime_ns for path in partial.glob("model-0000[1]*")}
    assert written
    time.sleep(0.01)
    result = merge(make_recipe(values), resume=True)
    assert {name: (files / "out" / name).stat().st_mtime_ns for name in written} == written
    plain = merge(recipe(files, method="ties"))
    assert (result.fingerprint, result.inputs) == (plain.fingerprint, plain.inputs)
    assert not partial.exists()


@pytest.mark.slow
def test_resume_starts_again_when_an_input_changed(files):
    values = recipe(files, out=str(files / "out"), shard_size=600).model_dump(mode="json")
    kill_after(files, "shards", values, "committed model-00002")
    _, experts = awkward(torch.float32, seed=1)
    write_checkpoint(files / "expert0.safetensors", experts["expert0"])
    result = merge(make_recipe(values), resume=True)
    assert result.fingerprint == merge(recipe(files)).fingerprint
