"""CART, low rank, TSV, Iso, KnOTS and WUDI against LAPACK in float64, and what their papers promise."""

import pytest
import torch

from mergeflow.merging import FactorCache, configure, prepare
from mergeflow.merging.linalg import spectra
from mergeflow.merging.linalg.spectra import polar_, svd, truncate
from mergeflow.merging.matrices import is_matrix, rank_of
from mergeflow.merging.methods import optimised
from mergeflow.merging.methods.ties import trim_rounded
from studies.theory.peak_memory import peak_tensor_bytes
from tests.merging.helpers import agreeing_mean, direction, draw, orthogonal, single_tensor, svd_k


def trained_like(rows, columns, seed=0):
    """A matrix whose singular values fall by a power law, nearly flat at the cut, as those of task vectors are."""
    side = min(rows, columns)
    left, right = (
        torch.linalg.qr(draw(rows, side, seed=seed))[0],
        torch.linalg.qr(draw(columns, side, seed=seed + 1))[0],
    )
    return (left * (1e-3 * torch.arange(1, side + 1).double().pow(-0.4))) @ right.T


@pytest.mark.parametrize("shape", [(128, 128), (384, 96), (96, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_truncated_svd_matches_lapack(shape, dtype):
    matrix = trained_like(*shape).to(dtype)
    for k in (1, 8, 12, 95):
        expected = svd_k(matrix.double(), k)
        error = (truncate(matrix, k).double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("shape", [(40, 20), (20, 40), (20, 20)])
def test_svd_and_polar_factor(shape):
    matrix = draw(*shape)
    left, sigma, right = svd(matrix)
    torch.testing.assert_close((left * sigma) @ right.T, matrix)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(matrix))
    torch.testing.assert_close(polar_(matrix.clone()), orthogonal(matrix))


def test_rows_are_turned_into_float64_a_few_at_a_time(monkeypatch):
    matrix = draw(40, 20).float()
    whole = [*svd(matrix, 5), polar_(matrix.double()), truncate(matrix, 5)]
    monkeypatch.setattr("mergeflow.merging.linalg.spectra._ROWS", 7)
    torch.testing.assert_close(
        [*svd(matrix, 5), polar_(matrix.double()), truncate(matrix, 5)], whole, rtol=1e-6, atol=1e-6
    )


def test_svd_leaves_out_what_has_no_direction():
    matrix = draw(20, 3) @ draw(3, 10, seed=1)
    left, sigma, right = svd(matrix)
    assert len(sigma) == 3
    torch.testing.assert_close((left * sigma) @ right.T, matrix)


@pytest.mark.parametrize("side", [1, 64, 97, 400])
def test_all_eigenvectors_are_those_of_torch_in_the_memory_of_the_matrix(side):
    """Bit for bit, from the lower half alone; torch by itself holds a copy more."""
    product = spectra.gram(torch.randn(2 * side, side, generator=torch.Generator().manual_seed(side)))
    expected = torch.linalg.eigh(product, UPLO="L")
    place, copied = product.data_ptr(), peak_tensor_bytes(lambda: torch.linalg.eigh(product, UPLO="L"))
    decomposition = []
    held = peak_tensor_bytes(lambda: decomposition.extend(spectra._eigen(product)))
    assert all(torch.equal(part, other) for part, other in zip(decomposition, expected, strict=True))
    assert decomposition[1].data_ptr() == place
    assert side < 400 or held <= copied - 0.9 * product.nbytes


def test_which_tensors_are_matrices():
    assert not any(is_matrix("attn", shape, "all") for shape in ((4,), (4, 1), (1, 4), (2, 2, 2), ()))
    assert is_matrix("layer.3.w", (4, 4), ("layer.?.w",))


def test_ranks():
    assert rank_of((100, 50), 0.08, "ceil") == 4
    assert rank_of((100, 51), 0.08, "ceil") == 5
    assert rank_of((100, 51), 0.08, "floor") == 4
    assert rank_of((100, 100), 0.07, "ceil") == 7
    assert rank_of((10, 10), 0.001, "floor") == rank_of((10, 10), 0.001, "ceil") == 1


# CART and low rank


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_cart_formula(shape):
    taus = draw(3, *shape)
    mean = taus.mean(0)
    expected = sum(svd_k(tau - mean, 4) for tau in taus)
    torch.testing.assert_close(direction("cart", taus, rank_ratio=0.25), expected)
    weighted = sum(w * svd_k(tau - mean, 4) for w, tau in zip((1, 2, -1), taus, strict=True))
    torch.testing.assert_close(direction("cart", taus, [1, 2, -1], rank_ratio=0.25), weighted)


def test_cart_anchor_is_the_mean_and_rank_1_0_the_average():
    taus, base = draw(3, 8, 8), draw(8, 8, seed=9)
    _, experts = single_tensor(taus, base)
    prepared = prepare(configure("cart", {"rank_ratio": 1.0}), {"blocks.0.attn.weight": base}, experts)
    torch.testing.assert_close(prepared.at(0)["blocks.0.attn.weight"], base + taus.mean(0))
    torch.testing.assert_close(prepared.at(3)["blocks.0.attn.weight"], base + taus.mean(0))


def test_cart_averages_what_is_not_treated():
    taus = draw(3, 8, 8)
    base, experts = single_tensor(taus, name="visual.proj")
    treated = {"blocks.0.attn.weight": torch.ones(4, 4, dtype=torch.float64)}
    prepared = prepare(configure("cart"), base | treated, {name: state | treated for name, state in experts.items()})
    assert not prepared.direction["visual.proj"].any()
    torch.testing.assert_close(prepared.at(5)["visual.proj"], taus.mean(0))


def test_split_qkv_treats_thirds():
    taus = draw(2, 24, 8)
    base, experts = single_tensor(taus, name="attn.in_proj_weight")
    (change,) = prepare(
        configure("low_rank", {"rank_ratio": 0.25, "split_qkv": True}), base, experts
    ).direction.values()
    expected = sum(torch.cat([svd_k(third, 2) for third in tau.chunk(3)]) for tau in taus)
    torch.testing.assert_close(change, expected)


def test_low_rank_formula_and_rank_1_0_is_task_arithmetic():
    taus = draw(3, 20, 10)
    torch.testing.assert_close(direction("low_rank", taus, rank_ratio=0.3), sum(svd_k(tau, 3) for tau in taus))
    torch.testing.assert_close(direction("low_rank", taus, rank_ratio=1.0), taus.sum(0))


def test_a_grid_over_rank_and_scale_factors_each_matrix_once():
    taus = draw(3, 120, 100)
    base, experts = single_tensor(taus)
    cache = FactorCache(rank_ratio=0.5)
    for ratio in (0.5, 0.13, 0.3, 0.05, 0.12):
        cached = prepare(configure("cart", {"rank_ratio": ratio}), base, experts, cache=cache)
        plain = prepare(configure("cart", {"rank_ratio": ratio}), base, experts)
        for scale in (0.1, 1.0):
            for name, value in plain.at(scale).items():
                torch.testing.assert_close(value, cached.at(scale)[name], rtol=1e-9, atol=1e-12)
    assert (cache.misses, cache.hits) == (3, 4 * 3)


def test_a_cached_result_does_not_depend_on_what_was_tried_before():
    base, experts = single_tensor(draw(3, 120, 100))
    call = configure("cart", {"rank_ratio": 0.05})
    fresh, used = FactorCache(0.5), FactorCache(0.5)
    prepare(configure("cart", {"rank_ratio": 0.5}), base, experts, cache=used)
    changes = [prepare(call, base, experts, cache=cache).direction for cache in (fresh, used)]
    assert all(torch.equal(changes[0][name], changes[1][name]) for name in base)


@pytest.mark.parametrize("shape", [(120, 100), (100, 120)])
def test_a_cached_grid_up_to_an_eighth_is_the_uncached_one_bit_for_bit(shape):
    base, experts = single_tensor(draw(3, *shape).float())
    base = {name: value.float() for name, value in base.items()}
    cache = FactorCache(0.125)
    for ratio in (0.12, 0.05, 0.01):
        call = configure("cart", {"rank_ratio": ratio})
        changes = [prepare(call, base, experts, cache=each).direction for each in (cache, None)]
        assert all(torch.equal(changes[0][name], changes[1][name]) for name in base)


def test_no_factorisation_where_nothing_moved(monkeypatch):
    monkeypatch.setattr("mergeflow.merging.linalg.spectra.gram", lambda *a, **k: pytest.fail("an SVD of zeros"))
    for name in ("cart", "low_rank", "tsv", "iso_c", "iso_cts", "knots"):
        assert not direction(name, torch.zeros(3, 8, 8, dtype=torch.float64)).any()


# TSV, Iso, KnOTS


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_tsv_formula(shape):
    taus = draw(4, *shape)
    factors = [torch.linalg.svd(tau, full_matrices=False) for tau in taus]
    left = torch.cat([u[:, :4] for u, _, _ in factors], 1)
    sigma = torch.cat([s[:4] for _, s, _ in factors])
    right = torch.cat([v[:4] for _, _, v in factors], 0)
    expected = (orthogonal(left) * sigma) @ orthogonal(right)
    torch.testing.assert_close(direction("tsv", taus), expected)


def test_tsv_sums_orthogonal_experts_without_loss():
    left, right = torch.linalg.qr(draw(16, 16))[0], torch.linalg.qr(draw(16, 16, seed=1))[0]
    taus = torch.stack([left[:, i : i + 4] @ right[:, i : i + 4].T for i in (0, 4, 8, 12)])
    torch.testing.assert_close(direction("tsv", taus), taus.sum(0))


def test_tsv_of_equal_experts_is_finite():
    tau = draw(16, 16)
    assert direction("tsv", torch.stack([tau, tau])).isfinite().all()


def test_iso_c_formula_and_flat_spectrum():
    taus = draw(3, 20, 12)
    left, sigma, right = torch.linalg.svd(taus.sum(0), full_matrices=False)
    change = direction("iso_c", taus)
    torch.testing.assert_close(change, sigma.mean() * left @ right)
    values = torch.linalg.svdvals(change)
    torch.testing.assert_close(values, torch.full_like(values, sigma.mean()))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((20, 10), torch.float64), ((10, 20), torch.float64), ((20, 10), torch.float32), ((10, 20), torch.float32)],
)
def test_iso_cts_formula(shape, dtype):
    taus, common, count = draw(2, *shape).to(dtype).double(), 8, 1
    left, sigma, right = torch.linalg.svd(taus.sum(0), full_matrices=False)
    lefts, sigmas, rights = [left[:, :common]], [sigma[:common]], [right[:common]]
    for tau in taus:
        outside = tau - left[:, :common] @ left[:, :common].T @ tau
        u, s, v = torch.linalg.svd(outside, full_matrices=False)
        lefts, sigmas, rights = [*lefts, u[:, :count]], [*sigmas, s[:count]], [*rights, v[:count]]
    expected = torch.cat(sigmas).mean() * orthogonal(torch.cat(lefts, 1)) @ orthogonal(torch.cat(rights, 0))
    error = (direction("iso_cts", taus.to(dtype)).double() - expected).norm() / expected.norm()
    assert error < (1e-12 if dtype == torch.float64 else 1e-7)
    torch.testing.assert_close(direction("iso_cts", taus, common=1.0), direction("iso_c", taus))


def test_iso_cts_gives_no_direction_to_the_rounding_of_experts_of_low_rank():
    """All of them lies in the common space: what float64 leaves outside has directions too, of noise."""
    for shape in ((40, 24), (24, 40)):
        taus = torch.stack([draw(shape[0], 2, seed=i) @ draw(2, shape[1], seed=i + 9) for i in range(3)])
        values = torch.linalg.svdvals(direction("iso_cts", taus))
        torch.testing.assert_close(values[:6], values[:1].expand(6))
        assert values[6] < 1e-9 * values[0]


def test_iso_cts_where_rounding_gives_more_directions_than_the_shorter_side_has():
    taus = draw(3, 24, 8)
    assert direction("iso_cts", taus, common=0.0).isfinite().all()


@pytest.mark.parametrize("name", ["tsv", "iso_c", "iso_cts"])
def test_subspace_methods_average_what_is_not_treated(name):
    taus = draw(3, 8)
    torch.testing.assert_close(direction(name, taus), taus.mean(0))


@pytest.mark.parametrize("shape", [(6, 10), (30, 4)])
def test_knots_formula(shape):
    taus = draw(3, *shape)
    left, sigma, right = torch.linalg.svd(torch.cat(list(taus), 1), full_matrices=False)
    columns = shape[1]
    aligned = torch.stack([right[:, i * columns : (i + 1) * columns] for i in range(3)])
    torch.testing.assert_close(direction("knots", taus), (left * sigma) @ agreeing_mean(aligned, 0.2))


def test_knots_then_task_arithmetic_is_task_arithmetic():
    for taus in (draw(3, 6, 10), draw(3, 7)):
        torch.testing.assert_close(direction("knots", taus, then="task_arithmetic"), taus.sum(0))


@pytest.mark.parametrize("shape", [(48, 200), (200, 48), (64, 64)])
def test_knots_in_float32_is_that_of_float64(shape):
    """V_t is kept in the experts' type, but trimmed as it was before."""
    taus = (1e-3 * draw(8, *shape)).float()
    exact = direction("knots", taus.double())
    assert (direction("knots", taus).double() - exact).norm() < 1e-7 * exact.norm()


def test_entries_that_rounding_made_equal_are_trimmed_as_before():
    exact = 1 + 1e-10 * draw(4, 5)
    block = exact.float()
    rest = (exact - block).to(torch.bfloat16)
    trim_rounded(block, rest, 0.25)
    assert torch.equal(block.flatten().nonzero().flatten(), exact.flatten().topk(5).indices.sort().values)


# WUDI


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (20, 20)])
def test_wudi_of_a_wide_matrix_takes_its_curvature_in_blocks(shape, monkeypatch):
    taus = draw(4, *shape)
    whole = direction("wudi", taus, steps=20, lr=1e-2)
    monkeypatch.setattr(optimised, "_WIDTH", 7)
    monkeypatch.setattr(optimised, "_ROWS", 3)
    torch.testing.assert_close(direction("wudi", taus, steps=20, lr=1e-2), whole)


def interference(tau, taus):
    return sum(float(((tau - each) @ each.T).square().sum() / each.square().sum()) for each in taus)


def test_wudi_follows_adam_on_the_published_loss():
    taus = draw(3, 8, 6)
    tau = taus.sum(0).clone().requires_grad_()
    optimiser = torch.optim.Adam([tau], lr=1e-2)
    for _ in range(20):
        optimiser.zero_grad()
        loss = sum(((tau - each) @ each.T).square().sum() / each.square().sum() for each in taus)
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(direction("wudi", taus, steps=20, lr=1e-2), tau.detach())


def test_wudi_lowers_interference():
    taus = draw(4, 12, 16)
    assert interference(direction("wudi", taus, lr=1e-2), taus) < 0.5 * interference(taus.sum(0), taus)


def test_wudi_sums_experts_of_orthogonal_row_spaces():
    right = torch.linalg.qr(draw(12, 12))[0]
    taus = torch.stack([draw(6, 3, seed=i) @ right[:, 3 * i : 3 * i + 3].T for i in range(4)])
    torch.testing.assert_close(direction("wudi", taus, lr=1e-3), taus.sum(0), rtol=1e-3, atol=1e-2)
