"""Twelve thousand damaged and hostile files: each is refused with our error, or reads cleanly."""

import json
import os
import random
import struct
import tempfile
from pathlib import Path

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError

NUMBERS = [-1, 0, 1, 3, 7, 8, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, 10**9, 10**30, 1.5, "4", None, True, []]


def reads_or_refuses(path):
    """Whether the file was refused; anything but our error, or a tensor unlike its header, fails the test."""
    try:
        with open_checkpoint(path) as state:
            for name, tensor in state.items():
                assert tuple(tensor.shape) == state.infos[name].shape
                assert tensor.dtype == state.infos[name].dtype.torch
    except MergeflowError as error:
        message = str(error)
    else:
        return False
    assert path.name in message or str(path.parent) in message
    return True


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is one: thousands of small files wear out a busy disk's patience."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def sample(memory):
    path = memory / "sample.safetensors"
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1), "c": torch.zeros(0, 2).half()}
    write_checkpoint(path, tensors, {"note": "x"})
    return path


def flip(raw, rng):
    raw = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def cut_or_grow(raw, rng):
    at = rng.randrange(len(raw) + 1)
    return raw[:at] if rng.random() < 0.5 else raw[:at] + rng.randbytes(rng.randint(1, 16)) + raw[at:]


def other_length(raw, rng):
    return (
        struct.pack("<Q", rng.choice([0, 1, 2, 7, len(raw), 2**31, 2**40, 2**63, 2**64 - 1, rng.randrange(400)]))
        + raw[8:]
    )


def other_header(raw, rng):
    """Replace one value of the header by a number or thing that does not belong there; keep the data."""
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    kind = rng.randrange(7)
    if kind == 0:
        entry["data_offsets"][rng.randrange(2)] = rng.choice(NUMBERS)
    elif kind == 1:
        entry["shape"] = [rng.choice(NUMBERS) for _ in range(rng.randrange(4))]
    elif kind == 2:
        entry["dtype"] = rng.choice(["F4", "F32", "I8", "", 3, None, "BOOL", "F64"])
    elif kind == 3:
        header[name] = rng.choice([[], {}, None, 3, "x", {**entry, "more": 1}])
    elif kind == 4:
        header["__metadata__"] = rng.choice([[], {"a": 1}, None, {"a": None}, {"mergeflow.tied": "[" * 500}])
    elif kind == 5:
        header["again"] = dict(entry)
    else:
        header[rng.choice(["", "é", "x" * 300])] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def twice(raw, rng):
    length = struct.unpack("<Q", raw[:8])[0]
    text = raw[8 : 8 + length].rstrip()
    text = text[:-1] + b',"b":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}'
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


@pytest.mark.parametrize("mutate", [flip, cut_or_grow, other_length, other_header], ids=lambda f: f.__name__)
def test_mutated_safetensors(sample, mutate):
    rng, raw, refused = random.Random(mutate.__name__), sample.read_bytes(), 0
    for _ in range(2_700):
        sample.write_bytes(mutate(raw, rng))
        refused += reads_or_refuses(sample)
    assert refused > 500


def test_mutated_indexes(memory):
    write_checkpoint(memory / "one.safetensors", {"a": torch.ones(2)})
    write_checkpoint(memory / "two.safetensors", {"b": torch.ones(2)})
    index = memory / "model.safetensors.index.json"
    raw = json.dumps({"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    index.write_bytes(raw)
    assert not reads_or_refuses(memory)
    rng, refused = random.Random(0), 0
    for _ in range(800):
        index.write_bytes((flip if rng.random() < 0.5 else cut_or_grow)(raw, rng))
        refused += reads_or_refuses(memory)
    assert refused > 300


def test_mutated_pickles(memory):
    path = memory / "sample.pt"
    torch.save({"state_dict": {"a": torch.arange(4.0), "b": torch.tensor(1)}}, path)
    raw = path.read_bytes()
    rng, refused = random.Random(1), 0
    for _ in range(800):
        path.write_bytes((flip if rng.random() < 0.5 else cut_or_grow)(raw, rng))
        refused += reads_or_refuses(path)
    assert refused > 100


def test_mutated_adapters(memory):
    folder = memory / "adapter"
    weights = {
        "base_model.model.mlp.lora_A.weight": torch.ones(2, 5),
        "base_model.model.mlp.lora_B.weight": torch.ones(4, 2),
    }
    write_checkpoint(folder / "adapter_model.safetensors", weights)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "alpha_pattern": {"mlp": 3}, "fan_in_fan_out": False}
    rng, refused = random.Random(2), 0
    for _ in range(800):
        key, value = rng.choice([*config, "rank_pattern", "use_rslora", "use_dora"]), rng.choice(NUMBERS)
        changed = {**config, key: rng.choice([value, {"mlp": value}, {str(value): 2}, {"(": value}])}
        raw = json.dumps(changed).encode()
        (folder / "adapter_config.json").write_bytes(raw if rng.random() < 0.7 else flip(raw, rng))
        refused += reads_or_refuses(folder)
    assert 200 < refused < 800


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 8]}}, 8, "needs 4000000000000000000"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}, 8, r"bytes 0\.\.80, but holds 8 bytes"),
        (
            {
                "v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            12,
            "overlaps the one before it",
        ),
        (
            {
                "v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "w": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
            },
            12,
            "leaves a hole",
        ),
        ({"w": {"dtype": 31, "shape": [2], "data_offsets": [0, 8]}}, 8, "a dtype that is not a name"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 4, "not a list of sizes"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 12, "describes 8 bytes of data, but holds 12"),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, 8, "not a list of sizes"),
        ([], 0, "a list, not an object"),
    ],
)
def test_hostile_headers_name_the_fault_and_the_way_out(tmp_path, header, data, message):
    path = tmp_path / "hostile.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    with pytest.raises(MergeflowError, match=message) as caught:
        open_checkpoint(path)
    assert "hostile.safetensors" in str(caught.value)
    assert "copy or download it again" in str(caught.value)


def test_duplicate_names_are_refused(sample):
    sample.write_bytes(twice(sample.read_bytes(), None))
    with pytest.raises(MergeflowError, match="names 'b' twice"):
        open_checkpoint(sample)


def test_deep_nesting_and_huge_numbers_are_refused(tmp_path):
    path = tmp_path / "deep.safetensors"
    for text in (b"[" * 200_000, b'{"a":' * 100_000, b'{"w":' + b"9" * 10_000 + b"}", b"\xff\xfe", b""):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(MergeflowError, match="not a valid safetensors file"):
            open_checkpoint(path)
