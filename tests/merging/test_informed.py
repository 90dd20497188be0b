"""Fisher, RegMean and AdaMerging: pure functions of given statistics."""

import pytest
import torch

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, merge, prepare
from mergeflow.merging.learned import learn
from tests.merging.helpers import draw, single_tensor, svd_k

NAME = "blocks.0.attn.weight"


def merged(name, thetas, data, weights=None, **args):
    base, experts = single_tensor(thetas)
    return prepare(configure(name, args), base, experts, weights, data=data).at(1.0)[NAME]


def by_expert(kind, values):
    return {kind: {f"e{index}": {NAME: value} for index, value in enumerate(values)}}


def test_fisher_formula_and_equal_fishers_average():
    thetas, fishers = draw(3, 5, 4), draw(3, 5, 4, seed=1).square()
    fused = merged("fisher", thetas, by_expert("fisher", fishers), eps=1e-6)
    torch.testing.assert_close(fused, ((fishers + 1e-6) * thetas).sum(0) / (fishers + 1e-6).sum(0))
    equal = by_expert("fisher", torch.ones(3, 5, 4).double())
    torch.testing.assert_close(merged("fisher", thetas, equal), thetas.mean(0))


def test_fisher_takes_the_expert_that_is_sure():
    thetas = draw(2, 5)
    sure = torch.stack([torch.full((5,), 1e6), torch.zeros(5)]).double()
    torch.testing.assert_close(merged("fisher", thetas, by_expert("fisher", sure)), thetas[0], rtol=1e-6, atol=1e-6)


def test_fisher_refuses_what_is_missing_misshapen_or_negative():
    thetas = draw(2, 5)
    with pytest.raises(MergeflowError, match="needs the statistic 'fisher'"):
        merged("fisher", thetas, {})
    with pytest.raises(MergeflowError, match=r"shape \[4\], expected \[5\]"):
        merged("fisher", thetas, by_expert("fisher", torch.ones(2, 4)))
    with pytest.raises(MergeflowError, match="negative"):
        merged("fisher", thetas, by_expert("fisher", -torch.ones(2, 5)))


@pytest.mark.parametrize("choice", [{"only": ["visual.*"]}, {"ignore": ["text.*"]}])
def test_tensors_that_are_not_merged_need_no_fisher(tmp_path, choice):
    """`statistics fisher` measures a CLIP's image tower; the text tower of a whole CLIP stays the base's."""
    base = {"visual.w": torch.zeros(3), "text.w": torch.zeros(2)}
    sources = {"base": base, "a": {name: value + 1 for name, value in base.items()}, "b": base}
    sources |= {"fa": {"visual.w": torch.ones(3)}, "fb": {"visual.w": torch.full((3,), 3.0)}}
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in sources}
    for name, state in sources.items():
        write_checkpoint(paths[name], state)
    recipe = {"method": "fisher", "base": paths["base"], "experts": {name: paths[name] for name in "ab"}}
    data = {"fisher": {"a": paths["fa"], "b": paths["fb"]}}
    merge({**recipe, "data": data, **choice}, tmp_path / "out.safetensors")
    merged = read_state(tmp_path / "out.safetensors")
    torch.testing.assert_close(merged["visual.w"], torch.full((3,), 0.25))
    assert torch.equal(merged["text.w"], base["text.w"])
    with pytest.raises(MergeflowError, match=r"2 statistics do not fit the base:\n  - fisher of 'a', tensor 'text\.w'"):
        merge({**recipe, "data": data}, tmp_path / "all.safetensors")


def test_regmean_formula_and_optimality():
    thetas, inputs = draw(2, 3, 4), draw(2, 50, 4, seed=1)
    grams = inputs.transpose(1, 2) @ inputs
    data = by_expert("gram", grams)
    scaled = [0.95 * gram + 0.05 * torch.diag(gram.diagonal()) for gram in grams]
    expected = sum(t @ g for t, g in zip(thetas, scaled, strict=True)) @ torch.linalg.inv(sum(scaled))
    torch.testing.assert_close(merged("regmean", thetas, data), expected)

    def error(weight):
        return sum(float((x @ (weight - t).T).square().sum()) for x, t in zip(inputs, thetas, strict=True))

    best = merged("regmean", thetas, data, off_diagonal=1.0)
    assert all(error(best) <= error(best + 0.01 * draw(3, 4, seed=s)) for s in range(5))
    assert error(best) < error(thetas.mean(0))


def test_regmean_averages_without_grams_and_survives_dead_inputs():
    thetas = draw(2, 3, 4)
    torch.testing.assert_close(merged("regmean", thetas, {"gram": {"e0": {}, "e1": {}}}), thetas.mean(0))
    dead = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0])).double()
    fused = merged("regmean", thetas, by_expert("gram", [dead, dead]))
    torch.testing.assert_close(fused[:, :2], thetas.mean(0)[:, :2])
    assert not fused[:, 2:].any()


def test_adamerging_starts_as_task_arithmetic_and_uses_given_coefficients():
    thetas = draw(2, 3, 4)
    torch.testing.assert_close(merged("adamerging", thetas, {}), 0.3 * thetas.sum(0))
    data = {"coefficients": {"e0": 0.5, "e1": {NAME: -1.0}}}
    torch.testing.assert_close(merged("adamerging", thetas, data), 0.5 * thetas[0] - thetas[1])


def model(seed=0):
    base = {f"blocks.{i}.mlp.weight": draw(6, 5, seed=seed + i) for i in range(3)} | {"steps": torch.arange(2)}
    experts = {
        f"e{t}": {k: v + 0.1 * draw(6, 5, seed=10 * t + 7) if v.is_floating_point() else v for k, v in base.items()}
        for t in range(3)
    }
    return base, experts


def towards(target):
    def loss(state, step):
        gradients = {name: state[name] - value for name, value in target.items() if value.is_floating_point()}
        return sum(float(g.square().sum()) / 2 for g in gradients.values()), gradients

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["task", "layer"])
def test_learn_finds_the_coefficients_of_a_known_merge(granularity):
    base, experts = model()
    expected = {"e0": 0.7, "e1": -0.2, "e2": 0.1}
    target = prepare(configure("adamerging"), base, experts, data={"coefficients": expected}).at(1.0)
    call = configure("adamerging", {"granularity": granularity, "steps": 400, "lr": 0.02})
    learned = learn(call, base, experts, towards(target))
    for name, value in expected.items():
        assert all(each == pytest.approx(value, abs=1e-3) for each in learned.coefficients[name].values())
    assert learned.losses[-1] < 1e-6 * learned.losses[0]
    again = prepare(call, base, experts, data={"coefficients": learned.coefficients}).at(1.0)
    torch.testing.assert_close(again["blocks.1.mlp.weight"], target["blocks.1.mlp.weight"], rtol=0, atol=1e-3)


def test_learn_agrees_with_autograd_on_cart():
    base, experts = model()
    call = configure("adamerging", {"on": "cart", "granularity": "layer", "steps": 5, "lr": 0.01, "rank_ratio": 0.4})
    target = experts["e0"]
    learned = learn(call, base, experts, towards(target))
    names = [name for name in base if base[name].is_floating_point()]
    values = torch.full((3, 3), 0.3, dtype=torch.float64, requires_grad=True)
    mean = {name: sum(state[name] for state in experts.values()) / 3 for name in names}

    directions = [[svd_k(state[name] - mean[name], 2) for name in names] for state in experts.values()]
    optimiser = torch.optim.Adam([values], lr=0.01)
    for _ in range(5):
        optimiser.zero_grad()
        states = [mean[n] + sum(values[t, i] * directions[t][i] for t in range(3)) for i, n in enumerate(names)]
        sum((state - target[n]).square().sum() / 2 for state, n in zip(states, names, strict=True)).backward()
        optimiser.step()
    expected = {f"e{t}": dict(zip(names, row, strict=True)) for t, row in enumerate(values.detach().tolist())}
    for expert, row in expected.items():
        assert learned.coefficients[expert] == pytest.approx(row, abs=1e-6)


def test_learn_clamps_and_refuses():
    base, experts = model()
    call = configure("adamerging", {"clamp": True, "steps": 60, "lr": 0.1})
    learned = learn(call, base, experts, towards(base))
    assert all(0 <= value <= 1 for row in learned.coefficients.values() for value in row.values())
    with pytest.raises(MergeflowError, match="loss is nan at step 0"):
        learn(call, base, experts, lambda state, step: (float("nan"), {}))
    with pytest.raises(MergeflowError, match="only 'adamerging'"):
        learn(configure("ties"), base, experts, towards(base))
