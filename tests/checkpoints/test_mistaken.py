"""Files that are not checkpoints are recognised, with the way out; ids of the Hub and `~` are followed."""

import gzip
import json
import shutil

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.checkpoints.formats import fixed_id
from mergeflow.errors import MergeflowError

STATE = {f"w{index}": torch.arange(9000.0).reshape(90, 100) for index in range(3)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html><html><head><title>Sign in</title></head></html>" + b" " * 300
GGUF = b"GGUF\x03\x00\x00\x00" + bytes(400)
HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(400)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POINTER, "Git LFS pointer.*git lfs pull"),
        (PAGE, "web page.*logging in"),
        (GGUF, "GGUF file.*original"),
        (HDF5, "HDF5 file.*Keras"),
        (gzip.compress(bytes(400)), "compressed by gzip: unpack it first"),
    ],
    ids=["lfs", "html", "gguf", "hdf5", "gzip"],
)
def test_what_a_failed_download_leaves(tmp_path, content, message, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises(MergeflowError, match=message) as caught:
        open_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1


def test_an_index_or_a_shard_that_is_a_pointer_or_a_page(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(PAGE)
    with pytest.raises(MergeflowError, match=r"index.json' is a web page"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    (tmp_path / "a.safetensors").write_bytes(POINTER)
    with pytest.raises(MergeflowError, match=r"a.safetensors' is a Git LFS pointer"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_is_cut_anywhere_says_where_it_ends(tmp_path, zipped):
    path = tmp_path / "m.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=zipped)
    raw = path.read_bytes()
    for end in (0, 3, 100, 1000, 50_000, len(raw) - 10):
        path.write_bytes(raw[:end])
        with pytest.raises(MergeflowError, match=f"is cut short: it ends after {end} bytes. Copy or download"):
            open_checkpoint(path)


def test_the_wrong_suffix(tmp_path):
    torch.save(STATE, tmp_path / "m.safetensors")
    with pytest.raises(MergeflowError, match=r"zip archive.* ends in .pt"):
        open_checkpoint(tmp_path / "m.safetensors")
    write_checkpoint(tmp_path / "w.safetensors", STATE)
    shutil.copy(tmp_path / "w.safetensors", tmp_path / "w.bin")
    with pytest.raises(MergeflowError, match=r"is a safetensors file: .* ends in .safetensors"):
        open_checkpoint(tmp_path / "w.bin")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_checkpoint(tmp_path / "w.safetensors", STATE)
    with open_checkpoint("~/w.safetensors") as state:
        assert list(state) == list(STATE)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it out, with one model; nothing else can be reached."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    model = tmp_path / "hub" / "models--acme--tiny"
    snapshot = model / "snapshots" / ("c0ffee" + "0" * 34)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(snapshot.name)
    write_checkpoint(snapshot / "model.safetensors", STATE)
    return snapshot


def test_an_id_is_found_in_the_cache_and_recorded_with_its_commit(cache):
    for name in ("acme/tiny", "acme/tiny@main", f"acme/tiny@{cache.name}"):
        with open_checkpoint(name) as state:
            assert state.path == str(cache)
    assert fixed_id("acme/tiny") == f"acme/tiny@{cache.name}"
    assert fixed_id("acme/other") == "acme/other"


def test_a_cache_with_a_tokenizer_alone_is_not_a_model(cache):
    (cache / "model.safetensors").rename(cache / "tokenizer.json")
    with pytest.raises(MergeflowError, match="neither in the local cache"):
        open_checkpoint("acme/tiny")


def test_an_id_without_cache_and_network_is_one_sentence_with_the_way_out(cache):
    with pytest.raises(MergeflowError, match=r"Hugging Face id it is neither in the local cache nor .*hf download"):
        open_checkpoint("acme/unknown")


@pytest.mark.parametrize("name", ["models/base", "a/b/c", "./acme/tiny", "acme/tiny.safetensors", "tiny"])
def test_a_mistyped_path_is_not_asked_of_a_server(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(MergeflowError, match=r"^there is no checkpoint at '[^']*' \(seen from '/.*'\)."):
        open_checkpoint(name)
