"""The disk is asked for what a merge reads before it is read, and for nothing else."""

import os
from itertools import pairwise

import pytest

from mergeflow.checkpoints import reader
from mergeflow.merging import merge
from mergeflow.merging.execution import engine
from tests.merging.helpers import recipe


@pytest.mark.parametrize(("method", "ahead"), [("task_arithmetic", 1), ("task_arithmetic", 2**20), ("cart", 2**20)])
def test_every_byte_is_announced_once(method, ahead, files, monkeypatch):
    expected = merge(recipe(files, method=method), files / "first.safetensors").fingerprint
    asked, real = [], os.posix_fadvise

    def advise(descriptor, start, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), start, length))
        real(descriptor, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(engine, "_AHEAD", ahead)
    monkeypatch.setattr(reader, "_in_memory", lambda *_: False)
    assert merge(recipe(files, method=method)).fingerprint == expected
    for name in ("base", "expert0", "expert1", "expert2"):
        spans = sorted((start, length) for file, start, length in asked if file == f"{name}.safetensors" and length)
        size = (files / f"{name}.safetensors").stat().st_size
        assert sum(length for _, length in spans) == size - spans[0][0]
        assert all(start + length <= next_ for (start, length), (next_, _) in pairwise(spans))


def test_what_is_in_memory_is_not_announced(files, monkeypatch):
    expected = merge(recipe(files), files / "first.safetensors").fingerprint  # which leaves them in the page cache
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *announced: asked.append(announced))
    assert merge(recipe(files)).fingerprint == expected
    assert not asked


def test_where_nobody_can_tell_what_is_in_memory_all_is_announced(files, monkeypatch):
    expected = merge(recipe(files), files / "first.safetensors").fingerprint
    asked = []
    monkeypatch.delattr(os, "RWF_NOWAIT")
    monkeypatch.setattr(os, "posix_fadvise", lambda *announced: asked.append(announced))
    assert merge(recipe(files)).fingerprint == expected
    assert asked


def test_a_system_that_cannot_be_asked_merges_all_the_same(files, monkeypatch):
    expected = merge(recipe(files), files / "first.safetensors").fingerprint
    monkeypatch.delattr(os, "posix_fadvise")
    assert merge(recipe(files)).fingerprint == expected
