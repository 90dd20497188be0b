"""Values over depth, by filter and by expert: each tensor is merged as with its own constant arguments."""

import json

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, configure, make_recipe, merge, prepare

NAMES = [
    "embed_tokens.weight",
    *(f"layers.{i}.{part}.weight" for i in range(5) for part in ("self_attn.q_proj", "mlp.up_proj")),
    "norm.weight",
]
DEPTH = {
    name: int(name.split(".")[1]) / 4 if name.startswith("layers") else float(name == "norm.weight") for name in NAMES
}


@pytest.fixture(scope="module")
def models():
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(6, 8, generator=generator, dtype=torch.float64) for name in NAMES}
    experts = {
        expert: {name: base[name] + 0.1 * torch.randn(6, 8, generator=generator, dtype=torch.float64) for name in NAMES}
        for expert in "ab"
    }
    return base, experts


def each_alone(base, experts, method, args_of, weights=None):
    """Every tensor merged by itself with constant arguments."""
    merged = {}
    for name in base:
        alone = {expert: {name: state[name]} for expert, state in experts.items()}
        call = configure(method, args_of(name))
        merged |= prepare(call, {name: base[name]}, alone, weights(name) if weights else None).at(call.scale)
    return merged


def same(state, expected):
    assert set(state) == set(expected)
    for name in state:
        torch.testing.assert_close(state[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "argument", "values"),
    [
        ("slerp", "t", [0.0, 0.5, 1.0]),
        ("task_arithmetic", "scale", [0.1, 0.9]),
        ("nearswap", "t", [0.0, 0.2]),
        ("breadcrumbs", "beta", [0.1, 0.8, 0.3]),
        ("sce", "keep", [0.2, 1.0]),
        ("consensus", "threshold", [0.1, 2.0]),
        ("iso_cts", "common", [0.2, 0.9]),
        ("cart", "rank_ratio", [0.2, 0.9]),
        ("karcher", "iterations", [1, 5]),
    ],
)
def test_gradients_over_depth(models, method, argument, values):
    base, experts = models
    experts = {"a": experts["a"]} if method == "nearswap" else experts

    def value(name):
        place = DEPTH[name] * (len(values) - 1)
        low = min(int(place), len(values) - 2)
        between = values[low] + (place - low) * (values[low + 1] - values[low])
        return round(between) if argument == "iterations" else between

    more = {"matrices": ["*"]} if method in ("cart", "iso_cts") else {}
    call = configure(method, {**more, argument: values})
    expected = each_alone(base, experts, method, lambda name: {**more, argument: value(name)})
    same(prepare(call, base, experts).at(call.scale), expected)


def test_filters_by_name_the_first_that_fits_decides(models):
    base, experts = models
    setting = [{"filter": "self_attn", "value": [0, 1]}, {"filter": "mlp", "value": 0.25}, {"value": 0.75}]
    state = prepare(configure("slerp", {"t": setting}), base, experts).at(1)

    def value(name):
        return {"t": DEPTH[name] if "self_attn" in name else 0.25 if "mlp" in name else 0.75}

    same(state, each_alone(base, experts, "slerp", value))
    short = prepare(configure("slerp", {"t": [setting[0], setting[1], 0.75]}), base, experts).at(1)
    same(short, state)
    default = prepare(configure("slerp", {"t": setting[:2]}), base, experts).at(1)
    assert torch.equal(default["norm.weight"], prepare(configure("slerp"), base, experts).at(1)["norm.weight"])


@pytest.mark.parametrize(
    ("method", "args", "key"),
    [
        ("ties", {"trim": "tensor", "reduce": "sum"}, "keep"),
        ("dare", {"seed": 3}, "drop"),
        ("breadcrumbs", {"gamma": 0.0}, "beta"),
        ("della", {"seed": 3, "window": 0.1}, "drop"),
    ],
)
def test_a_value_for_each_expert(models, method, args, key):
    base, experts = models
    both = prepare(configure(method, {**args, key: {"a": 0.3, "b": [0.2, 0.6]}}), base, experts, [1, 1]).direction
    if method == "ties":  # alone, an expert has no conflicts: only the trimmed entries of both can be compared
        assert all(int((both[n] != 0).sum()) <= 48 * 0.3 + 48 * (0.2 + 0.4 * DEPTH[n]) for n in both)
        assert int((both["norm.weight"] != 0).sum()) > int((both["embed_tokens.weight"] != 0).sum())
        return
    alone = {
        "a": prepare(configure(method, {**args, key: 0.3}), base, {"a": experts["a"]}).direction,
        "b": prepare(configure(method, {**args, key: [0.2, 0.6]}), base, {"b": experts["b"]}).direction,
    }
    same(both, {name: alone["a"][name] + alone["b"][name] for name in both})


def test_weights_over_depth_in_a_recipe_that_can_be_replayed(models, tmp_path):
    base, experts = models
    for name, state in {"base": base, **experts}.items():
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    weights = {"a": [0, 1], "b": [{"filter": "mlp", "value": 2}, {"value": 0.5}]}
    plan = {
        "method": "task_arithmetic",
        "base": str(tmp_path / "base.safetensors"),
        "experts": {expert: str(tmp_path / f"{expert}.safetensors") for expert in experts},
        "weights": weights,
        "args": {"scale": [{"filter": "norm", "value": 0.5}, 1.0]},
        "out": str(tmp_path / "out.safetensors"),
    }
    made = merge(plan)
    expected = each_alone(
        base,
        experts,
        "task_arithmetic",
        lambda n: {"scale": 0.5 if "norm" in n else 1.0},
        lambda n: {"a": DEPTH[n], "b": 2 if "mlp" in n else 0.5},
    )
    with open_checkpoint(made.path) as state:
        same(dict(state), expected)
    again = json.loads(made.recipe.record())
    assert again["weights"] == weights
    assert make_recipe(again) == made.recipe
    assert merge({**again, "out": str(tmp_path / "again.safetensors")}).fingerprint == made.fingerprint


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("slerp", {"t": [0, 2]}, "t: must be at most 1, found 2"),
        ("slerp", {"t": []}, "an empty list has no value"),
        ("slerp", {"t": [[0, 1], [1, 0]]}, "found a list in a list"),
        ("slerp", {"t": {"filter": "mlp", "value": [[0, 1]]}}, "found a list in a list"),
        ("slerp", {"t": {"a": 0.5}}, "expected a number, a list over depth, or filter and value"),
        ("slerp", {"t": [{"filter": "mlp", "valu": 1}]}, "expected a number"),
        ("ties", {"keep": [0.1, 0.2]}, "`keep` is a share of the whole model and cannot vary: .* trim: tensor"),
        ("pcb", {"keep": [0.1, 0.2]}, "cannot vary: give one number"),
        ("della_ties", {"keep": [0.1, 0.2]}, "cannot vary: give one number"),
        ("dare", {"then": "ties", "keep": [{"filter": "mlp", "value": 0.3}, 1]}, "cannot vary: give one number"),
        ("wudi", {"lr": 1e308}, "lr: must be at most 1e"),
        ("ties", {"trim": ["tensor", "global"]}, "trim"),
    ],
)
def test_values_are_checked_before_any_work(method, args, message):
    with pytest.raises(MergeflowError, match=message):
        configure(method, args)


def test_a_list_over_depth_needs_blocks(tmp_path):
    """Every tensor took the last value."""
    base = {"encoder.weight": torch.ones(2, 2), "decoder.weight": torch.ones(2, 2)}
    expert = {name: value + 1 for name, value in base.items()}
    message = r"scale: a list over depth needs blocks.*the first is 'decoder.weight'"
    with pytest.raises(MergeflowError, match=message):
        prepare(configure("task_arithmetic", {"scale": [0, 1]}), base, {"a": expert})
    for name, state in (("base", base), ("a", expert)):
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    paths = {name: f"{tmp_path}/{name}.safetensors" for name in ("base", "a")}
    recipe = {"method": "task_arithmetic", "base": paths["base"], "experts": [paths["a"]]}
    with pytest.raises(MergeflowError, match=message):
        check_recipe({**recipe, "args": {"scale": [0, 1]}})
    with pytest.raises(MergeflowError, match="weight of 'a': a list over depth"):
        check_recipe({**recipe, "weights": {"a": [0, 1]}})
    check_recipe({**recipe, "args": {"scale": [{"filter": "enc", "value": 1}, {"value": 0.5}]}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "task_arithmetic", "args": {"scale": True}}, "scale: must be a number, found 'true'"),
        ({"method": "task_arithmetic", "args": {"scale": [0, True]}}, "scale: must be a number, found 'true'"),
        ({"method": "dare", "args": {"seed": False}}, "seed: must be a whole number, found 'false'"),
        ({"method": "dare", "args": {"drop": {"a": 0.5, "c": 0.1}}}, "expert of `drop` 'c'.*Known: a, b"),
        ({"method": "breadcrumbs", "args": {"beta": 0.9, "gamma": 0.2}}, "beta . gamma is 1.1"),
        ({"method": "breadcrumbs", "args": {"beta": [0.5, 0.9], "gamma": 0.2}}, "beta . gamma is 1.1"),
    ],
)
def test_values_that_were_taken_in_silence(values, message):
    with pytest.raises(MergeflowError, match=message):
        make_recipe({"base": "o", "experts": {"a": "a", "b": "b"}, **values})


@pytest.mark.parametrize(
    ("method", "args", "wrong"),
    [
        ("della", {"drop": {"a": 0.5, "b": 0.4}, "window": 0.3}, ""),
        ("della", {"drop": {"a": 0.5, "b": 0.95}, "window": 0.3}, "found 0.95"),
        ("della_ties", {"drop": [0.2, 0.5], "window": [0.3, 0.8]}, ""),
        ("della_ties", {"drop": [0.2, 0.5], "window": [0.8, 0.3]}, "found 0.2"),
        ("breadcrumbs", {"beta": {"a": 0.5}, "gamma": 0.15}, ""),
        ("breadcrumbs", {"beta": {"a": 0.5, "b": 0.9}, "gamma": {"a": 0.4, "b": 0.1}}, ""),
        ("breadcrumbs", {"beta": {"a": 0.5, "b": 0.9}, "gamma": {"a": 0.1, "b": 0.4}}, "beta . gamma is 1.3"),
        ("breadcrumbs", {"beta": [0.1, 0.9], "gamma": [0.8, 0.05]}, ""),
        ("breadcrumbs", {"beta": [0.1, 0.9, 0.1], "gamma": [0, 0.4]}, "beta . gamma is 1.1"),
    ],
)
def test_values_that_vary_are_checked_where_they_meet(models, method, args, wrong):
    if wrong:
        with pytest.raises(MergeflowError, match=wrong):
            configure(method, args)
        return
    base, experts = models
    assert prepare(configure(method, args), base, experts).at(1.0)


def test_values_that_filters_bring_together_are_checked_in_their_tensor(models):
    args = {"beta": [{"filter": "mlp", "value": 0.9}, 0.1], "gamma": [{"filter": "mlp.up", "value": 0.3}, 0.5]}
    with pytest.raises(MergeflowError, match=r"tensor 'layers.*mlp.*beta . gamma is 1.2"):
        prepare(configure("breadcrumbs", args), *models)
    prepare(configure("breadcrumbs", {**args, "gamma": [{"filter": "mlp.up", "value": 0.1}, 0.5]}), *models)


def test_one_pattern_is_a_list_of_one():
    plain = {"method": "average", "base": "o", "experts": ["a", "b"]}
    recipe = make_recipe({**plain, "ignore": "*.bias", "allow": "rope_*"})
    assert (recipe.ignore, recipe.allow) == (("*.bias",), ("rope_*",))


@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        ({"args": {"scale": [{"filter": "enc", "value": 1}, {"filter": "dec", "value": 0}]}}, []),
        ({"args": {"scale": [{"filter": "encodr", "value": 1}, 0]}}, ["scale: the filter 'encodr' is part of no"]),
        ({"args": {"scale": [1, {"filter": "enc", "value": 0}]}}, ["scale: the filter 'enc' comes after others"]),
        ({"weights": {"a": {"filter": "en_", "value": 0}}}, ["weight of 'a': the filter 'en_' is part of no tensor"]),
    ],
)
@pytest.mark.parametrize("in_step", [False, True])
def test_a_filter_that_decides_nothing_is_named(tmp_path, values, warnings, in_step):
    state = {"encoder.weight": torch.ones(2, 2), "decoder.weight": torch.ones(2, 2)}
    for name in ("base", "a"):
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    paths = {name: f"{tmp_path}/{name}.safetensors" for name in ("base", "a")}
    recipe = {"method": "task_arithmetic", "base": paths["base"], "experts": {"a": paths["a"]}, **values}
    if in_step:
        recipe = {"method": "passthrough", "experts": {"s": "step:s"}, "steps": {"s": recipe}}
    lines = check_recipe(recipe).warnings
    assert len(lines) == len(warnings)
    assert all(start in line for start, line in zip(warnings, lines, strict=True))
