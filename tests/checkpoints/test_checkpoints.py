"""Readers and writers: formats, atomicity, fingerprints."""

import json
import os
import pickle

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints import fingerprint, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.errors import MergeflowError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.fixture
def state():
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{index}": torch.randint(0, 2, (3, index + 1), generator=generator).to(dtype)
        for index, dtype in enumerate(DTYPES)
    }
    large = torch.randn(BLOCK + 5, generator=generator)
    return {
        **tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "large": large,
        "turned": large[:6].reshape(2, 3).T,
    }


def same(a, b):
    assert set(a) == set(b)
    for name, value in b.items():
        assert a[name].dtype == value.dtype
        assert a[name].shape == value.shape
        assert (
            a[name].contiguous().reshape(-1).view(torch.uint8).tolist()
            == value.contiguous().reshape(-1).view(torch.uint8).tolist()
        )


def test_a_pipe_or_device_is_written_to_and_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "whole")
    assert os.read(reader, 9) == b"whole"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_round_trip_and_both_ways_with_the_reference_implementation(state, tmp_path):
    written = write_checkpoint(tmp_path / "ours.safetensors", state, {"note": "é"})
    assert written == fingerprint(state)
    with open_checkpoint(tmp_path / "ours.safetensors") as checkpoint:
        same(checkpoint, state)
        assert checkpoint.metadata == {"note": "é"}
        assert fingerprint(checkpoint) == written
        assert torch.equal(checkpoint.read("large", 3, 9), state["large"][3:9])
    same(load_file(tmp_path / "ours.safetensors"), state)
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "theirs.safetensors")
    with open_checkpoint(tmp_path / "theirs.safetensors") as checkpoint:
        same(checkpoint, state)
        assert fingerprint(checkpoint) == written


def test_the_fingerprint_sees_names_types_shapes_and_bytes_alone(state, tmp_path):
    first = fingerprint(state)
    assert fingerprint(dict(reversed(state.items()))) == first
    assert fingerprint({**state, "large": state["large"] + 1e-7}) != first
    assert fingerprint({**state, "scalar": torch.tensor([2.5])}) != first
    assert fingerprint({"x" + name: value for name, value in state.items()}) != first
    assert fingerprint({"w": torch.zeros(2)}) != fingerprint({"w": torch.zeros(2, dtype=torch.int32)})
    assert write_checkpoint(tmp_path / "a.safetensors", state, {"a": "1"}) == first


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(state, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    before = write_checkpoint(path, state)
    monkeypatch.setattr(os, "fsync", lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(MergeflowError, match="Input/output error"):
        write_checkpoint(path, {"w": torch.zeros(2)})
    monkeypatch.undo()
    assert fingerprint(open_checkpoint(path)) == before
    assert [item.name for item in tmp_path.iterdir()] == ["a.safetensors"]


def test_without_nameless_files_a_named_one_is_used(state, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    write_checkpoint(tmp_path / "a.safetensors", state)
    assert [item.name for item in tmp_path.iterdir()] == ["a.safetensors"]
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_tied_tensors_are_written_whole_and_remembered(tmp_path):
    shared = torch.randn(3, 3)
    write_checkpoint(tmp_path / "a.safetensors", {"a": shared, "b": shared, "c": shared[:1]})
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.tied == {"b": "a"}
        same(checkpoint, {"a": shared, "b": shared, "c": shared[:1]})


def test_sharded_folders_and_their_faults(tmp_path):
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    write_checkpoint(tmp_path / "one.safetensors", first)
    write_checkpoint(tmp_path / "two.safetensors", second)
    write_checkpoint(tmp_path / "below/two.safetensors", second)
    index = tmp_path / "model.safetensors.index.json"

    def say(places):
        index.write_text(json.dumps({"weight_map": places}))

    for two in ("below/two.safetensors", "two.safetensors"):
        say({"a": "one.safetensors", "b": two})
        for path in (tmp_path, index):
            with open_checkpoint(path) as checkpoint:
                same(checkpoint, {**first, **second})
    say({"a": "one.safetensors", "b": "three.safetensors"})
    with pytest.raises(MergeflowError, match=r"'three\.safetensors', which is missing"):
        open_checkpoint(tmp_path)
    say({"a": "two.safetensors", "b": "one.safetensors"})
    with pytest.raises(MergeflowError, match="does not fit its shards"):
        open_checkpoint(tmp_path)
    say({"a": "../one.safetensors"})
    with pytest.raises(MergeflowError, match="not a file of its folder"):
        open_checkpoint(tmp_path)


def test_pickled_state_dicts(tmp_path):
    weights = {"a": torch.randn(2, 3), "b": torch.arange(4)}
    for legacy in (False, True):
        for saved in (weights, {"model": {"module." + name: value for name, value in weights.items()}}):
            torch.save(saved, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
            with open_checkpoint(tmp_path / "w.pt") as checkpoint:
                same(checkpoint, weights)
                assert torch.equal(checkpoint.read("a", 1, 3), weights["a"].reshape(-1)[1:3])
    torch.save({"a": torch.ones(2), 3: torch.ones(2)}, tmp_path / "w.bin")
    with pytest.raises(MergeflowError, match="not named tensors: 3"):
        open_checkpoint(tmp_path / "w.bin")
    torch.save([1, 2], tmp_path / "w.bin")
    with pytest.raises(MergeflowError, match="holds a list"):
        open_checkpoint(tmp_path / "w.bin")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_code_in_pickles_is_refused_and_never_run(tmp_path):
    for name in ("a.pt", "b.bin", "c.ckpt"):
        torch.save({"w": torch.ones(2), "x": Bomb(tmp_path / "ran")}, tmp_path / name)
        wanted = rf"{name}' .* it wants to load '_?io\.open', so it holds code, which is never run.*save_file"
        with pytest.raises(MergeflowError, match=wanted) as caught:
            open_checkpoint(tmp_path / name)
        assert "weights_only" not in str(caught.value)
    (tmp_path / "d.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(MergeflowError, match="holds code"):
        open_checkpoint(tmp_path / "d.pt")
    assert not (tmp_path / "ran").exists()


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(MergeflowError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "none.safetensors")
    with pytest.raises(MergeflowError, match=r"holds no checkpoint: .* found no file of weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "way"),
    [
        ("model-00001-of-00002.safetensors", "Shards need their index, model.safetensors.index.json"),
        ("first/adapter_config.json", "Name what is below it: first"),
        ("snapshots/c0ffee/config.json", "Name what is below it: snapshots/c0ffee"),
        ("global_step9/mp_rank_00_model_states.pt", "Name what is below it: global_step9/mp_rank_00_model_states.pt"),
        ("__0_0.distcp", r"found __0_0\.distcp\. Join what .*format_utils dcp_to_torch FOLDER model\.pt"),
        ("flax_model.msgpack", r"found flax_model\.msgpack\. Save the model as safetensors where it was made"),
        ("m-Q4_K.gguf", r"found m-Q4_K\.gguf\. Make plain weights of the GGUF file: mergeflow convert"),
        ("consolidated.00.pth", r"found consolidated\.00\.pth\. Name the file itself"),
        ("x.safetensors", "Name the file itself"),
    ],
)
def test_a_folder_without_weights_says_where_to_look(tmp_path, file, way):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    for name in (file, file.replace("1-of", "2-of").replace("x.", "y.")):
        (tmp_path / name).write_text("")
    with pytest.raises(MergeflowError, match=way):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "more", "metadata"),
    [("w", {}, None), ("w", {"note": [1]}, {"a": "b"}), ("\ud800", {}, {}), ("é\n\u200b", {}, {}), ("w", {}, {"a": 1})],
)
def test_headers_are_taken_and_refused_as_by_the_official_reader(tmp_path, name, more, metadata):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **more}
    header = json.dumps({"__metadata__": metadata, name: entry}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    try:
        official = {key: value.tolist() for key, value in load_file(path).items()}
    except SafetensorError:
        with pytest.raises(MergeflowError, match="not a valid safetensors file"):
            open_checkpoint(path)
        return
    with open_checkpoint(path) as checkpoint:
        assert {key: checkpoint[key].tolist() for key in checkpoint} == official
