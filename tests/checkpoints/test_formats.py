"""Which file of a folder is read, and what is found inside files of torch.save."""

import json
import shutil
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.checkpoints.formats import from_hub
from mergeflow.checkpoints.header import DTYPES, dtype_of
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from tests.merging.tiny_models import tiny

WEIGHTS = {"a": torch.randn(2, 3), "b": torch.arange(4)}
OTHERS = {"a": torch.randn(2, 3), "b": torch.arange(1, 5)}


def sharded(folder, state, index, end):
    """Write a state in two shards."""
    places = {name: f"shard-{at}.{end}" for at, name in enumerate(state)}
    for name, file in places.items():
        shard = {name: state[name]}
        save_file(shard, folder / file) if end == "safetensors" else torch.save(shard, folder / file)
    (folder / index).write_text(json.dumps({"weight_map": places}))


def write(folder, file, state):
    """Write a state in the layout whose first file has a name."""
    if file.endswith(".index.json"):
        sharded(folder, state, file, "bin" if ".bin" in file else "safetensors")
    else:
        (torch.save if file.endswith(".bin") else save_file)(state, folder / file)


LAYOUTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
           "open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # fmt: skip


@pytest.mark.parametrize(("first", "second"), combinations(LAYOUTS, 2))
def test_of_two_layouts_the_one_that_transformers_loads_is_read(tmp_path, first, second):
    write(tmp_path, second, OTHERS)
    write(tmp_path, first, WEIGHTS)
    with open_checkpoint(tmp_path) as state:
        assert torch.equal(state["a"], WEIGHTS["a"])
    if "open_clip" in second and "open_clip" not in first:
        (tmp_path / "open_clip_config.json").write_text("{}")
        with open_checkpoint(tmp_path) as state:
            assert torch.equal(state["a"], OTHERS["a"])


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_the_order_of_files_is_that_of_from_pretrained(tmp_path, layout):
    old, new = tiny("llama"), tiny("llama", 1)
    old.save_pretrained(tmp_path, max_shard_size="2KB" if layout == "sharded" else "1GB")
    state = {name: value.clone() + 1 for name, value in new.state_dict().items()}
    write_checkpoint(tmp_path / "model.safetensors", state, {"format": "pt"})
    torch.save(old.state_dict(), tmp_path / "pytorch_model.bin")
    expected = type(old).from_pretrained(tmp_path).model.norm.weight
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["model.norm.weight"], expected)


def test_a_stale_index_does_not_hide_a_good_file(tmp_path):
    sharded(tmp_path, OTHERS, "model.safetensors.index.json", "safetensors")
    for shard in tmp_path.glob("shard-*"):
        shard.unlink()
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    with pytest.raises(MergeflowError, match=r"which is missing.*also holds 'pytorch_model.bin': name that file"):
        open_checkpoint(tmp_path)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as state:
        assert torch.equal(state["a"], WEIGHTS["a"])


class Settings(dict):
    """Entries and attributes, as Lightning's hyperparameters and OmegaConf's have them."""

    def __init__(self, **values):
        super().__init__(values)
        self.parent = None


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
CHECKPOINTS = {
    "DeepSpeed": {"module": WEIGHTS, "optimizer": None, "global_steps": 3},
    "two levels": {"model": {"state_dict": WEIGHTS, "epoch": 3}, "optimizer": OPTIMIZER, "history": [0.5]},
    "a name of its own": {"net": WEIGHTS, "optimizer": OPTIMIZER, "epoch": torch.tensor(3)},
    "the weights beside the same weights": {"weights": WEIGHTS, "model": WEIGHTS},
    "numbers beside the weights": {**WEIGHTS, "step": 3, "loss": None, "names": ["x"], "a._extra_state": {"v": 1.5}},
    "weights beside their optimizer": {**WEIGHTS, "optimizer": OPTIMIZER, "lr_scheduler": {"last_epoch": 3}},
    "numbers in the state dict": {"state_dict": {**WEIGHTS, "a._extra_state": None}, "rng": torch.ones(3)},
    "counters of their own": {"net": WEIGHTS, "progress": {"step": torch.tensor(3)}},
    "options and a NumPy score": {"model": WEIGHTS, "args": Namespace(lr=0.1), "best": np.float64(0.5)},
    "when and where": {"model": WEIGHTS, "when": datetime.now(UTC), "out": Path("out"), "of": {Path: deque([1, 2], 3)}},
    "objects of settings": {
        "model": WEIGHTS,
        "hyper_parameters": Settings(out=Path("out")),
        "log": defaultdict(list, a=[1]),
    },
    "an object that is a mapping": Settings(model=WEIGHTS, epoch=3),
    "NumPy's random state": {"model": WEIGHTS, "rng": np.random.RandomState(0).get_state(), "history": np.ones((2, 3))},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("file", ["c.pth.tar", "c.pt", "c.weights", "c"])
def test_the_state_dict_is_found_in_what_training_saves(tmp_path, name, file):
    torch.save(CHECKPOINTS[name], tmp_path / file)
    with open_checkpoint(tmp_path / file) as state:
        assert sorted(state) == ["a", "b"]
        assert torch.equal(state["a"], WEIGHTS["a"])


@pytest.mark.parametrize("key", ["ema_model", "model_ema", "state_dict_ema", "ema_state_dict"])
@pytest.mark.parametrize("chosen", ["model", "state_dict"])
def test_a_moving_average_beside_the_weights_is_named(tmp_path, key, chosen):
    """Which of the two was merged was said nowhere; the note says how to take the other."""
    torch.save({key: OTHERS, chosen: WEIGHTS, "epoch": 3}, tmp_path / "c.pt")
    recipe = {"method": "average", "experts": {"a": f"{tmp_path}/c.pt"}}
    (note,) = merge(recipe, tmp_path / "out.safetensors").warnings
    assert f"holds '{chosen}', which is read, and '{key}', not read" in note
    assert f" torch.save(torch.load('c.pt')['{key}'], 'other.pt') makes a file of it" in note


def test_how_to_take_a_moving_average_is_said_for_a_file_with_objects_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"ema": OTHERS, "model": WEIGHTS, "args": Namespace(out=Path("out"))}, "c.pt")
    (note,) = open_checkpoint("c.pt").notes
    exec(note[note.index("torch.save(") : note.index(" (it runs")])
    assert torch.equal(open_checkpoint("other.pt")["a"], OTHERS["a"])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"state_dict": {}}, "holds an empty state dict"),
        ({}, "holds an empty state dict"),
        (
            {"generator": WEIGHTS, "critic": OTHERS},
            r"2 state dicts: generator, critic\..*load\('c\.pt'\)\['generator'\], 'o",
        ),
        ({"w": torch.ones(2), "more": WEIGHTS}, "entries that are not named tensors: more"),
        ({"state_dict": {"w": torch.ones(2), "packed": (torch.ones(2), 0.1)}}, "are not named tensors: packed"),
        ({"rng_state": torch.ones(2), "model_a": WEIGHTS, "model_b": OTHERS}, "not named tensors: model_a, model_b"),
        ({"optimizer": OPTIMIZER}, "entries that are not named tensors: optimizer"),
        ([WEIGHTS], r"a list, not a state dict of named tensors\. Save the state dict alone, or under one of the keys"),
        (
            {"model": WEIGHTS, "teacher": torch.nn.Linear(2, 2)},
            "to load 'torch.nn.modules.linear.Linear', so it holds code",
        ),
        ({"model": WEIGHTS, "score": print}, "to load 'print', so it holds code"),
        ({"w": torch.ones(2, device="meta")}, "on torch's device `meta`, without data: save the loaded model"),
    ],
)
def test_what_is_no_state_dict_is_named(tmp_path, saved, message):
    torch.save(saved, tmp_path / "c.pt")
    with pytest.raises(MergeflowError, match=message):
        open_checkpoint(tmp_path / "c.pt")


def test_a_tensor_whose_sign_is_a_note_of_torch_is_read(tmp_path):
    torch.save(
        {"w": torch._neg_view(torch.ones(2)), "i": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "c.pt"
    )
    merge({"method": "average", "experts": {"a": f"{tmp_path}/c.pt"}}, tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == [-1, -1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_programs_are_refused_by_what_they_are(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "t.pt")
    with pytest.raises(MergeflowError, match=r"is a TorchScript archive.*never run.*state_dict"):
        open_checkpoint(tmp_path / "t.pt")
    shutil.make_archive(str(tmp_path / "z"), "zip", tmp_path, "t.pt")
    shutil.move(tmp_path / "z.zip", tmp_path / "z.bin")
    with pytest.raises(MergeflowError, match="a zip archive without"):
        open_checkpoint(tmp_path / "z.bin")


def header(tmp_path, dtype, size):
    entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}
    text = json.dumps({"w": entry}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return tmp_path / "w.safetensors"


def test_every_type_that_the_format_has_is_read_or_refused_by_name(tmp_path):
    for dtype, size in {"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}.items():
        with open_checkpoint(header(tmp_path, dtype, size)) as state:
            assert state["w"].dtype == DTYPES[dtype].torch
            assert state["w"].float().isfinite().all()
    for dtype, size in {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "Q7": 8}.items():
        with pytest.raises(MergeflowError, match=f"'w' in the type '{dtype}', which cannot be read") as caught:
            open_checkpoint(header(tmp_path, dtype, size))
        assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), dtype_of(torch.complex128)], ids=str)
def test_types_known_without_torch_are_what_torch_says_of_them(dtype):
    assert dtype_of(dtype.torch) == dtype
    assert str(dtype) == str(dtype.torch)
    assert (dtype in DTYPES.values()) == (dtype.torch != torch.complex128)  # which the format lacks


def test_a_header_of_very_many_tensors_is_refused_before_it_is_read(tmp_path):
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(entry % at for at in range(250_001)) + b"}"
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(MergeflowError, match="describes more than 250000 tensors"):
        open_checkpoint(tmp_path / "w.safetensors")


def test_a_folder_that_several_inputs_name_is_refused_in_one_message(tmp_path):
    sharded(tmp_path, OTHERS, "model.safetensors.index.json", "safetensors")
    (tmp_path / "shard-0.safetensors").unlink()
    path = str(tmp_path)
    with pytest.raises(MergeflowError, match="is missing") as caught:
        merge({"method": "average", "base": path, "experts": {"a": path, "b": path}}, out=tmp_path / "o")
    assert str(caught.value).count("is missing") == 1


@pytest.mark.parametrize("keys", [(), ("model",)])
def test_the_version_of_a_module_that_its_class_asks_for_is_told(tmp_path, keys):
    """MNASNet refuses a state without one, and a result has none."""
    mnasnet0_5 = pytest.importorskip("torchvision").models.mnasnet0_5
    model = mnasnet0_5(num_classes=3)
    for name in "ab":
        torch.save({key: model.state_dict() for key in keys} or model.state_dict(), tmp_path / f"{name}.pt")
    experts = {name: str(tmp_path / f"{name}.pt") for name in "ab"}
    made = merge({"method": "average", "experts": experts, "out": str(tmp_path / "out.safetensors")})
    note = next(note for note in made.warnings if "version 2" in note)
    scope = {"state": load_file(made.path), "OrderedDict": OrderedDict}
    exec(note.partition("`")[2].rstrip("`"), scope)
    mnasnet0_5(num_classes=3).load_state_dict(scope["state"])
    save_file(scope["state"], tmp_path / "plain.safetensors")
    assert not open_checkpoint(tmp_path / "plain.safetensors").notes


def test_folders_that_a_model_of_the_hub_names_are_downloaded_too(tmp_path, monkeypatch):
    hub, asked = pytest.importorskip("huggingface_hub"), []
    steps = ["modules.json", "1_Pooling/config.json", "additional_chat_templates/tools.jinja"]
    listed = ["model.safetensors", "pytorch_model.bin", "config.json", *steps, "onnx/model.onnx", "onnx/1_a/b.json"]

    def download(*_, allow_patterns=None, local_files_only=False, **__):
        if local_files_only:
            raise FileNotFoundError
        asked.extend(allow_patterns)
        return str(tmp_path)

    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in listed], sha="0")
    monkeypatch.setattr(hub, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert from_hub("someone/a-model") == tmp_path
    assert sorted(asked) == sorted(["model.safetensors", "config.json", *steps])
