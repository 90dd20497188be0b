"""Adapters of recipes with steps, with a vocabulary of their own, with a template: PEFT loads what the merge is."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from tests.merging.model_folders import TEXT, llama, save, tokenizer

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A base and three experts, one of which has two tokens more."""
    monkeypatch.chdir(tmp_path)
    plain, more = tokenizer("BPE"), tokenizer("BPE", TEXT, "<|im_start|>", "<|im_end|>")
    for seed, name in enumerate(("base", "a", "b")):
        save(tmp_path / name, llama(plain.get_vocab_size(), seed, tied=True), plain)
    save(tmp_path / "chat", llama(more.get_vocab_size(), 3, tied=True), more)
    return tmp_path


def recipe(**changes):
    return {"method": "task_arithmetic", "args": {"scale": 0.7}, "base": "base", "out": "out", **changes}


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits


def test_experts_may_be_results_of_steps(folder):
    ties = {"method": "ties", "base": "base", "experts": ["a", "b"], "args": {"keep": 0.3}}
    given = recipe(steps={"t": ties}, experts=["step:t"])
    whole = merge(given, "whole")
    plan = check_recipe({**given, "adapter": 64})
    assert plan.written == ("t",)
    made = merge({**given, "adapter": 64}, "adapter")
    assert made.inputs.keys() >= {"step:t/a", "step:t/b", "step:t/base"}
    assert {key: made.inputs[key] for key in made.inputs if "/" in key}.items() <= whole.inputs.items()
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter")
    tokens = torch.arange(8)[None]
    wanted = logits(AutoModelForCausalLM.from_pretrained("whole"), tokens)
    torch.testing.assert_close(logits(model, tokens), wanted, rtol=1e-4, atol=1e-5)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    with pytest.raises(MergeflowError, match="base 'step:t': an adapter belongs to a model that is there"):
        merge(recipe(steps={"t": ties}, base="step:t", experts=["a"], adapter=4))


@pytest.mark.parametrize("source", ["union", "chat"])
def test_the_vocabulary_of_the_merge_goes_with_the_adapter(folder, source):
    given = recipe(experts=["chat", "a"], tokenizer_source=source)
    merge(given, "whole")
    made = merge({**given, "adapter": 64, "chat_template": "{{ messages }}"}, "adapter")
    assert not any("does not load" in note for note in made.notes)
    words, whole = AutoTokenizer.from_pretrained("adapter"), AutoTokenizer.from_pretrained("whole")
    assert words.get_vocab() == whole.get_vocab()
    assert words.chat_template == "{{ messages }}"
    base = AutoModelForCausalLM.from_pretrained("base")
    base.resize_token_embeddings(len(words))
    model = peft.PeftModel.from_pretrained(base, "adapter")
    tokens = words("the cat <|im_start|>sat on<|im_end|> a table", return_tensors="pt").input_ids
    wanted = logits(AutoModelForCausalLM.from_pretrained("whole"), tokens)
    torch.testing.assert_close(logits(model, tokens), wanted, rtol=1e-4, atol=1e-5)


def test_a_base_of_the_hub_is_named_as_peft_asks_for_it(folder, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    model, commit = folder / "hub/models--acme--tiny", "c0ffee" + "0" * 34
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(commit)
    (folder / "base").rename(model / "base")
    (model / "snapshots").mkdir()
    (model / "base").rename(model / "snapshots" / commit)
    merge(recipe(base="acme/tiny", experts=["a"], adapter=4), "adapter")
    config = peft.PeftConfig.from_pretrained("adapter")
    assert (config.base_model_name_or_path, config.revision) == ("acme/tiny", commit)
    merge(recipe(base="acme/tiny", experts=["adapter"], adapter=4, method="average", args={}), "again")
    config = peft.PeftConfig.from_pretrained("again")
    assert (config.base_model_name_or_path, config.revision) == ("acme/tiny", commit)


def test_a_chat_template_comes_with_the_tokenizer_that_it_belongs_to(folder):
    merge(recipe(experts=["a"], adapter=4, chat_template="{{ messages[0] }}"), "adapter")
    assert AutoTokenizer.from_pretrained("adapter").chat_template == "{{ messages[0] }}"
    assert not (folder / "adapter/config.json").exists()
    listed = json.loads((folder / "adapter/mergeflow.json").read_text())["files"]
    assert {path.name for path in (folder / "adapter").iterdir()} == set(listed)
    merge(recipe(experts=["a"], adapter=4), "adapter")  # its own folder is replaced
    assert not (folder / "adapter/tokenizer.json").exists()
    assert read_state("base").keys() >= {"model.embed_tokens.weight"}
