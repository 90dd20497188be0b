"""Row-space interference, reconstruction error and the theorem's bound, against the plain formulas in float64."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergeflow.errors import MergeflowError
from studies.theory.interference import (
    Setting,
    bounds,
    draw_tasks,
    factor_tasks,
    kind_of,
    measured_interference,
    reconstruction_error,
    row_space_interference,
    task_interference,
    task_matrices,
)


def random_tasks(seed: int, count: int, shape: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def plain_interference(vectors: Sequence[Tensor], rank: int, reading: str) -> float:
    """Return I(k) from LAPACK's SVD and whole products."""
    scaled = []
    for vector in vectors:
        _, sigma, rows = torch.linalg.svd(vector, full_matrices=False)
        norm = sigma[:rank].norm() if reading == "truncated" else sigma.norm()
        scaled.append((sigma[:rank] / norm, rows[:rank]))
    total = 0.0
    for i, (si, vi) in enumerate(scaled):
        for j, (sj, vj) in enumerate(scaled):
            if i != j:
                printed = (si[:, None] * vi).T @ (sj[:, None] * vj)
                meant = (si[:, None] * vi) @ (sj[:, None] * vj).T
                total += float(torch.linalg.matrix_norm(printed if reading == "spectral" else meant))
    return total


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([(5, 9), (9, 5), (6, 6)]))
@settings(max_examples=4)
def test_every_rank_is_the_plain_formula(seed: int, count: int, shape: tuple[int, int]) -> None:
    vectors = random_tasks(seed, count, shape)
    factors = factor_tasks(vectors)
    interference, error = row_space_interference(factors), reconstruction_error(factors)
    for rank in range(1, min(shape) + 1):
        for reading in ("whole", "truncated", "spectral"):
            plain = plain_interference(vectors, rank, reading)
            assert getattr(interference, reading)[rank] == pytest.approx(plain, rel=1e-7), (reading, rank)
        cut = [low_rank(vector, rank) for vector in vectors]
        left_out = sum(float((v - c).square().sum()) for v, c in zip(vectors, cut, strict=True))
        assert error[rank] == pytest.approx(left_out, rel=1e-7, abs=1e-9)
        assert task_interference(factors, rank) == pytest.approx(plain_task_interference(cut, rank), rel=1e-6)


def low_rank(matrix: Tensor, rank: int) -> Tensor:
    left, sigma, rows = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * sigma[:rank] @ rows[:rank]


def plain_task_interference(cut: Sequence[Tensor], rank: int) -> float:
    spans = [torch.linalg.svd(each, full_matrices=False)[2][:rank].T for each in cut]
    noise = sum(
        float((torch.stack([*cut]).sum(0) - part).matmul(v).square().sum()) for part, v in zip(cut, spans, strict=True)
    )
    return noise / sum(float(each.square().sum()) for each in cut)


def test_the_ends_and_the_course() -> None:
    vectors = random_tasks(3, 3, (12, 7))
    factors = factor_tasks(vectors)
    interference, error = row_space_interference(factors), reconstruction_error(factors)
    products = sum(
        float(torch.linalg.matrix_norm(a @ b.T) / (a.norm() * b.norm())) for a in vectors for b in vectors if a is not b
    )
    assert interference.whole[-1] == interference.truncated[-1] == pytest.approx(products)
    assert interference.whole[0] == interference.truncated[0] == interference.spectral[0] == 0
    assert (np.diff(interference.whole) >= 0).all()
    assert (np.diff(error) <= 0).all()
    assert error[0] == pytest.approx(sum(float(v.square().sum()) for v in vectors))
    assert error[-1] == 0


def test_the_printed_formula_sees_no_direction() -> None:
    row = torch.tensor([[2.0, 1.0, 0.0, 0.0]]).double().diag_embed()[0]
    apart = torch.roll(row, 2, dims=1)
    together, orthogonal = (row_space_interference(factor_tasks([row, other])) for other in (row, apart))
    assert orthogonal.whole[-1] == 0
    assert together.whole[-1] > 1
    assert orthogonal.spectral.tolist() == pytest.approx(together.spectral.tolist())


def test_two_centred_tasks_have_one_row_space() -> None:
    first, second = random_tasks(5, 2, (6, 6))
    interference = row_space_interference(factor_tasks([(first - second) / 2, (second - first) / 2]))
    assert interference.whole == pytest.approx(interference.spectral)


def test_a_task_that_changed_nothing_adds_nothing() -> None:
    vectors = random_tasks(1, 2, (4, 5))
    with_zero = factor_tasks([*vectors, torch.zeros(4, 5)])
    assert row_space_interference(with_zero).whole == pytest.approx(row_space_interference(factor_tasks(vectors)).whole)
    nothing = factor_tasks([torch.zeros(4, 5)])
    assert reconstruction_error(nothing).tolist() == [0.0] * 5
    assert task_interference(nothing, 2) == 0


def test_task_matrices_are_those_that_inputs_meet() -> None:
    base = {
        "visual.conv1.weight": torch.zeros(8, 3, 2, 2),
        "visual.proj": torch.zeros(8, 6),
        "visual.ln_pre.weight": torch.zeros(8),
    }
    experts = {name: {key: value + size for key, value in base.items()} for name, size in (("a", 1.0), ("b", 3.0))}
    original, centred = (dict(task_matrices(base, experts, each)) for each in (False, True))
    assert {name: tuple(parts[0].shape) for name, parts in original.items()} == {
        "visual.conv1.weight": (8, 12),
        "visual.proj": (6, 8),
    }
    assert float(original["visual.proj"][1].mean()) == 3
    assert float(centred["visual.proj"][1].mean()) == 1
    assert {kind_of(name) for name in original} == {"patch embedding", "projection"}


@pytest.mark.parametrize(
    ("vectors", "words"),
    [([], "at least one"), ([torch.zeros(2, 3), torch.zeros(3, 2)], "task vector 1"), ([torch.zeros(4)], r"\(4,\)")],
)
def test_what_is_no_weight_of_all_tasks_is_refused(vectors: list[Tensor], words: str) -> None:
    with pytest.raises(MergeflowError, match=words):
        factor_tasks(vectors)


SETTINGS = st.builds(
    Setting,
    tasks=st.integers(2, 6),
    rank=st.integers(1, 4),
    shared=st.just(1),
    overlap=st.floats(0.001, 1),
    weakest=st.booleans(),
    condition=st.floats(1, 20),
    noise=st.sampled_from([0.0, 0.01, 0.3]),
    reach=st.floats(0.5, 3),
)


@given(SETTINGS, st.integers(0, 10**6))
@settings(max_examples=12)
def test_the_bounds_hold_and_are_ordered(setting: Setting, seed: int) -> None:
    drawn = draw_tasks(setting, seed)
    limits, loss = bounds(drawn), measured_interference(drawn)
    slack = 1 + 1e-9
    assert loss <= limits.pairwise * slack
    assert limits.pairwise <= limits.derived * slack
    assert limits.derived <= limits.printed * slack
    assert loss <= limits.printed_spectral * slack


def test_the_bounds_are_their_formulas() -> None:
    drawn = draw_tasks(Setting(tasks=4, width=20, condition=4.0, noise=0.3, samples=5, reach=1.7), seed=2)
    drawn = replace(drawn, values=2 * drawn.values)  # s_max = 2
    vectors, largest, smallest = list(drawn.vectors), 2.0, 0.5
    norms = [vector.norm() for vector in vectors]
    terms = torch.tensor(
        [[0.0 if s is t else float((s @ t.T).norm() / (s.norm() * t.norm())) for t in vectors] for s in vectors]
    )
    spectral = 12 * float(drawn.values.square().norm() / norms[0] ** 2)
    limits, noise = bounds(drawn), 12 * largest * 0.3

    def whole(constant: float, total: float) -> object:
        return pytest.approx(5 * (constant * total + noise) ** 2, rel=1e-6)

    assert limits.printed == whole(1.7 * 4 * largest**4 / smallest**2, float(terms.sum()))
    assert limits.printed_spectral == whole(1.7 * 4 * largest**4 / smallest**2, spectral)
    assert limits.derived == whole(1.7 * 4 * largest**3 / smallest, float(terms.sum()))
    products = torch.tensor([[float(s * t) for t in norms] for s in norms]) * terms
    each_task = 1.7 * largest / smallest * products.sum(dim=1) + 3 * largest * 0.3
    assert limits.pairwise == pytest.approx(5 * float(each_task.square().sum()), rel=1e-6)


def test_interference_is_that_of_the_task_vectors() -> None:
    drawn = draw_tasks(Setting(tasks=3, width=20, condition=4.0), seed=2)
    factors = factor_tasks(list(drawn.vectors))
    interference = row_space_interference(factors)
    assert bounds(drawn).interference == pytest.approx(interference.whole[-1], rel=1e-6)
    assert bounds(drawn).spectral == pytest.approx(interference.spectral[-1], rel=1e-6)


def test_inputs_are_as_long_as_the_theorem_has_them() -> None:
    clean, noisy = (draw_tasks(Setting(tasks=3, width=20, reach=1.7, noise=noise), seed=2) for noise in (0.0, 0.3))
    torch.testing.assert_close(clean.inputs @ clean.right @ clean.right.mT, clean.inputs)
    assert clean.inputs.norm(dim=-1).flatten().tolist() == pytest.approx([1.7] * clean.inputs[..., 0].numel())
    assert (noisy.inputs - clean.inputs).norm(dim=-1).flatten().tolist() == pytest.approx(
        [0.3] * len(clean.inputs[0]) * 3
    )


def test_inputs_outside_the_row_space_break_the_bound() -> None:
    setting = Setting(overlap=0.0)
    inside, outside = (draw_tasks(setting, 0, full) for full in (False, True))
    assert (
        bounds(inside).printed == pytest.approx(0, abs=1e-20) == pytest.approx(measured_interference(inside), abs=1e-20)
    )
    assert measured_interference(outside) > 0.1 > bounds(outside).printed


def test_a_layer_too_narrow_is_refused() -> None:
    with pytest.raises(MergeflowError, match="need a width of 20"):
        draw_tasks(Setting(tasks=4, rank=4, width=16), seed=0)
