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


@pytest.mark.parametrize(("lacking", "announced"), [(None, False), ("RWF_NOWAIT", True), ("posix_fadvise", False)])
def test_what_is_in_memory_is_announced_where_nobody_can_tell(lacking, announced, files, monkeypatch):
    expected = merge(recipe(files), files / "first.safetensors").fingerprint  # which leaves them in the page cache
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *span: asked.append(span))
    if lacking is not None:
        monkeypatch.delattr(os, lacking)
    assert merge(recipe(files)).fingerprint == expected
    assert bool(asked) == announced
