"""Readers and writers: formats, atomicity, fingerprints."""

import json
import os
import pickle

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints import check_compatible, check_finite, fingerprint, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.fingerprint import BLOCK
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
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
    index = tmp_path / "model.safetensors.index.json"

    def say(places):
        index.write_text(json.dumps({"weight_map": places}))

    say({"a": "one.safetensors", "b": "two.safetensors"})
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
        for saved in (
            weights,
            {"state_dict": weights, "epoch": 3},
            {"module." + name: value for name, value in weights.items()},
            {"model": {"module." + name: value for name, value in weights.items()}},
        ):
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
        with pytest.raises(MergeflowError, match="holds code, which is never run"):
            open_checkpoint(tmp_path / name)
        with pytest.raises(MergeflowError, match=rf"{name}' .* it wants to load '_?io\.open', .*save_file") as caught:
            open_checkpoint(tmp_path / name)
        assert "weights_only" not in str(caught.value)
    (tmp_path / "d.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(MergeflowError, match="holds code"):
        open_checkpoint(tmp_path / "d.pt")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, 5, generator=generator), torch.randn(4, 2, generator=generator)
    weights = {
        "base_model.model.mlp.lora_A.weight": down,
        "base_model.model.mlp.lora_B.weight": up,
        "base_model.model.head.weight": torch.full((2, 2), 3.0),
    }
    write_checkpoint(folder / "adapter_model.safetensors", weights)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, down, up, config


def test_lora_adapters_are_task_vectors(adapter, tmp_path):
    from mergeflow.merging import make_recipe, merge

    folder, down, up, config = adapter
    with open_checkpoint(folder) as opened:
        assert opened.is_task_vector
        torch.testing.assert_close(opened["mlp.weight"], 3 * up @ down)
        assert torch.equal(opened.read("mlp.weight", 3, 9), opened["mlp.weight"].reshape(-1)[3:9])
    base = {"mlp.weight": torch.randn(4, 5), "head.weight": torch.ones(2, 2), "norm": torch.ones(3)}
    write_checkpoint(tmp_path / "base.safetensors", base)
    values = {"method": "average", "base": str(tmp_path / "base.safetensors"), "experts": [str(folder)]}
    merge(make_recipe(values), out=tmp_path / "out.safetensors")
    with open_checkpoint(tmp_path / "out.safetensors") as merged:
        torch.testing.assert_close(merged["mlp.weight"], base["mlp.weight"] + 3 * up @ down)
        assert torch.equal(merged["head.weight"], torch.full((2, 2), 3.0))  # a module trained whole, not a difference
        assert torch.equal(merged["norm"], base["norm"])
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True, "fan_in_fan_out": True}))
    with open_checkpoint(folder) as opened:
        torch.testing.assert_close(opened["mlp.weight"], (6 / 2**0.5 * up @ down).T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA is merged as it is"),
        ({"use_dora": True}, "DoRA"),
        ({"r": 3}, "has rank 2, its configuration says 3"),
        ({"lora_alpha": None}, "lora_alpha = None .* expected a number"),
        ({"alpha_pattern": {"mlp": "6"}}, "lora_alpha = '6' for 'mlp'"),
        ({"alpha_pattern": [3]}, r"alpha_pattern = \[3\], expected a mapping"),
        ({"rank_pattern": {"(": 2}}, "invalid expression"),
        ({"init_lora_weights": "pissa_niter_4"}, "also changes the base"),
    ],
)
def test_adapters_that_cannot_be_merged(adapter, change, message):
    folder, _, _, config = adapter
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(MergeflowError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("alpha", [0, -6, 2.5])
def test_any_alpha_is_a_factor(adapter, alpha):
    folder, down, up, config = adapter
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": alpha}))
    with open_checkpoint(folder) as opened:
        torch.testing.assert_close(opened["mlp.weight"], alpha / 2 * up @ down)


@pytest.mark.parametrize("end", ["lora_B.weight", "lora_embedding_B", "lora_magnitude_vector"])
def test_half_of_a_pair_of_factors_is_refused(adapter, end):
    folder, _, up, _ = adapter
    stored = load_file(folder / "adapter_model.safetensors")
    save_file(stored | {f"base_model.model.attn.{end}": up}, folder / "adapter_model.safetensors")
    with pytest.raises(MergeflowError, match=rf"holds 'base_model.model.attn.{end}' without its lora_A"):
        open_checkpoint(folder)


def test_a_folder_with_an_adapter_and_a_model_is_ambiguous(adapter):
    folder = adapter[0]
    write_checkpoint(folder / "model.safetensors", {"mlp.weight": torch.ones(4, 5)})
    with pytest.raises(MergeflowError, match=r"holds an adapter and a model: name 'model.safetensors' if"):
        open_checkpoint(folder)
    with open_checkpoint(folder / "model.safetensors") as checkpoint:
        assert set(checkpoint) == {"mlp.weight"}


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_that_peft_itself_writes(tmp_path, rslora):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)

    def model():
        torch.manual_seed(1)
        block = torch.nn.ModuleDict({"attn": torch.nn.Linear(6, 5), "mlp": torch.nn.Linear(5, 6)})
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block]), "head": torch.nn.Linear(6, 2)})

    base = {name: value.clone() for name, value in model().state_dict().items()}
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["attn", "mlp"], modules_to_save=["head"], use_rslora=rslora,
        rank_pattern={r"layers\.\d\.attn": 3}, alpha_pattern={"^layers.0.mlp": 5},
    )  # fmt: skip
    wrapped = peft.get_peft_model(model(), config)
    with torch.no_grad():
        for value in wrapped.parameters():
            if value.requires_grad:
                value.copy_(torch.randn_like(value))
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = wrapped.merge_and_unload().state_dict()
    with open_checkpoint(tmp_path / "adapter") as opened:
        assert set(opened) == {"layers.0.attn.weight", "layers.0.mlp.weight", "head.weight", "head.bias"}
        for name, value in opened.items():
            torch.testing.assert_close(value + (0 if name in opened.absolute else base[name]), expected[name])


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


def test_shards_may_lie_in_a_folder_below(tmp_path):
    for number in (1, 2):
        write_checkpoint(
            tmp_path / f"weights/part-{number}.safetensors", {f"w{number}": torch.full((2,), float(number))}
        )
    places = {f"w{number}": f"weights/part-{number}.safetensors" for number in (1, 2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert {name: float(checkpoint[name][0]) for name in checkpoint} == {"w1": 1.0, "w2": 2.0}


def test_checks_of_states():
    base = {"w": torch.zeros(2), "n": torch.tensor(1)}
    check_compatible(base, {"a": base})
    check_finite("a", base)
    with pytest.raises(MergeflowError, match="3 mismatches") as caught:
        check_compatible(base, {"a": {"w": torch.zeros(3), "v": torch.zeros(1)}})
    assert "expert 'a' lacks tensor 'n'" in str(caught.value)
    with pytest.raises(MergeflowError, match="'a' holds NaN or infinity in tensor 'w'"):
        check_finite("a", {"w": torch.tensor([1.0, float("inf")]), "n": torch.tensor(1)})
