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


def flip_or_cut(raw, rng):
    return (flip if rng.random() < 0.5 else cut_or_grow)(raw, rng)


def other_length(raw, rng):
    length = rng.choice([0, 1, 2, 7, len(raw), 2**31, 2**40, 2**63, 2**64 - 1, rng.randrange(400)])
    return struct.pack("<Q", length) + raw[8:]


def headed(header, data):
    """A file with a header, as text or to be written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


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
    return headed(header, raw[8 + length :])


def refused(file, mutate, count, seed, opened=None):
    """How many of so many mutations of a file are refused."""
    rng, raw, refusals = random.Random(seed), file.read_bytes(), 0
    for _ in range(count):
        file.write_bytes(mutate(raw, rng))
        refusals += reads_or_refuses(opened or file)
    return refusals


@pytest.mark.parametrize("mutate", [flip, cut_or_grow, other_length, other_header], ids=lambda f: f.__name__)
def test_mutated_safetensors(sample, mutate):
    assert refused(sample, mutate, 2_700, mutate.__name__) > 500


def test_mutated_indexes(memory):
    write_checkpoint(memory / "one.safetensors", {"a": torch.ones(2)})
    write_checkpoint(memory / "two.safetensors", {"b": torch.ones(2)})
    index = memory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert not reads_or_refuses(memory)
    assert refused(index, flip_or_cut, 800, 0, memory) > 300


def test_mutated_pickles(memory):
    path = memory / "sample.pt"
    torch.save({"state_dict": {"a": torch.arange(4.0), "b": torch.tensor(1)}}, path)
    assert refused(path, flip_or_cut, 800, 1) > 100


def test_mutated_adapters(memory):
    folder = memory / "adapter"
    weights = {
        "base_model.model.mlp.lora_A.weight": torch.ones(2, 5),
        "base_model.model.mlp.lora_B.weight": torch.ones(4, 2),
    }
    write_checkpoint(folder / "adapter_model.safetensors", weights)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "alpha_pattern": {"mlp": 3}, "fan_in_fan_out": False}

    def mutate(_, rng):
        key, value = rng.choice([*config, "rank_pattern", "use_rslora", "use_dora"]), rng.choice(NUMBERS)
        changed = {**config, key: rng.choice([value, {"mlp": value}, {str(value): 2}, {"(": value}])}
        raw = json.dumps(changed).encode()
        return raw if rng.random() < 0.7 else flip(raw, rng)

    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert 200 < refused(folder / "adapter_config.json", mutate, 800, 2, folder) < 800


def entry(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": entry([10**9, 10**9], 0, 8)}, 8, "needs 4000000000000000000"),
        ({"w": entry([2], 0, 80)}, 8, r"bytes 0\.\.80, but holds 8 bytes"),
        ({"v": entry([2], 0, 8), "w": entry([2], 4, 12)}, 12, "overlaps the one before it"),
        ({"v": entry([1], 0, 4), "w": entry([1], 8, 12)}, 12, "leaves a hole"),
        ({"w": entry([2], 0, 8, 31)}, 8, "a dtype that is not a name"),
        ({"w": entry([True], 0, 4)}, 4, "not a list of sizes"),
        ({"w": entry([2], 0, 8)}, 12, "describes 8 bytes of data, but holds 12"),
        ({"w": entry([-2], 0, 8)}, 8, "not a list of sizes"),
        (b'{"b":{"dtype":"I8","shape":[],"data_offsets":[0,1]},"b":{}}', 1, "names 'b' twice"),
        ([], 0, "a list, not an object"),
    ],
)
def test_hostile_headers_name_the_fault_and_the_way_out(tmp_path, header, data, message):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(headed(header, bytes(data)))
    with pytest.raises(MergeflowError, match=message) as caught:
        open_checkpoint(path)
    assert "hostile.safetensors" in str(caught.value)
    assert "copy or download it again" in str(caught.value)


def test_deep_nesting_and_huge_numbers_are_refused(tmp_path):
    path = tmp_path / "deep.safetensors"
    for text in (b"[" * 200_000, b'{"a":' * 100_000, b'{"w":' + b"9" * 10_000 + b"}", b"\xff\xfe", b""):
        path.write_bytes(headed(text, b""))
        with pytest.raises(MergeflowError, match="not a valid safetensors file"):
            open_checkpoint(path)
