"""What divides by a spread, a norm or a determinant is right on constant, duplicate, denormal and enormous features."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor

from mergeflow.analysis.geometry import cosine_matrix
from mergeflow.merging import configure, prepare
from mergeflow.modalities.classification import logistic, ridge
from mergeflow.modalities.metrics import METRICS
from studies.theory.gradients import cosines_to_first
from studies.theory.interference import factor_tasks, row_space_interference
from studies.theory.landscape import centred_gram, cosines_from
from studies.theory.linearity import _correlation

PLAIN = np.random.default_rng(0).normal(size=(200, 3))
LABELS = (PLAIN[:, 0] + 0.5 * PLAIN[:, 1] > 0).astype(int) + (PLAIN[:, 2] > 1)
NUMBERS = PLAIN @ np.array([2.0, -1.0, 0.5]) + 3
NOISE = np.random.default_rng(1).normal(size=200)

# Features that say nothing: a fit leaves them out.
EMPTY = {
    "zero": np.zeros(200),
    "constant": np.full(200, 0.1),
    "constant but for float32's rounding": np.float64(np.float32(7.3) * (1 + np.float32(1.2e-7) * (NOISE > 0))),
    "as MiniLM's feature 223": 1e-32 * NOISE,
    "as MiniLM's second": 2e-9 * NOISE,
    "denormal in float32": 1e-42 * NOISE,
    "denormal in float64": 1e-310 * NOISE,
}


def heads() -> list[Callable[[np.ndarray], np.ndarray]]:
    def classes(features: np.ndarray) -> np.ndarray:
        weight, bias = logistic(features, LABELS, 3)
        assert np.isfinite(np.float32(weight)).all()
        return features @ weight.T + bias

    def numbers(features: np.ndarray) -> np.ndarray:
        weight, bias = ridge(features, NUMBERS)
        assert np.isfinite(np.float32(weight)).all()
        return features @ weight.T + bias

    return [classes, numbers]


@pytest.mark.parametrize("fit", heads())
@pytest.mark.parametrize("kind", EMPTY)
def test_a_feature_that_says_nothing_changes_no_answer(fit: Callable[[np.ndarray], np.ndarray], kind: str) -> None:
    np.testing.assert_allclose(fit(np.column_stack([PLAIN, EMPTY[kind]])), fit(PLAIN), atol=1e-4)


@pytest.mark.parametrize("fit", heads())
@pytest.mark.parametrize("scale", [1e-9, 1e9, 1e30, 1e200, 1e300])
def test_the_unit_of_all_features_changes_no_answer(fit: Callable[[np.ndarray], np.ndarray], scale: float) -> None:
    np.testing.assert_allclose(fit(PLAIN * scale), fit(PLAIN), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fit", heads())
def test_one_enormous_feature_takes_no_other_away(fit: Callable[[np.ndarray], np.ndarray]) -> None:
    np.testing.assert_allclose(fit(PLAIN * [1e30, 1, 1]), fit(PLAIN), rtol=1e-4, atol=1e-4)


def test_heads_on_duplicates_are_those_of_scikit_learn() -> None:
    twice = np.column_stack([PLAIN, PLAIN])
    scaled = (twice - twice.mean(axis=0)) / twice.std(axis=0)
    classes, numbers = (fit(twice) for fit in heads())
    expected = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(scaled, LABELS).predict_proba(scaled)
    exponentials = np.exp(classes - classes.max(axis=1, keepdims=True))
    np.testing.assert_allclose(exponentials / exponentials.sum(axis=1, keepdims=True), expected, atol=1e-3)
    np.testing.assert_allclose(numbers[:, 0], Ridge(alpha=1.0).fit(scaled, NUMBERS).predict(scaled), atol=1e-6)


@pytest.mark.parametrize("fit", heads())
def test_features_that_are_all_denormal_leave_the_bias_alone(fit: Callable[[np.ndarray], np.ndarray]) -> None:
    probabilities = fit(1e-42 * PLAIN)
    np.testing.assert_allclose(probabilities, probabilities[:1].repeat(200, 0), atol=1e-6)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("scale", [1e-310, 1e-42, 1e-9, 1e30, 1e200, 1e300])
def test_a_correlation_does_not_know_units(name: str, scale: float) -> None:
    share = METRICS[name].shares(np.stack([PLAIN[:, 0] * scale, PLAIN[:, 0] + PLAIN[:, 1]], axis=1)).mean()
    expected = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name](PLAIN[:, 0], PLAIN[:, 0] + PLAIN[:, 1])[0]
    assert share == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("value", [0.1, 1e9 / 3, 1e300, 1e-310])
def test_a_correlation_with_a_constant_is_0(name: str, value: float) -> None:
    assert METRICS[name].shares(np.stack([PLAIN[:, 0], np.full(200, value)], axis=1)).mean() == 0


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30, 1e38])
def test_cosines_do_not_know_units(scale: float) -> None:
    a, b = ({"w": torch.tensor(row)} for row in ([1.0, 1.0, 0.0], [1.0, 0.0, 0.0]))
    large = {"w": a["w"] * scale}
    # 1e-44 is 7 denormal steps of float32, so that the direction is kept
    assert cosine_matrix([large, b])[0] == pytest.approx([1.0, 0.5**0.5])
    assert cosines_to_first([b, large]) == pytest.approx([1.0, 0.5**0.5])


def test_the_angle_to_a_point_that_is_the_origin_but_for_rounding_is_no_direction() -> None:
    points = {"o": [1.0, 1.0, 0.0], "same": [1.0, 1.0 + 1e-12, 0.0], "a": [2.0, 0.0, 0.0], "b": [0.0, 5.0, 1.0]}
    gram = centred_gram({name: {"w": torch.tensor(row, dtype=torch.float64)} for name, row in points.items()})
    assert cosines_from(gram, 0)[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def _products(first: Tensor, second: Tensor) -> Tensor:
    rows = torch.cat([first, second, torch.ones(1, first.shape[1], dtype=torch.float64)])
    return rows @ rows.T


@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1.0, 1e12])
def test_units_of_small_and_large_activations_are_matched_alike(scale: float) -> None:
    units = torch.from_numpy(PLAIN.T)
    correlation = _correlation(_products(units * scale, units * scale), 3)
    torch.testing.assert_close(correlation, torch.from_numpy(np.corrcoef(PLAIN.T)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [0.1, 1e3 / 3, 1e9 / 3])
def test_a_unit_that_never_changes_is_matched_with_none(value: float) -> None:
    units = torch.from_numpy(PLAIN.T)
    still = torch.cat([torch.full((1, 200), value, dtype=torch.float64), units[1:]])
    assert _correlation(_products(still, units), 3)[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [0.0, 1e-42, 1.0, 1e30, 3e38])
def test_equal_fishers_give_the_average_at_any_size(size: float) -> None:
    experts = {"a": {"w": torch.tensor([[1.0, -2.0]])}, "b": {"w": torch.tensor([[3.0, 4.0]])}}
    base = {"w": torch.zeros(1, 2)}
    data = {"fisher": {name: {"w": torch.full((1, 2), size)} for name in experts}}
    merged_weight = prepare(configure("fisher"), base, experts, data=data).at(1.0)["w"]
    torch.testing.assert_close(merged_weight, torch.tensor([[2.0, 1.0]]))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_regmean_does_not_know_units_of_the_inputs(scale: float) -> None:
    """The first two inputs are duplicates and the third never fires."""
    inputs = {name: torch.from_numpy(np.random.default_rng(at).normal(size=(50, 2))) for at, name in enumerate("ab")}
    grams = {name: torch.stack([x[:, 0], x[:, 0], 0 * x[:, 0], x[:, 1]]) for name, x in inputs.items()}
    drawn = {name: np.random.default_rng(9 + at).normal(size=(2, 4)) for at, name in enumerate("ab")}
    experts = {name: {"w": torch.from_numpy(weight).float()} for name, weight in drawn.items()}
    base = {"w": torch.zeros(2, 4)}

    def merged(unit: float) -> Tensor:
        data = {"gram": {name: {"w": (x @ x.T * unit).float()} for name, x in grams.items()}}
        return prepare(configure("regmean", {"off_diagonal": 1.0}), base, experts, data=data).at(1.0)["w"]

    state = merged(scale)
    torch.testing.assert_close(state, merged(1.0), atol=1e-3, rtol=1e-3)
    assert state[:, 2].tolist() == [0.0, 0.0]


def test_a_matrix_that_an_expert_has_not_changed_interferes_with_none() -> None:
    changed = torch.from_numpy(PLAIN[:3, :3])
    interference = row_space_interference(factor_tasks([changed, torch.zeros(3, 3, dtype=torch.float64)]))
    assert [interference.whole.max(), interference.truncated.max(), interference.spectral.max()] == [0.0, 0.0, 0.0]
