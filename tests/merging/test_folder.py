"""A folder is made by one merge at a time, from shards that were verified, and keeps what is not a merge's own."""

import fcntl
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints import fingerprint, open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.merging.files import output as module
from mergeflow.merging.files.output import RECORD, OutputFolder, lock_file
from mergeflow.merging.streaming import StreamWriter
from tests.merging.helpers import recipe


class Killed(BaseException):
    """Stands for SIGKILL."""


def sharded(files, **changes):
    return recipe(files, **{"out": str(files / "out"), "shard_size": 600, **changes})


def hidden(files):
    return sorted(path.name for path in files.iterdir() if path.name.startswith("."))


def stop(files, monkeypatch, after):
    """Run a sharded merge until `after` shards are finished."""
    real, seen = OutputFolder.finish, []

    def finish(self, file, *rest):
        real(self, file, *rest)
        seen.append(file)
        if len(seen) == after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "finish", finish)
        with pytest.raises(Killed):
            merge(sharded(files))


def written(files, monkeypatch, **changes):
    """Resume, and return the result and the shards that were made anew."""
    names, real = [], StreamWriter.commit
    with monkeypatch.context() as patch:
        patch.setattr(StreamWriter, "commit", lambda self, *a: (names.append(self.path.name), real(self, *a))[1])
        return merge(sharded(files, **changes), resume=True), names


def test_one_merge_at_a_time(files, monkeypatch):
    stop(files, monkeypatch, 2)
    partial_files = sorted((files / ".out.partial").iterdir())
    with OutputFolder(files / "out"):
        for resume in (False, True):
            with pytest.raises(MergeflowError, match=r"another merge is at work on '.*out'"):
                merge(sharded(files, args={"scale": 2}), resume=resume)
        merge(recipe(files))
    assert sorted((files / ".out.partial").iterdir()) == partial_files
    (files / ".out.lock").touch()  # of a killed process
    merge(sharded(files))
    assert not hidden(files)


def test_a_lock_is_one_s_until_it_is_closed(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    first = lock_file(path)
    assert lock_file(path) is None
    path.unlink()
    os.close(first)
    real = fcntl.flock

    def removed(descriptor, how):
        real(descriptor, how)
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()

    monkeypatch.setattr(fcntl, "flock", removed)
    again = lock_file(path)
    assert os.path.samestat(os.fstat(again), path.stat())
    os.close(again)


def test_a_file_system_without_locks_is_no_hindrance(files, monkeypatch):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    merge(sharded(files))
    assert not hidden(files)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "swap", "none"])
def test_resume_makes_damaged_shards_again(files, monkeypatch, damage):
    stop(files, monkeypatch, 3)
    shard = sorted((files / ".out.partial").glob("model-*"))[0]
    raw = shard.read_bytes()
    if damage == "truncate":
        shard.write_bytes(raw[:-10])
    elif damage == "flip":
        shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif damage == "remove":
        shard.unlink()
    elif damage == "swap":
        shard.write_bytes(sorted(shard.parent.glob("model-*"))[1].read_bytes())
    (files / ".out.partial" / ".model-x.tmp").touch()
    result, anew = written(files, monkeypatch)
    assert (shard.name in anew) == (damage != "none")
    assert len(anew) == len(list((files / "out").glob("model-*"))) - (3 if damage == "none" else 2)
    with open_checkpoint(files / "out") as state:
        assert result.fingerprint == fingerprint(state) == merge(recipe(files)).fingerprint
    assert not (files / "out" / ".model-x.tmp").exists()
    assert not hidden(files)


JSON = st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda part: st.lists(part, max_size=2))
PARTS = st.fixed_dictionaries({}, optional={key: JSON | st.just({}) for key in ("identity", "shards", "inputs")})


@settings(max_examples=40)
@given(st.binary(max_size=20) | (JSON | PARTS).map(lambda value: json.dumps(value).encode()))
def test_an_unreadable_journal_is_none(content):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        (path / ".out.journal").write_bytes(content)
        (path / ".out.partial").mkdir()
        (path / ".out.partial" / "model.safetensors").write_text("x")
        with OutputFolder(path / "out") as folder:
            folder.begin({"recipe": "x"}, {"model.safetensors": {}}, resume=True)
            assert folder.shards == folder.inputs == {}
            assert not list(folder.partial.iterdir())


def killed_at(line, run):
    """Run; stop before the given line, counted over those of `publish` and of what it calls in its file."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        code = frame.f_code
        if code.co_filename != module.__file__ or code.co_name not in ("publish", "_exchange", "_remove"):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


def publish(target, content):
    """Make a folder of one file, in place of an older one."""
    with OutputFolder(target) as folder:
        folder.begin({}, {}, resume=False)
        (folder.partial / "content").write_text(content)
        (folder.partial / RECORD).write_text('{"files": ["content"]}')
        folder.publish()


@pytest.fixture(params=["swap", "renames"])
def exchange(request, monkeypatch):
    """Both ways to give a folder its name in place of an older one."""
    if request.param == "renames":
        monkeypatch.setattr(module.ctypes, "CDLL", lambda _: object())
    return request.param


def test_killed_at_any_step_of_the_exchange_a_whole_folder_stays(tmp_path, exchange):
    out, seen = tmp_path / "out", set()
    for line in range(1, 50):
        publish(out, "old")
        if not killed_at(line, lambda: publish(out, "new")):
            break
        if exchange == "swap" or out.exists():
            seen.add((out / "content").read_text())
        with OutputFolder(out) as folder:
            folder.begin({}, {}, resume=False)
        assert (out / "content").read_text() in ("old", "new")
        assert hidden(tmp_path) == [".out.partial"]
    assert seen == {"old", "new"}
    assert line < 49
    assert (out / "content").read_text() == "new"
    assert not hidden(tmp_path)


def test_killed_before_the_folder_has_its_name_nothing_is_computed_again(files, monkeypatch):
    merge(sharded(files, args={"scale": 0.5}))
    assert killed_at(1, lambda: merge(sharded(files)))
    os.rename(files / "out", files / ".out.replaced")  # as the exchange by renames leaves it at the worst moment
    result, anew = written(files, monkeypatch)
    assert not anew
    with open_checkpoint(files / "out") as state:
        assert fingerprint(state) == result.fingerprint == merge(recipe(files)).fingerprint
    assert not hidden(files)


def test_a_link_is_replaced_not_followed(tmp_path, exchange):
    publish(tmp_path / "far", "old")
    (tmp_path / "out").symlink_to(tmp_path / "far")
    publish(tmp_path / "out", "new")
    assert [(tmp_path / name / "content").read_text() for name in ("far", "out")] == ["old", "new"]
    assert not hidden(tmp_path)


@pytest.mark.parametrize("name", ["NOTES.txt", "model.gguf", ".git/config"])
def test_what_somebody_put_into_a_merged_folder_is_kept(files, monkeypatch, name):
    merge(sharded(files))
    mine = files / "out" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("years of work")
    monkeypatch.setattr(module, "lock_file", lambda path: pytest.fail("began"))
    with pytest.raises(MergeflowError, match=rf"does not list as the merge's own: {name.split('/')[0]}\. Move that"):
        merge(sharded(files, args={"scale": 2}))
    assert mine.read_text() == "years of work"


def test_what_comes_into_the_folder_during_the_merge_is_kept(files, monkeypatch):
    merge(sharded(files))
    stop(files, monkeypatch, 2)
    real = OutputFolder.finish

    def finish(*args):
        (files / "out" / "NOTES.txt").write_text("mine")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "finish", finish)
        with pytest.raises(MergeflowError, match="--resume uses them"):
            merge(sharded(files), resume=True)
    (files / "out" / "NOTES.txt").rename(files / "NOTES.txt")
    assert written(files, monkeypatch)[1] == []


@pytest.mark.parametrize("record", ["", "[]", '"x"', '{"files": 3}', '{"files": [[]]}'])
def test_a_folder_without_a_readable_record_is_no_merge_s(files, record):
    merge(sharded(files))
    (files / "out" / "mergeflow.json").write_text(record)
    with pytest.raises(MergeflowError, match="was not made by a merge"):
        merge(sharded(files))


def test_a_rewritten_card_of_a_folder_is_kept(files):
    merge(sharded(files))
    (files / "out" / "README.md").write_text("# Notes of a year")
    with pytest.raises(MergeflowError, match=r"card would overwrite '.*README\.md'"):
        merge(sharded(files))


def test_a_half_copied_companion_is_copied_again(files, monkeypatch):
    (files / "hf").mkdir()
    os.rename(files / "base.safetensors", files / "hf" / "model.safetensors")
    (files / "hf" / "config.json").write_text("{}")
    base = str(files / "hf")
    assert killed_at(1, lambda: merge(sharded(files, base=base)))
    (files / ".out.partial" / "config.json").write_text("{")
    assert written(files, monkeypatch, base=base)[1] == []
    assert (files / "out" / "config.json").read_text() == "{}"
    merge(sharded(files, base=base))


@pytest.mark.parametrize("shard_size", [None, 80])
def test_a_folder_of_diffusers_has_the_names_that_diffusers_looks_for(tmp_path, shard_size):
    stem = "diffusion_pytorch_model"
    files = [f"{stem}-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for value, name in enumerate(("base", "a", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
        for file in files:
            save_file({file[24:29]: torch.full((4, 4), float(value))}, tmp_path / name / file)
        index = {"weight_map": {file[24:29]: file for file in files}}
        (tmp_path / name / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    experts = {name: str(tmp_path / name) for name in "ab"}
    given_size = {} if shard_size is None else {"shard_size": shard_size}
    made = merge(
        {"method": "average", "base": str(tmp_path / "base"), "experts": experts, **given_size}, tmp_path / "out"
    )
    weight_map = json.loads((made.path / f"{stem}.safetensors.index.json").read_text())["weight_map"]
    assert sorted(weight_map.values()) == files
    for name, file in weight_map.items():
        assert torch.equal(load_file(made.path / file)[name], torch.full((4, 4), 1.5))
    merge({"method": "average", "experts": [f"{made.path}"], "shard_size": "1GB", "out": str(tmp_path / "one")})
    assert load_file(tmp_path / f"one/{stem}.safetensors").keys() == weight_map.keys()
