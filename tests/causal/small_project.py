"""Small causal bases and texts for tests: four families of transformers, a byte-level tokenizer without merges."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tests.project_folder import run_pipeline, write_project

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "phi": {"tie_word_embeddings": False},
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TASKS = {
    "ships": "folder:inputs/ships",
    "trees": "jsonl:inputs/trees.jsonl",
    "colours": "jsonl:inputs/colours.jsonl",
}


def config_of(kind: str) -> dict[str, Any]:
    """Return the values of config.json of a small model of a family."""
    return {"model_type": kind, **({} if kind == "gpt2" else SIZES), **FAMILIES[kind], "eos_token_id": 256}


def save_tokenizer(folder: Path, *more: str) -> None:
    """Write a tokenizer of the 256 bytes, <end>, and further words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.add_tokens(list(more))
    fast.save_pretrained(folder)


def make_base(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """Write a small model of a family with random weights, and a tokenizer of bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    save_tokenizer(folder)
    values = {**config_of(kind), "vocab_size": 257}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.save_pretrained(folder)
    return folder


def tale(about: str, words: int, seed: int) -> str:
    """Return a text in which little is possible behind each word."""
    choose = random.Random(f"{about}{seed}").choice
    return " ".join(f"the {about} {choose(['runs', 'rests'])} {choose(['.', 'and'])}" for _ in range(words))


def questions(count: int) -> list[dict[str, Any]]:
    """Return questions whose answer stands in them."""
    chance = random.Random(0)
    names, answers = ["red", "blue", "green"], [chance.randrange(3) for _ in range(count)]
    return [{"question": f"say {names[answer]}:", "choices": names, "answer": answer} for answer in answers]


def finished_project(factory: pytest.TempPathFactory) -> Path:
    """Return the one project of causal models that all tests of a run share; it has run up to `evaluate`."""
    return once(factory, "causal_project", lambda folder: run_pipeline(make_causal_project(folder)))


def make_causal_project(folder: Path, model: dict[str, Any] | None = None, **finetune: Any) -> Path:
    """Write a project of three tasks: a folder of texts, rows of texts, and questions with choices."""
    import json

    inputs = folder / "inputs"
    make_base(inputs / "base")
    (inputs / "ships").mkdir()
    for number in range(3):
        (inputs / "ships" / f"{number}.txt").write_text(tale("ship", 900, number))
    (inputs / "trees.jsonl").write_text("".join(json.dumps({"text": tale("tree", 12, n)}) + "\n" for n in range(200)))
    rows = [{**row, "question": f"{n} {row['question']}"} for n, row in enumerate(questions(200))]
    (inputs / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "tasks": TASKS,
        "data": {"tokenizer": "inputs/base", "block": 64},
        "model": {"modality": "causal", "pretrained": "inputs/base"} | (model or {}),
        "evaluation": {"batch_size": 32},
    }
    return write_project(
        folder, values, {"steps": 30, "batch_size": 8, "learning_rate": 0.01, "save_every": 20, **finetune}
    )
