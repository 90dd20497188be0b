"""Adapters of different settings and types merge as the weights that PEFT makes of each, computed in float64."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, merge, prepare
from tests.merging.tiny_models import perturb, tiny

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
TIED = {"llama": {"tie_word_embeddings": True}}
HEADS = ("lm_head", "classifier", "vocab_projector", "decoder", "proj_out")
REFUSED = re.compile("is a DoRA of the embedding|made with ensure_weight_tying|cannot be part of an adapter")
# What forward passes do not read, and what PEFT moves twice as far.
PASSED = re.compile(r"(?:predictions|lm_head)\.bias$|head\.attention\.out_proj")


def drawn(draw: random.Random, model: Any) -> dict[str, Any]:
    """Draw the settings of an adapter; PEFT refuses some."""
    kinds = {nn.Linear: [], nn.Embedding: [], nn.LayerNorm: []}
    for name, module in model.named_modules():
        for kind, names in kinds.items():
            if isinstance(module, kind) or (kind is nn.Linear and type(module).__name__ == "Conv1D"):
                names.append(name)
    linear, tables, norms = kinds.values()
    heads = [name for name in linear if name.endswith(HEADS)]
    ends = sorted({name.rpartition(".")[2] for name in linear} - {*HEADS, *map(str, range(9))})
    few = draw.sample(ends, draw.randint(1, min(3, len(ends))))
    targets = [few, "all-linear", rf".*\.({'|'.join(few)})", draw.sample(linear, 2), [*few, *tables[:1]]]
    bias = draw.choice(["none", "none", "all", "lora_only"])
    settings = {
        "r": draw.randint(1, 6),
        "lora_alpha": draw.choice([1, 3, 8, 5.5]),
        "target_modules": draw.choice([*targets, [*few, *heads]]),
        "bias": bias,
        "lora_bias": bias == "none" and draw.random() < 0.2,
        "use_rslora": draw.random() < 0.3,
        "use_dora": draw.random() < 0.2,
        "fan_in_fan_out": model.config.model_type == "gpt2",
        "rank_pattern": draw.choice([{}, {few[0]: 7}, {re.escape(linear[0]): 2}]),
        "alpha_pattern": draw.choice([{}, {few[0]: 9.5}, {f".*{few[-1]}": 2}]),
        "modules_to_save": draw.choice([None, None, draw.sample(heads + tables + norms, 1)]),
        "ensure_weight_tying": draw.random() < 0.2,
    }
    if hasattr(model, "lm_head") and draw.random() < 0.3:
        settings["trainable_token_indices"] = draw.sample(range(40), 3)
    if any(name.endswith("experts") for name, _ in model.named_modules()) and not settings["use_dora"]:
        settings["target_parameters"] = draw.choice([None, ["experts.gate_up_proj", "experts.down_proj"]])
    return settings


def state_of(model: Any) -> dict[str, Tensor]:
    """Return the weights that PEFT makes of a model or an adapted one in float64, tied matrices one by one."""
    seen: set[int] = set()
    for module in model.double().modules():
        for name, value in module.named_parameters(recurse=False):
            if id(value) in seen and value.ndim > 1:
                setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=False))
            seen.add(id(getattr(module, name)))
    merged = model.merge_and_unload() if isinstance(model, peft.PeftModel) else model
    return {name: value.detach().clone() for name, value in merged.state_dict().items()}


def adapted(folder: Path, draw: random.Random, load: Any) -> dict[str, Tensor]:
    """Save an adapter of random weights, in a type of its own; return the weights that PEFT makes of it."""
    while True:
        try:
            wrapped = peft.get_peft_model(load(), peft.LoraConfig(**drawn(draw, load())))
            perturb(wrapped, 0.15, draw.randint(0, 999))
            wrapped.save_pretrained(folder)
            file, dtype = folder / "adapter_model.safetensors", draw.choice(TYPES)
            stored = load_file(file)
            factors = {name: value.to(dtype) for name, value in stored.items() if ".lora_" in name}
            save_file(stored | factors, file, {"format": "pt"})
            state = state_of(peft.PeftModel.from_pretrained(load(), folder))
        except (ValueError, KeyError, RuntimeError, TypeError, AttributeError):  # PEFT makes none of these settings
            continue
        if state.keys() == load().state_dict().keys():  # else it leaves modules in their wrappers
            return state


def unlike(made: dict[str, Tensor], wanted: dict[str, Tensor], share: float = 0) -> list[str]:
    """Return the tensors of which more than a share of the entries differ."""
    assert made.keys() == wanted.keys()
    far = {name: (made[name] - value).abs() > 3e-5 * (value.abs().max() + 1e-3) for name, value in wanted.items()}
    return [name for name in far if far[name].double().mean() > share and not PASSED.search(name)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "qwen2", "bert", "distilbert", "t5", "vit", "mixtral", "gemma3", "whisper"]
)
def test_adapters_of_different_settings_merge_as_peft_s_weights(tmp_path: Path, family: str, seed: int) -> None:
    draw = random.Random(f"{family} {seed}")
    model: Any = tiny(family, **TIED.get(family, {}))
    perturb(model, 0.1, 7)
    model.to(draw.choice(TYPES)).save_pretrained(tmp_path / "base")

    def load(name: str = "base") -> Any:
        return type(model).from_pretrained(tmp_path / name, dtype=torch.float32)

    weights = {name: draw.choice([1.0, 0.5, -0.7, 2.0]) for name in "abc"[: draw.randint(1, 3)]}
    base, states = state_of(load()), {name: adapted(tmp_path / name, draw, load) for name in weights}
    recipe = {"base": str(tmp_path / "base"), "experts": {name: str(tmp_path / name) for name in weights}}
    recipe |= {"weights": weights, "dtype": "float32"}
    total = {name: base[name] + sum(weights[e] * (states[e][name] - base[name]) for e in weights) for name in base}
    adapter = {"adapter": {"rank": 64, "embeddings": draw.choice(["whole", "lora"])}}
    for out, more in (("sum", {}), ("adapter", adapter)):
        try:
            plan = {"method": "task_arithmetic", "args": {"scale": 1.0}, "out": str(tmp_path / out)}
            result = merge({**recipe, **more, **plan})
        except MergeflowError as error:
            if not REFUSED.search(str(error)):
                raise
            continue
        made = peft.PeftModel.from_pretrained(load(), tmp_path / out) if more else load(out)
        assert not unlike(state_of(made), total)
        if not more and not any("which are tied" in note for note in result.notes):  # else each table counts apart
            merge({**recipe, "method": "ties", "args": {"keep": 0.3}, "out": str(tmp_path / "ties")})
            every = (base, *states.values())
            first = {name: min(n for n in base if all(torch.equal(s[n], s[name]) for s in every)) for name in base}
            once = [{name: state[name] for name in {*first.values()}} for state in every]  # a tied table counts once
            call, experts = configure("ties", {"keep": 0.3}), dict(zip(states, once[1:], strict=True))
            ties = prepare(call, once[0], experts, weights).at(1.0)
            # Entries at a threshold fall on either side of it.
            assert not unlike(state_of(load("ties")), {name: ties[first[name]] for name in base}, 0.02)
