"""The base that PEFT writes into adapter_config.json: taken where a recipe names none, compared where it names one."""

import json
import shutil

import pytest
import torch

from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from mergeflow.merging.files.recipe import make_recipe
from tests.merging.tiny_models import tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two models and an adapter of the first, which names it by a path relative to the folder."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("base", "other")):
        tiny("qwen2", seed).save_pretrained(folder / name)
    model = peft.get_peft_model(tiny("qwen2"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder / "lora")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    name_base(tmp_path, "lora", "base")
    return tmp_path


def name_base(folder, adapter, base, revision=None):
    file = folder / adapter / "adapter_config.json"
    values = {**json.loads(file.read_text()), "base_model_name_or_path": base, "revision": revision}
    file.write_text(json.dumps(values))


def recipe(**changes):
    return {"method": "task_arithmetic", "args": {"scale": 1.0}, "experts": ["lora"], "out": "out", **changes}


def warnings(**changes):
    return [line for line in check_recipe(recipe(**changes)).lines() if "base_model" in line]


def test_a_recipe_without_a_base_takes_the_one_that_its_adapters_name(folder):
    wanted = merge(recipe(base="base", out="wanted"))
    merged = merge(recipe())
    assert (merged.fingerprint, merged.inputs) == (wanted.fingerprint, wanted.inputs)
    assert make_recipe(recipe()).base == "base"
    # An expert that stands first would else be the base of the adapter beside it, without a word.
    slerp = make_recipe(recipe(method="slerp", args={"t": 0.5}, experts=["other", "lora"]))
    assert slerp.base == "base"


def test_a_base_of_the_local_hub_cache(folder, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    wanted, commit = merge(recipe(out="wanted")).fingerprint, "c0ffee" + "0" * 34
    snapshot = folder / "hub/models--acme--tiny/snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(commit)
    shutil.copytree("base", snapshot)
    for revision in (None, commit):
        name_base(folder, "lora", "acme/tiny", revision)
        assert merge(recipe()).fingerprint == wanted
        assert "acme/tiny" in (folder / "out/README.md").read_text()
        assert warnings(base="base") == []
    with pytest.raises(MergeflowError, match=r"'lora' was made for 'acme/tiny@c0ffee.*the base is 'other', whose weig"):
        merge(recipe(base="other"))
    name_base(folder, "lora", "acme/absent")
    with pytest.raises(MergeflowError, match=r"'acme/absent'.*adapter_config\.json of 'lora' names it.*`base`"):
        merge(recipe())


def test_bases_that_cannot_be_taken(folder):
    shutil.copytree("lora", "second")
    name_base(folder, "second", "other")
    with pytest.raises(MergeflowError, match="made for different ones: 'lora' for 'base'; 'second' for 'other'"):
        make_recipe(recipe(experts=["lora", "second"]))
    name_base(folder, "lora", "/home/somebody/base")
    with pytest.raises(MergeflowError, match="the bases of the adapters are not on this machine: 'lo"):
        make_recipe(recipe())
    name_base(folder, "lora", None)
    with pytest.raises(MergeflowError, match="base: is missing, and the result of 'task_arithmetic' depends on it"):
        make_recipe(recipe())


def test_a_base_of_other_weights_is_refused_and_can_be_meant(folder):
    with pytest.raises(MergeflowError, match=r"'lora' was made for 'base'.*the base is 'other', whose weights are oth"):
        merge(recipe(base="other"))
    merge(recipe(base="other", allow=["base_model"]))
    merged, base, other, delta = (read_state(name) for name in ("out", "base", "other", "lora"))
    assert any(not torch.equal(base[name], other[name]) for name in base)
    for name, value in other.items():
        torch.testing.assert_close(merged[name], value + delta.get(name, torch.zeros(())))


def test_a_copy_of_the_base_is_the_base(folder):
    shutil.copytree("base", "copy")
    assert warnings(base="copy") == []
    tiny("qwen2").to(torch.bfloat16).save_pretrained("half")
    assert warnings(base="half") == []


def test_a_base_that_is_not_here_is_told_by_its_name(folder):
    name_base(folder, "lora", "/home/somebody/Base")
    assert warnings(base="base") == []
    name_base(folder, "lora", "acme/tiny-7b")
    (line,) = warnings(base="base")
    assert "'lora' was made for 'acme/tiny-7b'" in line
    assert "cannot be compared" in line


def test_a_step_may_be_the_base_of_any_adapter(folder):
    mean = {"method": "average", "experts": {"a": "base", "b": "other"}}
    assert warnings(steps={"mean": mean}, base="step:mean") == []
