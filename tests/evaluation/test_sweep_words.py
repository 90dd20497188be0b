"""Sweeps over language models of other vocabularies, settings or templates: a candidate is the merge to come."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.search.sweep import run_sweep
from mergeflow.search.sweep_file import make_sweep
from tests.merging.model_folders import TEXT, llama, save, tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SCORER = """
import json
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoTokenizer

def loss(folder, candidate):
    words = AutoTokenizer.from_pretrained(folder)
    if candidate.name == "task_arithmetic":
        told = json.loads((folder / "config.json").read_text())
        rows = len(load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
        assert told["vocab_size"] == len(words) == rows
        assert words.chat_template.startswith("{% for m")
    return {"text": -abs(candidate.args.get("scale", 0.0) - 0.6)}
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    plain, more = tokenizer("BPE"), tokenizer("BPE", TEXT, "<|im_start|>", "<|im_end|>")
    save(tmp_path / "base", llama(plain.get_vocab_size(), 0), plain)
    save(tmp_path / "chat", llama(more.get_vocab_size(), 1), more)
    config = json.loads((tmp_path / "chat/config.json").read_text())
    (tmp_path / "chat/config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}))
    (tmp_path / "scorer.py").write_text(SCORER)
    return tmp_path


def values(models: Path, **changes: object) -> dict[str, object]:
    settings = {
        "base": str(models / "base"),
        "experts": {"chat": str(models / "chat")},
        "score": {"function": f"{models}/scorer.py:loss", "model": "folder"},
    }
    methods = {"task_arithmetic": {"scale": [0.3, 0.6]}}
    return {**settings, "methods": methods, "tokenizer_source": "union", "allow": ["hidden_act"], **changes}


def test_candidates_have_the_vocabulary_and_the_template_of_the_winner(models: Path) -> None:
    sweep = make_sweep(values(models, chat_template=TEMPLATE))
    result = run_sweep(sweep, models / "sweep")
    assert result.winner.args["scale"] == 0.6
    made = merge(yaml.safe_load((models / "sweep/winner.yaml").read_text()))
    assert made.path == models / "sweep/merged"
    loaded, words = AutoModelForCausalLM.from_pretrained(made.path), AutoTokenizer.from_pretrained(made.path)
    assert len(words) == len(loaded.model.embed_tokens.weight)
    assert words.chat_template == TEMPLATE
    base, chat, merged = (
        read_state(path)["model.norm.weight"] for path in (models / "base", models / "chat", made.path)
    )
    torch.testing.assert_close(merged, base + 0.6 * (chat - base))
    with pytest.raises(MergeflowError, match=r"holds results of other inputs \(.*chat_template"):
        run_sweep(make_sweep(values(models, chat_template="{{ messages }}")), models / "sweep")


def test_the_winner_of_model_folders_is_a_model_folder(tmp_path: Path) -> None:
    words = tokenizer("BPE")
    for seed, name in enumerate(("base", "chat")):
        save(tmp_path / name, llama(words.get_vocab_size(), seed), words)
    (tmp_path / "scorer.py").write_text("def loss(folder, candidate):\n    return {'text': 1.0}\n")
    chosen = {name: value for name, value in values(tmp_path).items() if name not in ("tokenizer_source", "allow")}
    run_sweep(make_sweep(chosen), tmp_path / "sweep")
    made = merge(yaml.safe_load((tmp_path / "sweep/winner.yaml").read_text()))
    assert made.path == tmp_path / "sweep/merged"
    AutoModelForCausalLM.from_pretrained(made.path)
    assert len(AutoTokenizer.from_pretrained(made.path)) == words.get_vocab_size()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allow": None}, "hidden_act: base 'silu'"),
        ({"tokenizer_source": None}, "tokenizer_source"),
        ({"tokenizer": "union"}, "are both in the sweep"),
        (
            {"score": None, "model": {"architecture": "ViT-B-32"}, "tasks": {"t": "data"}, "objective": "mean"},
            "are of language models",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(models: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(MergeflowError, match=message):
        run_sweep(make_sweep(values(models, **changes)), models / "sweep")
    assert not (models / "sweep").exists() or not list((models / "sweep").glob("winner*"))
