"""Killed at any point, a merge leaves nothing under its output's name, and a sharded one goes on where it stopped."""

import time

import pytest
import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.merging import make_recipe, merge
from tests.merging.helpers import awkward, kill_at, recipe


@pytest.mark.slow
def test_killed_half_way_a_file_leaves_nothing(files):
    before = sorted(files.iterdir())
    kill_at(recipe(files).model_dump(mode="json"), "out.safetensors")
    assert sorted(files.iterdir()) == before


@pytest.mark.slow
def test_a_killed_sharded_merge_resumes(files):
    values = recipe(files, out=str(files / "out"), shard_size=600, method="ties").model_dump(mode="json")
    kill_at(values, "model-00003")
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
    kill_at(values, "model-00003")
    _, experts = awkward(torch.float32, seed=1)
    write_checkpoint(files / "expert0.safetensors", experts["expert0"])
    result = merge(make_recipe(values), resume=True)
    assert result.fingerprint == merge(recipe(files)).fingerprint
