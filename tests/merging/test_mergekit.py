"""Configurations in mergekit's documented style: our recipe gives what their arithmetic, written plainly, gives."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
import transformers
import yaml

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import make_recipe, merge
from mergeflow.merging.catalog import MERGEKIT as METHODS
from mergeflow.merging.files.mergekit import converted, write_recipe
from tests.merging.model_folders import llama, save, tokenizer

LAYERS = 5
NAMES = ["embed_tokens.weight", *(f"layers.{i}.{p}.weight" for i in range(LAYERS) for p in ("self_attn.q", "mlp.up"))]
NAMES.append("norm.weight")
SHAPE = (20, 20)

CONFIGURATIONS = {
    "linear": """
        {models: [{model: a, parameters: {weight: 1.0}}, {model: b, parameters: {weight: 0.3}}],
         merge_method: linear}""",
    "linear-unnormalised": """
        {models: [{model: a, parameters: {weight: 1.0}}, {model: b, parameters: {weight: 0.3}}],
         merge_method: linear, parameters: {normalize: false}, dtype: float64}""",
    "linear-gradient": """
        {models: [{model: a, parameters: {weight: [1, 0.5, 0.2]}}, {model: b, parameters: {weight: 0.3}}],
         merge_method: linear}""",
    "slerp-documented": """
        slices: [{sources: [{model: base, layer_range: [0, 5]}, {model: a, layer_range: [0, 5]}]}]
        merge_method: slerp
        base_model: base
        parameters:
          t:
            - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
            - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
            - value: 0.5""",
    "slerp-models": """
        {models: [{model: base}, {model: b}], merge_method: slerp, base_model: base, parameters: {t: 0.4}}""",
    "task-arithmetic": """
        {models: [{model: a, parameters: {weight: 0.7}}, {model: b, parameters: {weight: -0.2}}],
         merge_method: task_arithmetic, base_model: base, parameters: {lambda: 0.8}}""",
    "task-arithmetic-normalised": """
        {models: [{model: base}, {model: a, parameters: {weight: 0.7}}, {model: b, parameters: {weight: 0.5}}],
         merge_method: task_arithmetic, base_model: base, parameters: {normalize: true}}""",
    "ties-documented": """
        models:
          - model: base
          - {model: a, parameters: {density: [1, 0.7, 0.1], weight: 1.0}}
          - {model: b, parameters: {density: 0.5, weight: [0, 0.3, 0.7, 1]}}
          - {model: c, parameters: {density: 0.33, weight: [{filter: mlp, value: 0.5}, {value: 0}]}}
        merge_method: ties
        base_model: base
        parameters: {normalize: true, int8_mask: true}
        dtype: float64""",
    "ties-sum": """
        {models: [{model: a, parameters: {density: 0.53, weight: 0.4}},
                  {model: b, parameters: {density: 0.53, weight: 0.6}}],
         merge_method: ties, base_model: base, parameters: {normalize: false, lambda: 1.3}}""",
    "dare-ties-whole": """
        {models: [{model: a, parameters: {density: 1.0, weight: 0.4}},
                  {model: b, parameters: {density: 1.0, weight: 0.6}}],
         merge_method: dare_ties, base_model: base, parameters: {int8_mask: true}}""",
    "dare-linear-whole": """
        {models: [{model: a, parameters: {weight: 0.4}}, {model: b, parameters: {weight: 0.6}}],
         merge_method: dare_linear, base_model: base}""",
    "della-whole": """
        {models: [{model: a, parameters: {density: 1, weight: 0.4}}, {model: b, parameters: {density: 1, weight: 0.6}}],
         merge_method: della, base_model: base, parameters: {epsilon: 0.05, lambda: 1}}""",
    "breadcrumbs": """
        {models: [{model: a, parameters: {density: 0.9, gamma: 0.01, weight: 0.5}},
                  {model: b, parameters: {density: 0.6, gamma: 0.02, weight: 0.5}}],
         merge_method: breadcrumbs, base_model: base}""",
    "breadcrumbs-ties": """
        {models: [{model: a, parameters: {weight: 0.5}}, {model: b, parameters: {weight: 0.8}}],
         merge_method: breadcrumbs_ties, base_model: base, parameters: {density: 0.7, gamma: 0.05, normalize: true}}""",
    "task-arithmetic-varied": """
        {models: [{model: a, parameters: {weight: [0.2, 0.8, 0.5]}},
                  {model: b, parameters: {weight: [{filter: mlp, value: 0.9}, {value: 0.4}]}}],
         merge_method: task_arithmetic, base_model: base, parameters: {normalize: true, lambda: 0.7}}""",
    "dare-linear-varied": """
        {models: [{model: a, parameters: {weight: [0.2, 0.8]}}, {model: b, parameters: {weight: 0.6}}],
         merge_method: dare_linear, base_model: base, parameters: {normalize: true}}""",
    "della-linear-opposite": """
        {models: [{model: a, parameters: {weight: [{filter: mlp, value: 0.5}, {value: 0.3}]}},
                  {model: b, parameters: {weight: -0.5}}],
         merge_method: della_linear, base_model: base, parameters: {normalize: true}}""",
    "breadcrumbs-varied": """
        {models: [{model: a, parameters: {weight: [0.2, 0.8]}}, {model: b, parameters: {weight: 0.6}}],
         merge_method: breadcrumbs, base_model: base, parameters: {density: 0.7, gamma: 0.05, normalize: true}}""",
    "nuslerp": """
        {models: [{model: a, parameters: {weight: [0.2, 0.8]}}, {model: b, parameters: {weight: 0.5}}],
         merge_method: nuslerp, base_model: base}""",
    "nuslerp-rows": """
        {models: [{model: a, parameters: {weight: 0.2}}, {model: b, parameters: {weight: 0.5}}],
         merge_method: nuslerp, parameters: {nuslerp_flatten: false}}""",
    "multislerp": """
        {models: [{model: a, parameters: {weight: 0.2}}, {model: b, parameters: {weight: 0.5}},
                  {model: c, parameters: {weight: 0.5}}], merge_method: multislerp, base_model: base}""",
    "nearswap": "{models: [{model: a}], merge_method: nearswap, base_model: base, parameters: {t: [0.01, 0.3]}}",
    "sce": """
        {models: [{model: a}, {model: b}, {model: c}], merge_method: sce, base_model: base,
         parameters: {select_topk: 0.3}}""",
    "ram": "{models: [{model: a}, {model: b}], merge_method: ram, base_model: base, parameters: {epsilon: 0.05}}",
}


def setting(value, name, t):
    """A parameter of mergekit for a tensor at depth t: a number, numbers over depth, or filters."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return value
    if isinstance(value[0], dict):
        return next(setting(rule["value"], name, t) for rule in value if rule.get("filter", "") in name)
    place = t * (len(value) - 1)
    low = min(math.floor(place), len(value) - 1)
    high = min(low + 1, len(value) - 1)
    return value[low] * (1 - (place - low)) + value[high] * (place - low)


def slerp(t, a, b):
    angle = torch.acos((a * b).sum() / a.norm() / b.norm())
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def trimmed(tau, density):
    order = tau.abs().flatten().argsort(descending=True)[: int(density * tau.numel() + 1e-9)]
    mask = torch.zeros(tau.numel(), dtype=tau.dtype)
    mask[order] = 1
    return tau * mask.reshape(tau.shape)


def crumbs(tau, density, gamma):
    n = tau.numel()
    target, top = round(density * n), round(gamma * n)
    low = n - target - top
    mask = torch.zeros(n, dtype=tau.dtype)
    mask[tau.abs().flatten().argsort()[low : low + target]] = 1
    return tau * mask.reshape(tau.shape)


def agreed(deltas, weights, normalize):
    sign = torch.where(sum(deltas) >= 0, 1.0, -1.0)
    agreeing = [torch.where(delta.sign() == sign, delta, 0) for delta in deltas]
    divisor = sum(w * (delta.sign() == sign).double() for w, delta in zip(weights, deltas, strict=True))
    return sum(agreeing) / torch.where(divisor == 0, 1, divisor) if normalize else sum(agreeing)


def theirs(config, states, name):
    """One tensor of mergekit's result, in float64, from its documented formulas."""
    t = int(name.partition("layers.")[2][0]) / (LAYERS - 1) if "layers" in name else float(name == "norm.weight")
    method, shared = config["merge_method"], config.get("parameters", {})
    listed = config.get("models") or config["slices"][0]["sources"]
    names = [model_entry["model"] for model_entry in listed]
    parameters = {model_entry["model"]: {**shared, **model_entry.get("parameters", {})} for model_entry in listed}

    def parameter(model, key, default):
        return setting(parameters[model].get(key, default), name, t)

    base = states["base"][name]
    others = [model for model in names if model != "base"]
    values = [states[model][name] for model in others]
    weights = [parameter(model, "weight", 1.0) for model in others]
    deltas = [value - base for value in values]
    if method == "linear":
        total = sum(w * v for w, v in zip(weights, values, strict=True))
        return total / sum(weights) if shared.get("normalize", True) else total
    if method == "slerp":
        return slerp(setting(shared["t"], name, t), base, values[0])
    if method == "nuslerp":
        share = weights[1] / sum(weights)
        if "base_model" in config:
            return base + slerp(share, *deltas)
        return torch.stack([slerp(share, x, y) for x, y in zip(*values, strict=True)])
    if method == "multislerp":
        shares = [w / sum(weights) for w in weights]
        mean = sum(w * d / d.norm() for w, d in zip(shares, deltas, strict=True))
        return base + mean / mean.norm() * sum(w * d.norm() for w, d in zip(shares, deltas, strict=True))
    if method == "nearswap":
        return base + deltas[0] * (setting(shared["t"], name, t) / deltas[0].abs()).clamp(0, 1)
    if method == "ram":
        moved = [torch.where(delta.abs() > shared["epsilon"], delta, 0) for delta in deltas]
        return base + sum(moved) / sum(delta != 0 for delta in moved).clamp(min=1)
    if method == "sce":
        stack = torch.stack(deltas)
        mask = trimmed(stack.var(0, unbiased=False), shared["select_topk"]) != 0
        masked = stack * mask
        energy = masked.square().mean((1, 2))
        energy = (energy / energy.sum())[:, None, None] * (masked.sign() == torch.where(masked.sum(0) >= 0, 1.0, -1.0))
        return base + (masked * energy).sum(0) / energy.sum(0).clamp(min=1e-6)
    if method == "ties":
        deltas = [trimmed(delta, parameter(m, "density", 1.0)) for m, delta in zip(others, deltas, strict=True)]
    if method.startswith("breadcrumbs"):
        deltas = [
            crumbs(delta, parameter(m, "density", 1.0), parameter(m, "gamma", 0.01))
            for m, delta in zip(others, deltas, strict=True)
        ]
    weighted = [w * delta for w, delta in zip(weights, deltas, strict=True)]
    normalize = shared.get("normalize", method in ("ties", "della"))
    if method.endswith("ties") or method == "della":
        update = agreed(weighted, weights, normalize)
    else:
        divisor = sum(weights) if abs(sum(weights)) >= 1e-8 else 1.0
        update = sum(weighted) / divisor if normalize else sum(weighted)
    return base + shared.get("lambda", 1.0) * update


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(SHAPE, generator=generator, dtype=torch.float64) for name in NAMES}
    states = {"base": base}
    for model in "abc":
        # Different signs and sizes, so that no sum of signs is 0 and no two magnitudes are equal.
        states[model] = {n: base[n] + 0.1 * torch.randn(SHAPE, generator=generator, dtype=torch.float64) for n in NAMES}
    for model, state in states.items():
        write_checkpoint(folder / f"{model}.safetensors", state)
    return folder, states


@pytest.mark.parametrize("which", CONFIGURATIONS)
def test_a_converted_configuration_gives_what_theirs_means(models, which, tmp_path):
    folder, states = models
    config = yaml.safe_load(CONFIGURATIONS[which])
    recipe, _ = converted([config])
    place = {key: f"{folder}/{path}.safetensors" for key, path in recipe["experts"].items()}
    recipe |= {"experts": place, "out": str(tmp_path / "out.safetensors")}
    recipe |= {"base": f"{folder}/{recipe['base']}.safetensors"} if "base" in recipe else {}
    made = merge(make_recipe(yaml.safe_load(yaml.safe_dump(recipe, sort_keys=False))))
    with open_checkpoint(made.path) as checkpoint:
        for name in NAMES:
            torch.testing.assert_close(checkpoint[name], theirs(config, states, name), rtol=1e-9, atol=1e-9)


def test_a_list_over_depth_that_reaches_the_head_is_noted():
    def notes(value):
        return converted([{**PAIR, "parameters": {"t": value}}])[1]

    for value in ([0, 1], [{"filter": "mlp", "value": 1}, {"value": [0, 1]}]):
        assert any("follows the last block" in note for note in notes(value))
    for value in (0.5, [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]):
        assert not any("follows the last block" in note for note in notes(value))


PAIR = {"merge_method": "slerp", "base_model": "a", "models": [{"model": "b"}]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**PAIR, "tokenizer_source": "model:strange"}, "the tokenizer of 'strange', which is not among the models"),
        ({**PAIR, "chat_template": "vicuna"}, "chat_template: vicuna, which is not known here"),
        (
            {
                "merge_method": "dare_ties",
                "base_model": "a",
                "models": [{"model": "b"}],
                "parameters": {"rescale": False, "density": 0.5},
            },
            "rescale: false",
        ),
        (
            {
                "merge_method": "della",
                "base_model": "a",
                "models": [{"model": "b", "parameters": {"epsilon": 0.1}}, {"model": "c"}],
                "parameters": {"density": 0.5},
            },
            "epsilon that differs between models",
        ),
        (
            {
                "merge_method": "della",
                "base_model": "o",
                "models": [
                    {"model": name, "parameters": {"density": share}} for name, share in (("a", 1.0), ("c", 0.5))
                ],
            },
            "a density of 1 with smaller ones",
        ),
        (
            {
                "merge_method": "ties",
                "base_model": "a",
                "slices": [{"sources": [{"model": "b", "layer_range": [2, 4]}, {"model": "c", "layer_range": [2, 4]}]}],
            },
            "a slice without layers of the base 'a'",
        ),
        (
            {"merge_method": "passthrough", "tokenizer_source": "union", "slices": [{"sources": [{"model": "a"}]}]},
            "a tokenizer of its own for slices",
        ),
        ({"gate_mode": "uniform_random", "base_model": "a", "experts": []}, "gate_mode: uniform_random"),
        (
            {"base_model": "a", "experts": [], "shared_experts": [{"source_model": "b", "noise_scale": 0.1}]},
            "`noise_scale` of an expert",
        ),
    ],
)
def test_what_cannot_be_carried_over_is_named(config, message):
    with pytest.raises(MergeflowError, match=message):
        converted([config])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"models": [{"model": "a", "parameter": {"weight": 2}}]},
            r"unknown key 'parameter' of models.0: did you mean 'parameters'",
        ),
        ({"models": ["a", "b"]}, "models.1: must be keys with values, found 'b'"),
        ({"models": "a"}, "models: must be a list, found 'a'"),
        (
            {"models": [{"model": "a", "parameters": [1]}]},
            r"models.0.parameters: must be keys with values, found \[1\]",
        ),
        ({"models": [{"parameters": {"weight": 1}}]}, "models.0.model is missing"),
        (
            {"models": [{"model": {"lora": "b"}}, {"model": {"model": {"pth": "a"}}}]},
            "models.1.model: `model` is missing",
        ),
        ({"slices": [{"source": [{"model": "a"}]}]}, "slices.0.sources is missing"),
        ({"slices": [{"sources": ["a"]}]}, "slices.0.sources.0: must be keys with values, found 'a'"),
        (
            {"slices": [{"sources": [{"model": "a", "layer_range": [4, 2]}]}]},
            r"layer_range: two numbers of blocks.*\[4, 2\]",
        ),
        (
            {"slices": [{"sources": [{"model": "a", "layers": [0, 2]}]}]},
            "'layers' of slices.0.sources.0: did you mean 'layer_r",
        ),
        ({"slices": [{"sources": None}]}, "slices.0.sources: must be a list, found None"),
        ({"models": [{"model": {"model": None, "lora": "d"}}]}, "models.0.model: `model` is missing"),
        ({"models": [{"model": 7}]}, r"models.0.model: expected a path, or a mapping with `path`, found 7"),
        ({"parameters": {"density": "high"}}, "parameters.density: expected a number, .* found 'high'"),
        (
            {"models": [{"model": "a", "parameters": {"weight": [{"filter": "mlp"}, {"value": 1}]}}]},
            "models.0.parameters.weight: expected a number",
        ),
        ({"parameters": {"weight": [{"filter": 3, "value": 0.3}, 1]}}, "parameters.weight: expected .*'filter': 3"),
        ({"parameters": {"weight": [[0.1, 0.2], 0.3]}}, r"parameters.weight: expected .* found \[\[0.1"),
        ({"tokenizer": {"tokens": {"<a>": {"source": 7}}}}, "tokenizer.tokens.<a>.source: expected a path, .* found 7"),
        ({"tokenizer": {"tokens": {"<a>": {"source": {"kind": "model_token", "model": 7}}}}}, "expected a path, .* 7"),
        ({"tokenizer": {"tokens": {"<a>": "b"}}}, "tokenizer.tokens.<a>: must be keys with values, found 'b'"),
        ({"tokenizer": ["union"]}, r"tokenizer: must be keys with values, found \['union'\]"),
    ],
)
def test_a_form_that_mergekit_does_not_document_is_refused(change, message):
    """A key beside `parameters` was lost without a word; lists of plain paths were tracebacks."""
    with pytest.raises(MergeflowError, match=message):
        converted([{"merge_method": "linear"} | ({} if "slices" in change else {"models": [{"model": "a"}]}) | change])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gate_mode": "random", "experts": [{"source_model": "a"}]}, "base_model is missing"),
        (
            {"base_model": "a", "experts": [], "shared_experts": {"source_model": "b"}},
            "shared_experts: must be a list, found",
        ),
        ({"base_model": "a", "experts": [{"source_model": None}]}, "experts.0.source_model: expected a path"),
    ],
)
def test_a_form_of_mixtures_that_mergekit_does_not_document_is_refused(config, message):
    with pytest.raises(MergeflowError, match=message):
        converted([config])


def test_a_window_of_della_for_models_of_one_density():
    """At density 1 nothing is dropped; one model of density 1 took the window of all others away."""
    models = [{"model": name, "parameters": {"density": 0.5}} for name in "ac"]
    config = {"merge_method": "della", "base_model": "o", "models": models, "parameters": {"epsilon": 0.1}}
    recipe, _ = converted([config])
    assert (recipe["args"]["drop"], recipe["args"]["window"]) == (0.5, 0.2)
    models[0]["parameters"]["density"] = 1.0
    recipe, _ = converted([{**config, "parameters": {"epsilon": 0.0}}])
    assert (recipe["args"]["drop"], recipe["args"]["window"]) == ({"a": 0.0, "c": 0.5}, 0.0)
    models[1]["parameters"]["density"] = 1.0
    assert converted([config])[0]["args"]["window"] == 0.0


def test_the_order_of_steps_does_not_follow_the_hash_seed():
    """A recipe of the same configuration is the same text in every process."""
    program = (
        "import json; from mergeflow.merging.files.mergekit import converted; print(json.dumps(converted("
        "[{'name': n, 'merge_method': 'linear', 'models': [{'model': 'a'}, {'model': 'b'}]} for n in 'uvwxyz'] + "
        "[{'merge_method': 'linear', 'models': [{'model': n} for n in 'zyxwvu']}])[0]))"
    )
    records = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
                       check=True, text=True).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(records) == 1
    assert list(json.loads(records.pop())["steps"]) == list("uvwxyz")


def test_models_as_mappings_keep_their_revision_and_adapter():
    model = {"model": {"path": "acme/a", "revision": "v1"}, "lora": {"path": "acme/lora", "revision": "main"}}
    recipe, _ = converted([{"merge_method": "linear", "models": [{"model": model}, {"model": {"path": "b"}}]}])
    step = dict(make_recipe(recipe).steps)["a-v1_lora-main"]
    assert (step.base, dict(step.experts)) == ("acme/a@v1", {"adapter": "acme/lora@main"})
    assert recipe["experts"]["b"] == "b"


@pytest.mark.parametrize(
    ("name", "models", "tokenizer", "experts"),
    [
        ("my merge", ["my merge"], None, {"my-merge": "step:my-merge", "c": "c"}),
        ("org/x", ["org/x"], "org/x", {"org-x": "step:org-x", "c": "c"}),
        ("x", ["x+l/lora"], None, {"x_lora": "step:x_lora", "c": "c"}),
        ("x", ["x", "x+l/lora"], "x", {"x": "step:x", "x_lora": "step:x_lora", "c": "c"}),
    ],
)
def test_a_named_merge_may_have_any_name_an_adapter_and_the_tokenizer(name, models, tokenizer, experts):
    """Adapters on merges read the path of that name, and merges were no owners of tokenizers."""
    pair = {"merge_method": "linear", "parameters": {"weight": 1.0}}
    last = {**pair, "models": [{"model": model} for model in (*models, "c")], "tokenizer_source": tokenizer}
    recipe, _ = converted([{**pair, "name": name, "models": [{"model": "a"}, {"model": "b"}]}, last])
    made = make_recipe(recipe)
    assert recipe["experts"] == experts
    if "x_lora" in recipe["steps"]:
        assert dict(made.steps)["x_lora"].base == "step:x"
    assert made.tokenizer is None or made.tokenizer.source == next(iter(experts))


def test_two_merges_of_one_name_are_refused():
    with pytest.raises(MergeflowError, match="several merges named 'x'"):
        converted([{**PAIR, "name": "x"}, {**PAIR, "name": "x", "models": [{"model": "c"}]}, {**PAIR}])


def test_every_model_is_an_expert_whatever_its_path():
    """Of paths that end alike, one whose slashes read as another's underscores took its place."""
    paths = ["x/m", "y/m", "x_m", "base", ".", "a b"]
    recipe, _ = converted([{"merge_method": "karcher", "models": [{"model": path} for path in paths]}])
    assert list(recipe["experts"].values()) == paths
    make_recipe(recipe)


def test_documents_without_one_result():
    named = [{**PAIR, "name": name} for name in ("x", "y")]
    with pytest.raises(MergeflowError, match="has 2 merges that no other reads"):
        converted(named)
    recipe, _ = converted([named[0], {**PAIR, "name": "y", "models": [{"model": "x"}]}])
    assert recipe["experts"] == {"a": "a", "x": "step:x"}


def test_slices_of_layers_that_are_merged():
    merged = """
        merge_method: slerp
        base_model: a
        parameters: {t: 0.5}
        slices:
          - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 3]}]
            parameters: {t: [0, 1]}
          - sources: [{model: a, layer_range: [2, 3]}, {model: b, layer_range: [0, 1]}]"""
    recipe, _ = converted([yaml.safe_load(merged)])
    first, second = (
        recipe["steps"][entry["model"].removeprefix("step:")] for entry in recipe["steps"]["slices"]["slices"]
    )
    assert (first["args"], second["args"]) == ({"t": [0, 1]}, {"t": 0.5})
    places = [recipe["steps"][path.removeprefix("step:")] for path in first["experts"].values()]
    assert places == [[{"model": "a", "layers": [0, 2]}], [{"model": "b", "layers": [1, 3]}]]


SLERPED = """
merge_method: slerp
base_model: a
parameters: {t: 0.25}
slices:
  - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 2]}]
  - sources: [{model: a, layer_range: [2, 4]}, {model: b, layer_range: [2, 4]}]
    parameters: {t: 0.75}
"""
OF_SLICES = {
    "slerp": SLERPED,
    "slerp with a type": f"{SLERPED}dtype: float16",
    "slerp with a chat template": f"{SLERPED}chat_template: chatml",
    "a model with an adapter": """
merge_method: passthrough
slices: [{sources: [{model: a, layer_range: [0, 2]}]}, {sources: [{model: b+lora, layer_range: [1, 4]}]}]
parameters: {scale: 0.5}
""",
    "a scale of one source": """
merge_method: passthrough
dtype: bfloat16
slices:
  - sources: [{model: a, layer_range: [0, 4]}]
  - sources:
      - model: a
        layer_range: [3, 4]
        parameters: {scale: [{filter: o_proj, value: 0.0}, {filter: down_proj, value: 0.0}, {value: 1.0}]}
""",
    "a named merge": """
name: mean
merge_method: linear
models: [{model: a}, {model: b}]
---
merge_method: passthrough
slices: [{sources: [{model: mean, layer_range: [0, 2]}]}, {sources: [{model: b, layer_range: [1, 4]}]}]
""",
    "a mixture on a named merge": """
name: mean
merge_method: linear
models: [{model: a}, {model: b}]
---
base_model: mean
gate_mode: random
dtype: float32
experts: [{source_model: a}, {source_model: b}]
""",
}


def test_a_slerp_of_slices_of_real_models(tmp_path):
    """Two Llamas, slice by slice: every tensor is what the formula written plainly gives."""
    for seed, name in enumerate("ab"):
        save(tmp_path / name, llama(300, seed, num_hidden_layers=4).double(), tokenizer())
    text = SLERPED
    for name in "ab":
        text = text.replace(f"model: {name}", f"model: {tmp_path}/{name}")
    (tmp_path / "theirs.yml").write_text(text + "dtype: float32\nchat_template: chatml")
    write_recipe(tmp_path / "theirs.yml", tmp_path / "ours.yaml")
    made = merge(tmp_path / "ours.yaml", tmp_path / "merged")
    a, b, stacked = (dict(open_checkpoint(place)) for place in (tmp_path / "a", tmp_path / "b", made.path))
    assert stacked.keys() == a.keys()
    for name in stacked:
        behind = (
            name.split(".")[2] in ("2", "3") if ".layers." in name else name in ("lm_head.weight", "model.norm.weight")
        )
        same = torch.equal(a[name], b[name])  # norms of new models are all 1
        expected = a[name] if same else slerp(0.75 if behind else 0.25, a[name], b[name])
        torch.testing.assert_close(stacked[name], expected.float(), rtol=1e-6, atol=1e-7)
    assert "<|im_start|>" in (tmp_path / "merged/chat_template.jinja").read_text()


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """Two Llamas of four blocks and an adapter of the second, by name: their folders, and their tensors in memory."""
    peft = pytest.importorskip("peft")
    folder, states = tmp_path_factory.mktemp("llamas"), {}
    for seed, name in enumerate("ab"):
        model = llama(300, seed, num_hidden_layers=4)
        save(folder / name, model, tokenizer())
        states[name] = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "lora")
    states["b+lora"] = adapted.merge_and_unload().state_dict()
    states["mean"] = {key: (value + states["b"][key]) / 2 for key, value in states["a"].items()}
    return folder, states


# Blocks of each result, and its factor of each tensor.
STACKS = {
    "slerp": None,
    "slerp with a type": None,
    "slerp with a chat template": None,
    "a model with an adapter": ([("a", 0), ("a", 1), ("b+lora", 1), ("b+lora", 2), ("b+lora", 3)], lambda name: 0.5),
    "a scale of one source": (
        [*(("a", block) for block in range(4)), ("a", 3)],
        lambda name: 0.0 if "layers.4." in name and ("o_proj" in name or "down_proj" in name) else 1.0,
    ),
    "a named merge": ([("mean", 0), ("mean", 1), ("b", 1), ("b", 2), ("b", 3)], lambda name: 1.0),
    "a mixture on a named merge": None,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
@pytest.mark.parametrize("which", OF_SLICES)
def test_what_is_put_together_is_what_its_parts_are(which, llamas, tmp_path):
    """Every documented form of slices, adapters, named merges and mixtures is merged; transformers loads all of it."""
    folder, states = llamas
    text = OF_SLICES[which]
    for key in ("base_model", "source_model", "model"):
        for name in ("a", "b", "b+lora"):
            paths = "+".join(f"{folder}/{part}" for part in name.split("+"))
            text = re.sub(rf"\b{key}: {re.escape(name)}(?=[,}}\n])", f"{key}: {paths}", text)
    (tmp_path / "theirs.yml").write_text(text)
    write_recipe(tmp_path / "theirs.yml", tmp_path / "ours.yaml")
    merged = merge(tmp_path / "ours.yaml", tmp_path / "merged").path
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    types = {"slerp with a type": torch.float16, "a scale of one source": torch.bfloat16}
    assert model.dtype == types.get(which, torch.float32)
    if STACKS[which] is None:
        return
    blocks, factor = STACKS[which]
    state = model.state_dict()
    assert model.config.num_hidden_layers == len(blocks)
    for name, value in state.items():
        source, origin = states[blocks[-1 if "norm" in name or "lm_head" in name else 0][0]], name
        if ".layers." in name:
            model_name, block = blocks[int(name.split(".")[2])]
            source, origin = states[model_name], re.sub(r"layers\.\d+", f"layers.{block}", name)
        expected = factor(name) * source[origin].to(value.dtype)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_tokenizers_and_templates():
    tokens = {
        "<x>": {"source": "b"},
        "<y>": {"source": {"kind": "model_token", "model": "a", "token": "z"}, "force": True},
    }
    config = {**PAIR, "tokenizer": {"source": "union", "tokens": tokens}, "chat_template": "auto"}
    recipe, _ = converted([config])
    made = make_recipe(recipe)
    assert (made.tokenizer.source, made.chat_template) == ("union", "auto")
    assert recipe["tokenizer"]["tokens"]["<y>"]["source"]["model"] == "a"
    assert converted([{**PAIR, "tokenizer_source": "b"}])[0]["tokenizer"] == {"source": "b", "pad_to_multiple_of": 1}
    assert converted([{**PAIR, "tokenizer": "union"}])[0]["tokenizer"]["source"] == "union"
    assert converted([{**PAIR, "chat_template": "llama3"}])[0]["chat_template"] == "llama3"


def test_the_tokenizer_of_a_base_that_is_not_averaged():
    config = {"merge_method": "linear", "base_model": "old", "models": [{"model": "new"}, {"model": "newer"}]}
    recipe, _ = converted([{**config, "tokenizer_source": "base"}])
    assert (recipe["base"], recipe["tokenizer"]["source"], recipe["experts"]) == (
        "old",
        "base",
        {"new": "new", "newer": "newer"},
    )
    make_recipe(recipe)
    assert "base" not in converted([config])[0], "nothing else of it is read"


def test_a_mixture_without_a_gate_mode_has_the_hidden_one():
    config = {
        "base_model": "m/a",
        "experts": [{"source_model": source, "positive_prompts": ["x"]} for source in ("m/b", "m/c")],
    }
    recipe, _ = converted([config])
    assert dict(make_recipe(recipe).steps)["mixture"].gate == "hidden"


def test_a_mixture_of_experts():
    config = """
        base_model: m/a
        gate_mode: cheap_embed
        dtype: bfloat16
        experts_per_token: 1
        experts:
          - {source_model: m/b, positive_prompts: [x, y], negative_prompts: [z]}
          - {source_model: m/c, positive_prompts: [w]}
        shared_experts: [{source_model: m/a, residual_scale: 0.1}]"""
    recipe, notes = converted([yaml.safe_load(config)])
    mixture = dict(make_recipe(recipe).steps)["mixture"]
    assert (mixture.base, mixture.gate, mixture.experts_per_token, mixture.shared.scale) == (
        "m/a",
        "cheap_embed",
        1,
        0.1,
    )
    assert mixture.experts[0].prompts == ("x", "y")
    assert recipe["dtype"] == "bfloat16"
    assert any("half" in note for note in notes)


def test_random_masks_are_said_to_differ():
    plan = {"merge_method": "dare_ties", "base_model": "x", "models": [{"model": "a", "parameters": {"density": 0.53}}]}
    recipe, notes = converted([plan])
    assert recipe["args"]["drop"] == 0.47
    assert "another generator" in notes[0]


def written_back(config):
    """The form that mergekit writes beside its result: one module, one slice of whole models with the base."""
    models = list(config["models"])
    base = config.get("base_model")
    if base is not None and base not in [entry["model"] for entry in models]:
        models.append({"model": base})
    sources = [{"layer_range": [0, LAYERS], **entry} for entry in models]
    rest = {key: value for key, value in config.items() if key != "models"}
    return rest | {"modules": {"default": {"slices": [{"sources": sources}]}}}


@pytest.mark.parametrize("which", [name for name, text in CONFIGURATIONS.items() if "models" in yaml.safe_load(text)])
def test_what_mergekit_writes_back_is_the_same_recipe(which):
    """Of ten methods three were refused, and four ended in an IndexError."""
    config = yaml.safe_load(CONFIGURATIONS[which])
    recipe, notes = converted([config])
    again, more = converted([written_back(config)])
    assert again == recipe
    assert set(more) - set(notes) <= {"layer_range [0, 5] is taken for the whole model, whose config.json is not here"}


def test_modules_that_are_merged_alike_are_one_merge():
    def tower(*layers, **parameters):
        sources = [{"model": model, "layer_range": [*layers]} for model in "ab"]
        return {"slices": [{"sources": sources}], "parameters": parameters}

    config = {"merge_method": "slerp", "base_model": "a", "parameters": {"t": 0.3}}
    recipe, _ = converted([{**config, "modules": {"text": tower(0, 24), "vision": tower(0, 12)}}])
    assert (recipe["experts"], recipe["args"]) == ({"a": "a", "b": "b"}, {"t": 0.3})
    with pytest.raises(MergeflowError, match=r"modules that are merged in different ways.*`text`, `vision`"):
        converted([{**config, "modules": {"text": tower(0, 24), "vision": tower(0, 12, t=0.5)}}])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": []}, "found none of them"),
        ({"modules": 3}, "modules: must be keys with values, found 3"),
        ({"modules": {}}, "found none of them"),
        ({"modules": {"default": {}}}, "nothing to merge|without a `base_model`"),
        ({"slices": [{"sources": []}]}, "slices.0.sources"),
        ({"models": [{"model": "a"}], "slices": [{"sources": [{"model": "a"}]}]}, "found models and slices"),
        (
            {"modules": {"default": {"models": [{"model": "a"}], "slices": [{"sources": [{"model": "a"}]}]}}},
            "modules.default: give one of `models` and `slices`, found models and slices",
        ),
    ],
)
def test_a_configuration_without_models_is_refused(method, change, message):
    with pytest.raises(MergeflowError, match=message):
        converted([{"merge_method": method, **change}])


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_a_method_does_not_read_are_left_out_with_a_note(method):
    """model_stock and karcher applied weights that mergekit passes over; five other methods were refused."""
    pair = [
        {"model": name} for name in ("a" if method in ("passthrough", "slerp", "nearswap", "arcee_fusion") else "ab")
    ]
    config = {"merge_method": method, "models": pair, "parameters": {"t": 0.5, "weight": 1.0}}
    if method != "passthrough":
        config["base_model"] = "o"
    plain, _ = converted([config])
    strange = {
        key: 0.123 for key in ("weight", "t", "density", "scale", "regularization") if key not in METHODS[method].reads
    }
    models = [{**entry, "parameters": strange} for entry in pair]
    recipe, more = converted([{**config, "models": models, "parameters": config["parameters"] | {"odd": [1, 2]}}])
    assert recipe == plain
    assert {f"mergekit's {method} does not read `{key}`: it is left out" for key in (*strange, "odd")} <= set(more)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}, "refuses linear without `weight`"),
        (
            {**PAIR, "models": [{"model": "b", "parameters": {"t": 0.3}}]},
            "slerp does not read `t` of one model.*refuses slerp without `t`",
        ),
        (
            {
                "merge_method": "linear",
                "slices": [
                    {"sources": [{"model": model, "layer_range": [at, at + 1]} for model in models]}
                    for at, models in enumerate(("a", "ab"))
                ],
                "parameters": {"weight": 1},
            },
            "as many of them as the first slice has",
        ),
        ({**PAIR, "models": None, "modules": {"text_decoder": {"models": [{"model": "b"}]}}},
         "`text_decoder` is taken for the whole model"),
    ],
)  # fmt: skip
def test_what_mergekit_refuses_or_does_by_halves_is_noted(config, note):
    """All were carried over without a word, with defaults that the configuration does not name."""
    recipe, notes = converted([config])
    make_recipe(recipe)
    assert re.search(note, " ".join(notes))


def test_a_density_of_1_or_more_leaves_nothing_to_rescale():
    models = [{"model": "a", "parameters": {"weight": 0.5, "density": 1.5}}]
    for method, rescale in (("ties", True), ("dare_ties", False), ("della", False)):
        config = {"merge_method": method, "base_model": "o", "models": models, "parameters": {"rescale": rescale}}
        recipe, _ = converted([config])
        arguments = make_recipe(recipe).call().arguments
        assert (arguments.keep if method == "ties" else 1 - arguments.drop) == 1.0
    recipe, _ = converted([{"merge_method": "sce", "base_model": "o", "models": [*models, {"model": "b"}],
                            "parameters": {"select_topk": 2}}])  # fmt: skip
    assert make_recipe(recipe).call().arguments.keep == 1.0


@pytest.mark.parametrize("count", [".inf", "2.5"])
def test_a_number_of_iterations_that_is_none_is_refused(count):
    """2.5 was taken for 2, infinity was a traceback."""
    models = [{"model": "a"}, {"model": "b"}]
    recipe, _ = converted(
        [{"merge_method": "karcher", "models": models, "parameters": {"max_iter": float(yaml.safe_load(count))}}]
    )
    with pytest.raises(MergeflowError, match="iterations: must be a"):
        make_recipe(recipe)


def test_the_base_is_one_of_the_models_of_karcher_and_of_linear_with_a_common_weight():
    models = [{"model": "a"}, {"model": "b"}]
    assert list(converted([{"merge_method": "karcher", "base_model": "o", "models": models}])[0]["experts"]) == [
        "a",
        "b",
        "o",
    ]
    config = {"merge_method": "linear", "base_model": "o", "models": models, "parameters": {"weight": 0.5}}
    assert converted([config])[0]["weights"] == {"a": 0.5, "b": 0.5, "o": 0.5}


def test_a_filter_that_names_nothing_leaves_the_outer_value():
    """An expert's weight by filters took 1 for all other tensors, whatever the merge's weight was."""
    models = [{"model": "a", "parameters": {"weight": [{"filter": "mlp", "value": 0.5}]}}, {"model": "b"}]
    config = {"merge_method": "task_arithmetic", "base_model": "o", "models": models}
    recipe, _ = converted([{**config, "parameters": {"weight": "2e-1"}}])
    assert recipe["weights"] == {"a": [{"filter": "mlp", "value": 0.5}, {"value": 0.2}], "b": 0.2}
    with pytest.raises(MergeflowError, match="`weight` for tensors that none of its filters names"):
        converted([config])


def test_the_same_model_twice_is_refused():
    with pytest.raises(MergeflowError, match="the model 'a' twice in one merge"):
        converted([{"merge_method": "linear", "models": [{"model": "a"}, {"model": {"path": "a"}}]}])


def test_a_key_that_mergekit_does_not_know_is_noted():
    recipe, notes = converted([{**PAIR, "parameters": {"t": 0.5}, "random_seed": 3}])
    assert "random_seed" not in recipe
    left_out, of_slerp = notes
    assert left_out == "`random_seed` means nothing to mergekit, and is left out"
    assert "0 in one model has no direction" in of_slerp  # mergekit gives sin(t π/2) of the other one


def test_values_over_the_depth_of_slices():
    """A scale over depth runs over each slice; a slice of one layer stands at the end of it."""
    layers = [{"sources": [{"model": "a", "layer_range": [*limits]}]} for limits in ((0, 1), (1, 4))]
    recipe, notes = converted([{"merge_method": "passthrough", "slices": layers, "parameters": {"scale": [0.5, 2]}}])
    parts = [recipe["steps"][entry["model"].removeprefix("step:")] for entry in recipe["steps"]["slices"]["slices"]]
    assert [part["args"]["scale"] for part in parts] == [2.0, [0.5, 2.0]]
    assert any("a slice of one layer" in note for note in notes)
    scale = [{"filter": "layers.3.", "value": 0.5}, {"value": [1, 1.5]}]
    with pytest.raises(MergeflowError, match="a filter that names a layer's number"):
        converted([{"merge_method": "passthrough", "slices": layers, "parameters": {"scale": scale}}])


def test_density_of_breadcrumbs_over_depth():
    models = [{"model": "a", "parameters": {"density": [0.5, 0.9], "gamma": 0.05, "weight": 1}}]
    recipe, _ = converted([{"merge_method": "breadcrumbs", "base_model": "o", "models": models}])
    assert (recipe["args"]["beta"], recipe["args"]["gamma"]) == ([0.45, 0.05], 0.05)
    models[0]["parameters"]["gamma"] = 0.2
    with pytest.raises(MergeflowError, match="exceeds 1 - gamma"):
        converted([{"merge_method": "breadcrumbs", "base_model": "o", "models": models}])


def test_della_with_a_density_for_each_model_is_a_recipe():
    """Its window was checked against the default of `drop`, which no model had."""
    models = [{"model": name, "parameters": {"density": 0.5, "epsilon": 0.1, "weight": 1}} for name in ("a", "b")]
    models[1]["parameters"]["density"] = 0.6
    recipe, _ = converted([{"merge_method": "della", "base_model": "o", "models": models}])
    assert recipe["args"]["drop"] == {"a": 0.5, "b": 0.4}
    assert make_recipe({**recipe, "out": "out"}).call().arguments.window == 0.2


def test_numbers_of_layers_may_be_texts():
    sources = [{"model": "a", "layer_range": ["0", "2"]}]
    recipe, _ = converted([{"merge_method": "passthrough", "slices": [{"sources": sources}]}])
    assert recipe["slices"] == [{"model": "a", "layers": [0, 2]}]


TOWERS = [f"{part}.layers.{i}.w.weight" for part in ("vision_tower", "language_model") for i in range(LAYERS)]
APART = """
merge_method: task_arithmetic
base_model: base
parameters: {weight: 0.5, lambda: 0.9}
modules:
  multi_modal_projector: {models: [{model: b}]}
  vision_tower: {models: [{model: a, parameters: {weight: [0, 1]}}, {model: b}], parameters: {normalize: true}}
  text_decoder: {models: [{model: a, parameters: {weight: 0.7}}, {model: b}]}
"""
SLICED = """
    slices:
      - {sources: [{model: base, layer_range: [0, 2]}, {model: a, layer_range: [0, 2], parameters: {weight: 0.7}}]}
      - sources: [{model: b, layer_range: [2, 5]}, {model: base, layer_range: [2, 5]}]
        parameters: {weight: [{filter: layers.3, value: 0.2}, {value: 0.8}]}
"""


@pytest.mark.parametrize("text", [APART, APART.partition(" {models: [{model: a, parameters: {weight: 0.7")[0] + SLICED])
def test_modules_that_are_merged_in_different_ways_are_laid_over_each_other(tmp_path, text):
    """Each module's tensors have its own models, slices and parameters, and depth runs over its own blocks."""
    outside = ["lm_head.weight", "language_model.norm.weight", "language_model.embed_tokens.weight"]
    names = [*TOWERS, "multi_modal_projector.linear_1.weight", *outside]
    generator = torch.Generator().manual_seed(0)
    states = {model: {name: torch.randn(4, 4, generator=generator).double() for name in names}
              for model in ("base", "a", "b")}  # fmt: skip
    config = yaml.safe_load(text)
    text = json.dumps(config)
    for model, state in states.items():
        (tmp_path / model).mkdir()
        write_checkpoint(tmp_path / model / "model.safetensors", state)
        (tmp_path / model / "config.json").write_text(
            json.dumps({"model_type": "mistral3", "text_config": {"num_hidden_layers": LAYERS}})
        )
        text = text.replace(f'model": "{model}"', f'model": "{tmp_path}/{model}"')
    recipe, _ = converted([json.loads(text)])
    made = merge(make_recipe({**recipe, "out": str(tmp_path / "out")}))
    with open_checkpoint(made.path) as merged:
        for name in names:
            module = config["modules"].get(name.partition(".")[0], config["modules"]["text_decoder"])
            if slices := module.get("slices"):
                last = not ("embed" in name or ".layers.0." in name or ".layers.1." in name)
                module = slices[last] | {"models": slices[last]["sources"]}
            plain = {**config, **module, "parameters": config["parameters"] | module.get("parameters", {})}
            expected = theirs(plain, states, name)
            torch.testing.assert_close(merged[name], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"text_decoder": {}, "vision_tower": {}}, "the config.json of 'o' is not here"),
        ({"text_decoder": {}, "ears": {}}, "'ears' is no module that is known here"),
    ],
)
def test_modules_whose_tensors_are_not_known_are_refused(modules, message):
    modules = {name: {"models": [{"model": "ab"[at]}]} for at, name in enumerate(modules)}
    with pytest.raises(MergeflowError, match=f"modules that are merged in different ways .*{message}"):
        converted([{"merge_method": "ties", "base_model": "o", "modules": modules}])
