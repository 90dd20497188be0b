"""Encoders of thirty classes of transformers, saved as people save them, go through experts, merge and serving."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.served import SERVED
from mergeflow.modalities.serving import read_model
from registry.artifacts import ModelFiles, save_pyfunc
from tests.project_folder import run_pipeline, write_project
from tests.text.small_project import lines, make_base, moods, same

# What a folder holds beside the bare encoder in float32.
PLAIN, HALF, BRAIN, MASKED, CLASSIFIER, POSITIONS, PADDED = range(7)
FAMILIES = {
    "bert": MASKED,
    "roberta": CLASSIFIER,
    "distilbert": POSITIONS,
    "electra": HALF,
    "albert": MASKED,
    "deberta": BRAIN,
    "deberta-v2": CLASSIFIER,
    "modernbert": MASKED,
    "camembert": PADDED,
    "xlm-roberta": HALF,
    "xlm-roberta-xl": BRAIN,
    "mpnet": PADDED,
    "ernie": CLASSIFIER,
    "roformer": MASKED,
    "rembert": PLAIN,
    "big_bird": PADDED,
    "longformer": BRAIN,
    "mobilebert": CLASSIFIER,
    "nomic_bert": PADDED,
    "megatron-bert": HALF,
    "xlm": PADDED,
    "flaubert": PLAIN,
    "eurobert": MASKED,
    "jina_embeddings_v3": BRAIN,
    "ibert": POSITIONS,
    "splinter": PLAIN,
    "data2vec-text": CLASSIFIER,
    "esm": MASKED,
    "mra": HALF,
    "roc_bert": PLAIN,
}
TEXTS = ["the red cat is nice", "the blue dog is very very very very sad", "emu is fine"]


def save_as(kind: int, folder: Path) -> None:
    """Write a folder's encoder once more, the way that a kind of people do."""
    model: Any = AutoModel.from_pretrained(folder)
    weights = folder / "model.safetensors"
    if kind in (HALF, BRAIN):
        model.to(torch.float16 if kind == HALF else torch.bfloat16).save_pretrained(folder)
    elif kind in (MASKED, CLASSIFIER):
        task = "MaskedLM" if kind == MASKED else "SequenceClassification"
        headed: Any = getattr(transformers, f"AutoModelFor{task}").from_config(model.config)
        names = headed.base_model.state_dict()
        headed.base_model.load_state_dict({name: value for name, value in model.state_dict().items() if name in names})
        headed.save_pretrained(folder)
    elif kind == POSITIONS:  # a buffer that earlier releases stored
        extra = {"embeddings.position_ids": torch.arange(40)[None]}
        save_file({**load_file(weights), **extra}, weights, {"format": "pt"})
    elif kind == PADDED:  # a tokenizer that pads and cuts by itself, as sentence encoders have
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.backend_tokenizer.enable_padding(length=16, pad_id=1, pad_token="<pad>")
        tokenizer.backend_tokenizer.enable_truncation(5)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


def make_project(folder: Path, family: str) -> Path:
    base = make_base(folder / "inputs/base", family)
    save_as(FAMILIES.get(family, PLAIN), base)
    chance = random.Random(0)
    for split, count in {"train": 32, "validation": 16, "test": 16}.items():
        for task, rows in (("mood", moods(count, chance)), ("same", same(count, chance))):
            (folder / "inputs" / task).mkdir(exist_ok=True)
            (folder / "inputs" / task / f"{split}.jsonl").write_text(lines(rows))
    values = {
        "tasks": {"mood": "jsonl:inputs/mood", "same": "jsonl:inputs/same"},
        "data": {"tokenizer": "inputs/base", "max_length": 32},
        "model": {"modality": "text", "pretrained": "inputs/base", "head": "probed"},
    }
    write_project(folder, values, {"steps": 6, "batch_size": 8, "learning_rate": 0.001, "save_every": 6})
    return run_pipeline(folder, ("prepare", "base", "multitask", "finetune"))


def by_transformers(record: dict[str, str], weights: dict[str, torch.Tensor], head: Any, place: Path) -> torch.Tensor:
    """Return probabilities of each text by transformers alone, one text at a time without any padding."""
    values = json.loads(record["config"])
    model: Any = AutoModel.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).eval()
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else "encoder."
    loading = model.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()}, strict=False)
    assert not loading.unexpected_keys
    assert all("pooler" in name for name in loading.missing_keys)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    probabilities = []
    for text in TEXTS:
        hidden = model(**tokenizer(text, return_tensors="pt"))[0].mean(dim=1)
        probabilities.append((hidden @ head.weight.T + head.bias).softmax(dim=1)[0])
    return torch.stack(probabilities).detach()


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_through_experts_merge_and_serving(family: str, tmp_path: Path) -> None:
    root = make_project(tmp_path / "project", family)
    outputs, tasks = root / "outputs", ("mood", "same")
    files = {task: next((outputs / "experts" / task).glob("model*.safetensors")) for task in tasks}
    base = load_file(outputs / "base/model.safetensors")
    experts = {task: load_file(path) for task, path in files.items()}
    assert all(value.isfinite().all() for state in experts.values() for value in state.values())
    assert all(any(not torch.equal(state[name], base[name]) for name in base) for state in experts.values())

    recipe = {"method": "average", "base": str(outputs / "base/model.safetensors")}
    merge({**recipe, "experts": {task: str(path) for task, path in files.items()}, "out": f"{root}/merged.safetensors"})
    merged = load_file(root / "merged.safetensors")
    for name, value in merged.items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), sum(expert[name].double() for expert in experts.values()) / 2)

    with safe_open(outputs / "base/model.safetensors", framework="pt") as file:
        record = file.metadata()
    save_pyfunc(
        root / "served",
        ModelFiles(
            weights=root / "merged.safetensors",
            heads={task: outputs / f"experts/{task}/head.safetensors" for task in tasks},
            model=yaml.safe_load((root / "params.yaml").read_text())["model"],
            decoding=load_manifest(outputs / "data/manifests/mood")["decoding"],
            record=record,
            transforms={task: load_manifest(outputs / f"data/manifests/{task}")["transforms"] for task in tasks},
        ),
    )
    loaded = read_model(root / "served/artifacts/model", torch.device("cpu"))
    answers = SERVED.get("text").answer(loaded, {"task": ["mood"] * 3, "text": TEXTS})
    head = load_head(outputs / "experts/mood/head.safetensors")
    expected = by_transformers(record, merged, head, root / "inputs/base")
    probabilities = torch.tensor([[row[name] for name in head.class_names] for row in answers["probabilities"]])
    torch.testing.assert_close(probabilities, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["convbert", "nystromformer", "yoso"])
def test_a_family_whose_features_depend_on_padding_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match="its features of a text depend on the padding after it"):
        make_project(tmp_path / "project", family)
