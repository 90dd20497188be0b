"""Linear, sparse and TIES methods against their formulas written plainly, and what their papers promise.

Determinism (order of experts, threads, streaming) is checked for all methods in test_contract.py.
"""

import pytest
import torch

from mergeflow.merging import configure, prepare
from tests.merging.helpers import awkward, direction, single_tensor

T, N = 4, 400


@pytest.fixture
def taus():
    return torch.randn(T, N, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Linear


def test_average_and_soup(taus):
    close(direction("average", taus), taus.mean(0))
    close(direction("average", taus, [1, 2, 3, 4]), (taus * torch.tensor([1.0, 2, 3, 4]).double()[:, None]).sum(0) / 10)


def test_a_soup_without_normalised_weights_is_the_sum_of_weighted_experts(taus):
    base = torch.linspace(-1, 1, N, dtype=torch.float64)
    start, experts = single_tensor(taus, base)
    (total,) = prepare(configure("average", {"normalize": False}), start, experts, [1, 2, 3, -4]).at(1).values()
    close(total, sum(weight * (base + tau) for weight, tau in zip([1, 2, 3, -4], taus, strict=True)))


def test_task_arithmetic_is_the_sum_and_1_over_t_the_average(taus):
    close(direction("task_arithmetic", taus), taus.sum(0))
    base, experts = single_tensor(taus)
    summed = prepare(configure("task_arithmetic"), base, experts).at(1 / T)
    mean = prepare(configure("average"), base, experts).at(1)
    for name in base:
        close(summed[name], mean[name])


def test_weight_zero_is_not_missing(taus):
    close(direction("task_arithmetic", taus, {"e0": 0.0}), taus[1:].sum(0))
    close(direction("ties", taus, {"e0": 0.0}, keep=1.0), direction("ties", taus[1:], keep=1.0))


def test_a_negative_scale_unlearns():
    base, experts = single_tensor(torch.ones(1, 3, dtype=torch.float64))
    (negated,) = prepare(configure("task_arithmetic"), base, experts).at(-1).values()
    close(negated, -torch.ones(3).double())


# TIES


def plain_ties(taus, keep, reduce="mean", per_row=True):
    k = int(keep * taus.shape[1] + 1e-9)
    cut = taus.abs().sort(dim=1, descending=True).values[:, k - 1 : k] if k else torch.full((len(taus), 1), torch.inf)
    trimmed = torch.where(taus.abs() >= cut, taus, 0)
    sign = trimmed.sum(0).sign()
    majority = 1.0 if sign.sum() >= 0 else -1.0
    sign = torch.where(sign == 0, majority, sign)
    result = torch.zeros_like(taus[0])
    for j in range(taus.shape[1]):
        agreeing = [float(v) for v in trimmed[:, j] if v * sign[j] > 0]
        if agreeing:
            result[j] = sum(agreeing) / (len(agreeing) if reduce == "mean" else 1)
    return result


@pytest.mark.parametrize("keep", [0.0, 0.0025, 0.2, 0.75, 1.0])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_ties_formula(taus, keep, reduce):
    close(direction("ties", taus, keep=keep, reduce=reduce), plain_ties(taus, keep, reduce))
    close(direction("ties", taus, keep=keep, reduce=reduce, trim="tensor"), plain_ties(taus, keep, reduce))


def test_ties_threshold_is_global_exact_and_keeps_ties_of_magnitude_together():
    base, experts = awkward(torch.float32)
    for state in experts.values():
        for name, value in state.items():  # few distinct differences: many equal magnitudes at the cut
            if value.is_floating_point():
                state[name] = base[name] + ((value - base[name]) * 40).round() / 8
    call = configure("ties", {"keep": 0.3})
    changes = prepare(call, base, experts).direction
    names = sorted(changes)
    flat = torch.stack([torch.cat([(state[n] - base[n]).reshape(-1) for n in names]) for state in experts.values()])
    expected = plain_ties(flat.double(), 0.3).float()
    assert torch.equal(torch.cat([changes[n].reshape(-1) for n in names]), expected)


@pytest.mark.parametrize("name", ["ties", "knots"])
def test_a_tensor_of_few_elements_keeps_its_largest(name):
    args = {"trim": "tensor"} if name == "ties" else {}
    experts = {"a": {"logit_scale": torch.tensor(2.0), "bias": torch.tensor([0.1, -3.0, 0.2])}}
    base = {key: torch.zeros_like(value) for key, value in experts["a"].items()}
    changes = prepare(configure(name, {"keep": 0.2, **args}), base, experts).direction
    assert changes["logit_scale"] == 2
    assert changes["bias"].tolist() == [0, -3, 0]
    assert not prepare(configure(name, {"keep": 0.0, **args}), base, experts).direction["bias"].any()


def test_ties_zero_sums_take_the_majority_sign():
    taus = torch.tensor([[1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]], dtype=torch.float64)
    close(direction("ties", taus, keep=1.0), torch.tensor([-1.0, -2.0, -3.0]).double())
    close(direction("ties", -taus, keep=1.0), torch.tensor([1.0, 2.0, 3.0]).double())


def test_ties_minority_has_no_influence(taus):
    agreed = taus[0].abs()
    conflicting = torch.stack([agreed, 2 * agreed, -0.5 * agreed])
    close(direction("ties", conflicting, keep=1.0), 1.5 * agreed)


# Sparse


def test_breadcrumbs_formula(taus):
    expected = torch.zeros(N).double()
    for tau in taus:
        order = tau.abs().argsort()
        middle = order[int(0.6 * N) : N - int(0.05 * N)]
        expected[middle] += tau[middle]
    close(direction("breadcrumbs", taus, beta=0.6, gamma=0.05), expected)
    close(direction("breadcrumbs", taus, beta=0, gamma=0), taus.sum(0))


def test_breadcrumbs_keeps_small_tensors():
    """Known defect elsewhere: with γ·n < 1 a negative-zero slice drops the whole task vector."""
    for size in (1, 5, 50, 99):
        taus = torch.rand(2, size, dtype=torch.float64) + 0.1
        assert direction("breadcrumbs", taus).any()
        close(direction("breadcrumbs", taus, beta=0.0), taus.sum(0))


def test_breadcrumbs_drops_outliers(taus):
    taus[0, 0] = 1e6
    assert direction("breadcrumbs", taus, beta=0.0).abs().max() < 100


def test_magmax_formula_and_lone_mover(taus):
    expected = torch.stack([taus[:, j][taus[:, j].abs().argmax()] for j in range(N)])
    close(direction("magmax", taus), expected)
    lone = torch.zeros_like(taus)
    lone[2] = taus[2]
    close(direction("magmax", lone), taus[2])


def test_consensus_formula_on_task_vectors(taus):
    """Known defect elsewhere: TALL masks computed from weights in place of task vectors."""
    total = taus.sum(0)
    masks = torch.stack([tau.abs() > 0.4 * (total - tau).abs() for tau in taus])
    expected = torch.where(masks.sum(0) >= 2, total, 0)
    close(direction("consensus", taus), expected)
    base, experts = single_tensor(taus, base=torch.full((N,), 100.0, dtype=torch.float64))
    (change,) = prepare(configure("consensus"), base, experts).direction.values()
    torch.testing.assert_close(change, expected, rtol=0, atol=1e-10)


def test_consensus_drops_selfish_weights():
    taus = torch.tensor([[5.0, 1.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    close(direction("consensus", taus), torch.tensor([0.0, 3.0]).double())


def plain_pcb(taus, keep):
    t, n = taus.shape
    magnitudes = taus.abs().sort(dim=1).values
    clip = int(1e-4 * n)
    low, high = magnitudes[:, clip : clip + 1], magnitudes[:, n - clip - 1 : n - clip]
    clipped = taus.sign() * taus.abs().clamp(low, high)
    scores = torch.exp(t * ((clipped.abs() - low) / (high - low)) ** 2) * torch.tanh(taus * taus.sum(0))
    ordered = scores.sort(dim=1, descending=True).values
    cut, top = ordered[:, int(keep * n) - 1, None], ordered[:, :1]
    shares = (scores.clamp(min=cut) - cut) / (top - cut)
    return (clipped * shares).sum(0) / shares.sum(0).clamp(min=1e-12)


def test_pcb_formula(taus):
    close(direction("pcb", taus), plain_pcb(taus, 0.1))


def test_pcb_leaves_entries_without_a_score_at_the_base(taus):
    change = direction("pcb", taus, keep=0.05)
    assert 0 < (change != 0).sum() <= T * 0.05 * N


def test_pcb_keeps_what_one_expert_alone_is_sure_of():
    taus = torch.full((2, 100), 0.01, dtype=torch.float64) * torch.linspace(0.1, 1, 100)
    taus[0, 0], taus[1, 0] = 3.0, 0.0
    assert direction("pcb", taus, keep=0.1)[0] == pytest.approx(3.0)
