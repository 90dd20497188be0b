"""NuSLERP, Multi-SLERP, NearSwap, Arcee Fusion, SCE, RAM and the TIES of sparse vectors, against plain formulas."""

import math
from functools import partial

import pytest
import torch

from mergeflow.merging import configure, prepare
from tests.merging import helpers
from tests.merging.helpers import awkward, direction

N = 60
draw = partial(helpers.draw, seed=3)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def slerp(a, b, t):
    angle = math.acos(float(a @ b / a.norm() / b.norm()))
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


# NuSLERP and Multi-SLERP


def test_nuslerp_is_placed_by_the_weights_on_task_vectors_or_weights():
    base, (a, b) = draw(N, seed=1), draw(2, N)
    close(direction("nuslerp", torch.stack([a, b]), [1.0, 3.0], base), slerp(a, b, 0.75))
    close(
        direction("nuslerp", torch.stack([a, b]), [1.0, 3.0], base, on="weights"),
        slerp(base + a, base + b, 0.75) - base,
    )
    close(direction("nuslerp", torch.stack([a, b]), [1.0, -1.0]), slerp(a, b, 0.5))


def test_nuslerp_of_rows_and_columns():
    a, b = draw(2, 5, 7)
    rows = torch.stack([slerp(x, y, 0.2) for x, y in zip(a, b, strict=True)])
    columns = torch.stack([slerp(x, y, 0.2) for x, y in zip(a.T, b.T, strict=True)], dim=1)
    close(direction("nuslerp", torch.stack([a, b]), [0.8, 0.2], vectors="rows"), rows)
    close(direction("nuslerp", torch.stack([a, b]), [0.8, 0.2], vectors="columns"), columns)


def test_nuslerp_keeps_the_norm_and_is_linear_for_parallel_or_missing_vectors():
    a, b = (v / v.norm() for v in draw(2, N))
    assert float(direction("nuslerp", torch.stack([a, b])).norm()) == pytest.approx(1)
    close(direction("nuslerp", torch.stack([a, 3 * a])), 2 * a)
    close(direction("nuslerp", torch.stack([a, -a]), [3.0, 1.0]), 0.5 * a)
    close(direction("nuslerp", torch.stack([a, 0 * a])), 0.5 * a)


def tangent_procedure(vectors, weights):
    """Multi-SLERP as published: to the tangent space at the mean direction, the weighted sum there, and back."""
    units = vectors / vectors.norm(dim=1, keepdim=True)
    mean = (units * weights[:, None]).sum(0)
    mean = mean / mean.norm()
    step = ((units - (units @ mean)[:, None] * mean) * weights[:, None]).sum(0)
    size = step.norm() + 1e-300
    return (mean * torch.cos(size) + step * torch.sin(size) / size) * (vectors.norm(dim=1) * weights).sum()


@pytest.mark.parametrize("weights", [[1.0, 1, 1, 1], [1.0, 2, 0.5, 4]])
def test_multislerp_is_the_published_procedure_and_has_the_mean_length(weights):
    taus, base = draw(4, N), draw(N, seed=9)
    share = torch.tensor(weights).double() / sum(weights)
    fused = direction("multislerp", taus, weights, base)
    close(fused, tangent_procedure(taus, share))
    assert float(fused.norm()) == pytest.approx(float(taus.norm(dim=1) @ share))
    close(direction("multislerp", taus, weights, base, on="weights"), tangent_procedure(base + taus, share) - base)
    close(direction("multislerp", taus, weights, normalize=False), fused * sum(weights))


def test_multislerp_of_opposite_vectors_is_their_mean():
    a = draw(N)
    close(direction("multislerp", torch.stack([a, -a])), torch.zeros_like(a))


# NearSwap and Arcee Fusion


def test_nearswap_formula_and_bound():
    tau = draw(1, N) * 0.1
    t = 0.05
    weight = (t / tau[0].abs()).clamp(0, 1)
    change = direction("nearswap", tau, t=t)
    close(change, weight * tau[0])
    assert change.abs().max() <= t
    near = tau[0].abs() <= t
    assert near.any()
    close(change[near], tau[0][near])


def test_arcee_fusion_formula():
    base, tau = draw(6, 10, seed=1), draw(1, 6, 10)
    p, q = torch.softmax(base + tau[0], -1) + 1e-8, torch.softmax(base, -1) + 1e-8
    scores = tau[0].abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    order = scores.flatten().sort().values
    quarter, half, three = (order[int(share * 59)] for share in (0.25, 0.5, 0.75))
    expected = torch.where(scores >= half + 1.5 * (three - quarter), tau[0], 0)
    change = direction("arcee_fusion", tau, base=base)
    close(change, expected)
    assert 0 < change.count_nonzero() < 30


def test_arcee_fusion_in_chunks_is_the_same(monkeypatch):
    from mergeflow.merging.methods import fusion

    base, tau = draw(6, 10, seed=1), draw(1, 6, 10)
    whole = direction("arcee_fusion", tau, base=base)
    monkeypatch.setattr(fusion, "_CHUNK", 25)
    assert torch.equal(direction("arcee_fusion", tau, base=base), whole)


# SCE and RAM


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 1.0])
def test_sce_formula(keep):
    taus = draw(3, 6, 10)
    variance = taus.var(0, unbiased=False).flatten()
    mask = torch.zeros(60, dtype=torch.float64)
    mask[variance.argsort(descending=True)[: int(keep * 60)]] = 1
    masked = taus * mask.reshape(6, 10)
    energy = masked.square().mean((1, 2))
    weights = energy / energy.sum() if keep else energy
    expected = torch.zeros(6, 10).double()
    for place in [(i, j) for i in range(6) for j in range(10)]:
        values = masked[(slice(None), *place)]
        sign = 1 if values.sum() >= 0 else -1
        agreeing = [(float(w), float(v)) for w, v in zip(weights, values, strict=True) if v * sign > 0]
        if agreeing:
            expected[place] = sum(w * v for w, v in agreeing) / sum(w for w, _ in agreeing)
    close(direction("sce", taus, keep=keep), expected)


def test_sce_listens_to_the_one_that_moved_further():
    tau = draw(N).abs()
    change = direction("sce", torch.stack([10 * tau, tau]))
    close(change, (100 * 10 * tau + tau) / 101)
    close(direction("sce", torch.stack([10 * tau, -tau])), 10 * tau)


def test_ram_keeps_unique_changes_whole_and_averages_shared_ones():
    taus = torch.tensor([[1.0, 2.0, 0.0, 1e-9], [0.0, 4.0, -3.0, 0.0]], dtype=torch.float64)
    close(direction("ram", taus), torch.tensor([1.0, 3.0, -3.0, 0.0]).double())
    dense = draw(3, N)
    close(direction("ram", dense), dense.mean(0))


@pytest.mark.parametrize(("over", "alpha"), [("model", 9.0), ("tensor", 9.0), ("tensor", 0.3)])
def test_ram_plus_formula(over, alpha):
    base = {"a": torch.zeros(40).double(), "b": torch.zeros(30).double()}
    moved = {
        name: draw(3, len(value), seed=len(name)) * (draw(3, len(value), seed=7) > 0.4) for name, value in base.items()
    }
    experts = {f"e{t}": {name: moved[name][t] for name in base} for t in range(3)}
    changes = prepare(configure("ram_plus", {"r": 0.5, "alpha": alpha, "over": over}), base, experts).direction
    changed = {name: moved[name].abs() > 1e-5 for name in base}
    for name in base:
        where = list(base) if over == "model" else [name]
        expected = torch.zeros_like(base[name])
        for t in range(3):
            unique = sum(int((changed[n][t] & (changed[n].sum(0) == 1)).sum()) for n in where)
            shared = sum(int((changed[n][t] & (changed[n].sum(0) > 1)).sum()) for n in where)
            boost = 1 + 0.5 * min(alpha, shared / unique)
            assert boost > 1
            count = changed[name].sum(0)
            expected += torch.where(count == 1, boost * moved[name][t], moved[name][t] / count.clamp(min=1))
        close(changes[name], expected)
    unboosted = prepare(configure("ram_plus", {"r": 0.0, "over": over}), base, experts).direction
    assert all(torch.equal(unboosted[n], prepare(configure("ram"), base, experts).direction[n]) for n in base)


# Sparse vectors merged by TIES


@pytest.mark.parametrize(("name", "other"), [("dare_ties", "dare"), ("della_ties", "della")])
def test_names_with_ties_are_then_ties(name, other):
    base, experts = awkward(torch.float64)
    args = {"drop": 0.6, "keep": 0.5, "reduce": "sum"}
    one_way = prepare(configure(name, args), base, experts)
    other_way = prepare(configure(other, {**args, "then": "ties"}), base, experts)
    assert all(torch.equal(one_way.direction[key], other_way.direction[key]) for key in one_way.direction)
    assert configure(name, args).scale == configure(other, {**args, "then": "ties"}).scale == 1


def test_breadcrumbs_ties_formula():
    taus = draw(4, 400)
    sparse = torch.zeros_like(taus)
    for row, tau in zip(sparse, taus, strict=True):
        places = tau.abs().argsort()[240:380]
        row[places] = tau[places]
    sign = sparse.sum(0).sign()
    agreeing = torch.where(sparse * sign > 0, sparse, 0)
    mean = agreeing.sum(0) / (agreeing != 0).sum(0).clamp(min=1)
    close(direction("breadcrumbs_ties", taus, beta=0.6, gamma=0.05), mean)
    close(direction("breadcrumbs_ties", taus, beta=0.6, gamma=0.05, reduce="sum"), agreeing.sum(0))
    full = direction("breadcrumbs_ties", taus, beta=0.0, gamma=0.0)
    assert torch.equal(full, direction("ties", taus, keep=1.0))


def test_the_weighted_mean_divides_by_the_weights_that_agree():
    taus, weights = draw(3, 400), [1.0, 0.5, 2.0]
    column = torch.tensor(weights).double()[:, None]
    weighted = taus * column
    agreeing = weighted * weighted.sum(0).sign() > 0
    expected = torch.where(agreeing, weighted, 0).sum(0) / (agreeing * column).sum(0)
    close(direction("ties", taus, weights, keep=1.0, reduce="weighted_mean"), expected)
    half = direction("ties", taus, [0.5] * 3, keep=0.3, reduce="weighted_mean")
    close(half, direction("ties", taus, keep=0.3))
