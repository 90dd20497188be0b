"""Companion files with anything anywhere: a merge of their models is right, or one MergeflowError and no output."""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from tests.merging.model_folders import TEXT, llama, save, tokenizer
from tests.merging.tiny_models import tiny

DEEP = "@deep"  # stands for a value nested too deep for functions that call themselves
VALUES = [None, True, -1, 3, 10**30, 10**400, 1.5, float("nan"), "x", "9" * 400, [], [[1]], [[[None]]], {"a": 1}, DEEP]
RAW = [b"", b"null", b"[" * 9_000, b"\xff\xfe", b'{"a": 1, "a": 2}', b'"\\ud800"', b'{"\\ud800": 1}', b"NaN", b"{}"]
SENTENCES: dict[str, Any] = {
    "modules.json": [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}],
    "1_Pooling/config.json": {"word_embedding_dimension": 16},
    "sentence_bert_config.json": {"max_seq_length": 16},
    "preprocessor_config.json": {"image_mean": [0.5], "size": {"shortest_edge": 16}},
}
SLOW: dict[str, Any] = {
    "vocab.json": {"a": 0, "b": 1},
    "added_tokens.json": {"<x>": 2},
    "tokenizer_config.json": {"added_tokens_decoder": {"3": {"content": "<y>"}}, "extra_special_tokens": ["<y>"]},
    "special_tokens_map.json": {"eos_token": {"content": "<y>"}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("companions")
    for seed, name in enumerate(("base", "expert")):
        model = llama(304, seed, tied=True)
        save(root / name, model, tokenizer("BPE", TEXT, "<pad>", "</s>"), eos_token="</s>", chat_template="{{ 1 }}")
        model.save_pretrained(root / "slow" / name)
        tiny("bert", seed).save_pretrained(root / "sentences" / name)
        for folder, files in ((root / name, {}), (root / "slow" / name, SLOW), (root / "sentences" / name, SENTENCES)):
            for file, content in files.items():
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_text(json.dumps(content))
    return root


def put(content: Any, place: tuple[Any, ...], value: Any) -> bytes:
    """The JSON of a content with another value in a place."""
    content = copy.deepcopy(content)
    part = whole = [content]
    for key in (place := (0, *place))[:-1]:
        part = part[key]
    part[place[-1]] = value
    return json.dumps(whole[0]).replace(f'"{DEEP}"', "[" * 900 + "]" * 900).encode()


def places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places of a JSON content, but no more than five of each list or mapping."""
    inner = list(content.items() if isinstance(content, dict) else enumerate(content))[-5:]
    parts = [(key, value) for key, value in inner if isinstance(value, dict | list)]
    return [
        at,
        *((*at, key) for key, _ in inner),
        *(place for key, value in parts for place in places(value, (*at, key))),
    ]


def merged_or_refused(file: Path, content: bytes, out: Path) -> bool:
    folder, before = next(each for each in file.parents if (each / "expert").is_dir()), file.read_bytes()
    recipe = {"method": "average", "base": f"{folder}/base", "experts": {"e": f"{folder}/expert"}, "out": str(out)}
    refused = False
    try:
        file.write_bytes(content)
        for more in ({}, {"tokenizer_source": "union"}):
            try:
                merge({**recipe, **more})
            except MergeflowError:
                refused = True
                assert not out.exists()
            else:
                shutil.rmtree(out)
    finally:
        file.write_bytes(before)
    return refused


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("base/tokenizer.json", ("model", "vocab", "a"), "x"),
        ("expert/tokenizer.json", ("model", "vocab", "a"), [1]),
        ("expert/tokenizer.json", ("model", "vocab", "a"), 10**30),
        ("expert/tokenizer.json", ("model", "vocab", "a"), -1),
        ("expert/tokenizer.json", ("added_tokens", 0, "content"), [1]),
        ("expert/tokenizer.json", ("post_processor",), DEEP),
        ("base/config.json", ("pad_token_id",), DEEP),
        ("expert/config.json", ("rope_parameters", "rope_theta"), [1]),
        ("slow/expert/tokenizer_config.json", ("added_tokens_decoder", "3"), {}),
        ("slow/expert/vocab.json", ("a",), None),
    ],
)
def test_a_value_of_another_kind_is_refused(folders, file, place, value, tmp_path):
    assert merged_or_refused(
        folders / file, put(json.loads((folders / file).read_text()), place, value), tmp_path / "m"
    )


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("sentences/expert/modules.json", (), 3),
        ("sentences/base/sentence_bert_config.json", ("max_seq_length",), "9" * 400),
        ("expert/tokenizer_config.json", ("extra_special_tokens",), 3),
        ("expert/tokenizer_config.json", ("extra_special_tokens",), [{"content": [1]}]),
    ],
)
def test_what_no_merge_depends_on_may_be_anything(folders, file, place, value, tmp_path):
    content = put(json.loads((folders / file).read_text()), place, value)
    merged_or_refused(folders / file, content, tmp_path / "m")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_anything_anywhere(folders, seed, tmp_path):
    files = sorted(folders.rglob("*.json"))
    rng = random.Random(seed)
    for _ in range(150):
        file = rng.choice(files)
        content = json.loads(file.read_text())
        anything = put(content, rng.choice(places(content)), rng.choice(VALUES))
        merged_or_refused(file, rng.choice(RAW) if rng.random() < 0.1 else anything, tmp_path / "m")
