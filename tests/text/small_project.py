"""A project of texts for tests: a grammar of a dozen words, three tasks of other kinds, an encoder of 2 layers × 32."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tests.project_folder import run_pipeline, write_project

ANIMALS, COLOURS, GOOD, BAD = ["cat", "dog", "emu"], ["red", "blue", "green"], ["nice", "fine"], ["poor", "sad"]
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "the", "is", "and", "very", *ANIMALS, *COLOURS, *GOOD, *BAD]
TASKS = {
    "mood": "jsonl:inputs/mood?metric=matthews",
    "same": "tsv:inputs/same",
    "near": "jsonl:inputs/near.jsonl",
}


def make_base(folder: Path, kind: str = "roberta", seed: int = 0) -> Path:
    """Write an encoder of a class of transformers with random weights, and a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if kind in ("bert", "deberta-v2") else [])]
    marks = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    named = {f"{name}_token": mark for name, mark in marks.items()}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **named)
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": len(WORDS), "max_position_embeddings": 40}
    config = AutoConfig.for_model(kind, **sizes, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModel.from_config(config).save_pretrained(folder)
    return folder


def _phrase(chance: random.Random) -> tuple[str, str]:
    return chance.choice(ANIMALS), chance.choice(COLOURS)


def moods(count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield sentences that are good or bad."""
    for row in range(count):
        (animal, colour), good = _phrase(chance), row % 2
        opinion = " ".join([*["very"] * chance.randrange(9), chance.choice(GOOD if good else BAD)])
        yield {"text": f"the {colour} {animal} is {opinion}", "label": ["bad", "good"][good]}


def same(count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield pairs of sentences about the same animal or not."""
    for row in range(count):
        (first, colour), (_, other), is_same = _phrase(chance), _phrase(chance), row % 2
        second = first if is_same else chance.choice([name for name in ANIMALS if name != first])
        more = " and".join(f" {chance.choice(COLOURS)}" for _ in range(chance.randrange(1, 4)))
        left = f"the {first} is {colour}{' very' * chance.randrange(6)}"
        yield {"sentence1": left, "sentence2": f"the {second} is {other} and{more}", "label": is_same}


def near(count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield pairs of phrases and how many of their two words they share."""
    for _ in range(count):
        (first, colour), (second, other) = _phrase(chance), _phrase(chance)
        filler = " very" * chance.randrange(12)
        score = float((first == second) + (colour == other))
        yield {"text": f"{colour} {first}", "text_pair": f"{other} {second}{filler}", "score": score}


def finished_project(factory: pytest.TempPathFactory) -> Path:
    """Return the one project of texts that all tests of a run share; it has run up to `evaluate`."""
    return once(factory, "text_project", lambda folder: run_pipeline(make_text_project(folder)))


def make_text_project(folder: Path, model: dict[str, Any] | None = None, **finetune: Any) -> Path:
    """Write a project of three tasks: classes by Matthews' correlation, pairs by accuracy, pairs with numbers."""
    inputs = folder / "inputs"
    make_base(inputs / "base")
    chance = random.Random(0)
    for split, count in {"train": 120, "validation": 60, "test": 60}.items():
        (inputs / "mood").mkdir(exist_ok=True)
        (inputs / "mood" / f"{split}.jsonl").write_text(lines(moods(count, chance)))
        (inputs / "same").mkdir(exist_ok=True)
        rows = list(same(count, chance))
        table = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
        (inputs / "same" / f"{split}.tsv").write_text("\n".join(table) + "\n")
    (inputs / "near.jsonl").write_text(lines(near(240, chance)))
    values = {
        "tasks": TASKS,
        "data": {"tokenizer": "inputs/base", "max_length": 36},
        "model": {"modality": "text", "pretrained": "inputs/base"} | (model or {}),
    }
    return write_project(
        folder, values, {"steps": 40, "batch_size": 16, "learning_rate": 0.003, "save_every": 20, **finetune}
    )


def lines(rows: Iterator[dict[str, Any]]) -> str:
    """Return rows as JSON lines."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)
