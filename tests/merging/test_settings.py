"""Each key of each family's config.json is changed while the weights stay: where an output changes, `check` says it."""

import copy
import inspect
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from mergeflow.checkpoints import open_checkpoint
from mergeflow.merging.preflight import compare, config_findings
from tests.merging.families import FAMILIES, built
from tests.merging.model_folders import KINDS, TEXT, llama, save, tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
CHUNKS = 20
STATES = re.compile(r"past_key_values|.*(?:hidden_states|attentions|loss|router_logits)|mems|state|cache_params")
TOKENS = torch.tensor([[0, 5, 6, 2, 7, 1, 8, 3, 9, 10, 4, 2]])  # the ids of special tokens among them
SHAPES = {"pixel_values": [(1, 3, 32, 32)], "input_values": [(1, 1600)], "input_features": [(1, 16, 32), (1, 32, 16)]}
Config = dict[str, Any]


def output(model: Any, tower: str, values: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        given = dict(model.get_submodule(tower)(**values))
    return [value for name, value in given.items() if isinstance(value, Tensor) and not STATES.fullmatch(name)]


def inputs(model: Any) -> list[tuple[str, dict[str, Tensor]]]:
    """Choose inputs: tokens, pictures or sound that a model takes, and those that only its towers take."""
    taken: dict[str, dict[str, Tensor]] = {}
    for tower, part in model.named_modules():
        names = inspect.signature(part.forward).parameters if isinstance(part, PreTrainedModel) else {}
        made = [
            {name: torch.ones(shape).cumsum(-1).sin()} for name in SHAPES for shape in SHAPES[name] if name in names
        ]
        made += [{**values, "input_ids": TOKENS} for values in (*made, {}) if "input_ids" in names]
        decoder = {"decoder_input_ids": TOKENS[:, :9]} if "decoder_input_ids" in names else {}
        for values in ({**values, **more} for values in made for more in (decoder, {})):
            try:
                new = not any(values.keys() <= other.keys() for other in taken.values())
                if new and output(model, tower, values):
                    taken[tower] = values
            except Exception:  # not what this model takes
                continue
    return list(taken.items())


def others(key: str, value: Any, source: str) -> list[Any]:
    """Return other values of a key: plausible numbers, and words of the lines of code that name it."""
    words = re.findall(r"[\"']([\w./-]+)[\"']", "\n".join(re.findall(rf".*\b{key}\b.*", source)))[:8]
    words = [word for word in dict.fromkeys((*["relu", "silu"] * ("act" in key), *words)) if word not in (key, value)]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value // 2, None] if isinstance(value, int) else [value * 1.7 + 0.3, None]
    if isinstance(value, list) and value:
        return [value[::-1], [value[-1]] * len(value)]
    return [True, 1, 0.5, *words] if value is None else [*words, None] if isinstance(value, str) else [None]


def variants(config: Config, source: str, place: tuple[str, ...] = ()) -> Iterator[tuple[str, Config]]:
    """Yield each key by its dotted name, with a config.json that lacks it, then with other values of it."""
    hidden = re.findall(r"getattr\((?:self\.)?config, [\"'](\w+)[\"'],", source)  # read, but no class has a default
    part = config
    for name in place:
        part = part[name]
    for key, value in {**({} if place else dict.fromkeys(hidden)), **part}.items():
        for new in (..., *others(key, value, source)):
            inner = variant = copy.deepcopy(config)
            for name in place:
                inner = inner[name]
            inner.update({key: new}) if new is not ... else inner.pop(key, None)
            yield ".".join((*place, key)), variant
        # Towers of families that are tried by themselves are left to these.
        if isinstance(value, dict) and "label" not in key and value.get("model_type") not in FAMILIES:
            yield from variants(config, source, (*place, key))


def silent(model: Any) -> tuple[int, list[str]]:
    """Return how many variants of a model's config.json change an output, and the keys of which nothing is said."""
    state, taken, config = model.state_dict(), inputs(model), json.loads(model.config.to_json_string())
    source = "".join(inspect.getsource(inspect.getmodule(kind)) for kind in (type(model), type(model.config)))  # type: ignore[arg-type]

    def outputs(content: Config) -> list[Tensor]:
        """Return nothing for what changes names or shapes, or is refused by the class."""
        try:
            for device in ("meta", "cpu"):  # without a size a model may be large
                with torch.device(device):
                    made = type(model)(type(model.config).from_dict(copy.deepcopy(content))).eval()
                if {n: v.shape for n, v in made.state_dict().items()} != {n: v.shape for n, v in state.items()}:
                    return []
            made.load_state_dict(state)
            return [value.double() for tower, values in taken for value in output(made, tower, values)]
        except Exception:
            return []

    def equal(a: list[Tensor], b: list[Tensor]) -> bool:
        pairs = zip(a, b, strict=False)  # a call may give more where a setting says so
        return all(x.shape == y.shape and torch.allclose(x, y, 1e-4, 1e-5, equal_nan=True) for x, y in pairs)

    reference, left_out, count, keys = outputs(config), {"": config}, 0, []
    if not reference or not equal(reference, outputs(config)):  # draws numbers
        return 0, []
    for key, variant in variants(config, source):
        values = outputs(variant)
        if not values:
            continue
        if equal(reference, values):
            left_out.setdefault(key, variant)  # the default is the value
            continue
        count += 1
        starts = (config, left_out.setdefault(key, config))
        keys += [key for start in starts if not config_findings(start, {"a": variant}, state)]
    return count, keys


def changed(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each place of a JSON file with the file as it is with another value there, or without it."""
    keys = [*value] if isinstance(value, dict) else [*range(len(value))][:20] if isinstance(value, list) else []
    for key in keys if len(keys) < 50 else ():
        for new in (..., "the", ["the"], [], *others(str(key), value[key], "")):
            variant = copy.copy(value)
            if new is not ...:
                variant[key] = new
            elif isinstance(variant, dict):
                del variant[key]
            yield f"{place}.{key}", variant
        for inner, part in changed(value[key], f"{place}.{key}"):
            variant = copy.copy(value)
            variant[key] = part
            yield inner, variant


def cut(folder: Path) -> str:
    """Cut some texts by transformers' tokenizer of a folder."""
    made = AutoTokenizer.from_pretrained(folder)
    texts = ("the cat sat", "  A merge of <x> models <y> keeps", "THE café <x>mat", "unseen zzz", "x" * 12)
    ids = [made(text)["input_ids"] for text in texts]
    decoded = [[made.decode(row, skip_special_tokens=skip) for row in ids] for skip in (True, False)]
    pairs = dict(made(*texts[:2])), dict(made([*texts], truncation=True, max_length=6))
    return str((ids, decoded, pairs, made.special_tokens_map, made.model_max_length, made.padding_side))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_a_tokenizer_is_told(kind: str, file: str, tmp_path: Path) -> None:
    words = tokenizer(kind, TEXT, "<x>", "<y>")
    save(tmp_path / "base", llama(words.get_vocab_size(), 0), words, eos_token="<x>", model_max_length=64)
    (tmp_path / "base/special_tokens_map.json").write_text("{}")
    shutil.copytree(tmp_path / "base", tmp_path / "a")
    models = [open_checkpoint(tmp_path / name) for name in ("base", "a")]
    content, reference, results = json.loads((tmp_path / "base" / file).read_text()), cut(tmp_path / "base"), {}
    more = {
        "additional_special_tokens": ["the"],
        "extra_special_tokens": ["the"],
        "pad_token": "the",
        "eos_token": "the",
    }
    variants = [*changed(content), *((key, {**content, key: value}) for key, value in more.items())]
    for place, variant in variants:
        (tmp_path / "a" / file).write_text(json.dumps(variant))
        try:
            if cut(tmp_path / "a") == reference:
                continue
        except BaseException:  # no tokenizer any more; what its library raises then is no Exception
            continue
        results.setdefault(place, []).append(bool(compare(models[0], {"a": models[1]})))
    results.pop(".added_tokens", None)  # in another order than their ids, as no library writes them
    assert not [place for place, findings in results.items() if not all(findings)]
    assert len(results) >= 3


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_changes_an_output_is_told(chunk: int) -> None:
    models = {family: built(family, headed=True) for family in FAMILIES[chunk::CHUNKS]}
    results = {family: silent(model) for family, model in models.items() if model is not None}
    assert not {family: keys for family, (_, keys) in results.items() if keys}
    assert sum(count for count, _ in results.values()) >= 30
