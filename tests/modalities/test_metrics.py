"""Figures that are no mean over examples: those of scikit-learn and SciPy, and intervals as the bootstrap's own."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

from mergeflow.errors import MergeflowError
from mergeflow.modalities.metrics import METRICS, find_metric

REFERENCES = {
    "matthews": matthews_corrcoef,
    "f1": lambda right, answered: f1_score(right, answered, labels=[1], average="macro"),
    "macro_f1": lambda right, answered: f1_score(right, answered, average="macro"),
    "pearson": lambda right, answered: stats.pearsonr(right, answered)[0],
    "spearman": lambda right, answered: stats.spearmanr(right, answered)[0],
}


def outcomes(name: str, count: int, seed: int, classes: int = 2) -> np.ndarray:
    chance = np.random.default_rng(seed)
    if METRICS[name].numbers:
        right = chance.integers(0, 11, count) / 2  # with ties, as people rate
        return np.stack([right, right + chance.normal(0, 1.5, count) + 100], axis=1)
    right = chance.integers(0, classes, count)
    return np.stack([right, np.where(chance.random(count) < 0.7, right, chance.integers(0, classes, count))], axis=1)


@pytest.mark.parametrize("name", METRICS)
def test_the_mean_of_the_shares_is_the_figure(name: str) -> None:
    for seed, classes in enumerate((2, 3, 5)):
        rows = outcomes(name, 157, seed, 2 if name == "f1" else classes)
        assert METRICS[name].shares(rows).mean() == pytest.approx(REFERENCES[name](*rows.T), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_intervals_by_shares_are_those_of_resampled_figures(name: str) -> None:
    right = outcomes(name, 300, 7)
    other = right.copy()
    other[:60, 1] = right[np.random.default_rng(3).permutation(60), 1]  # two models on the same examples
    chance, gains = np.random.default_rng(0), []
    for _ in range(150):
        rows = chance.integers(0, 300, 300)
        gains.append(REFERENCES[name](*right[rows].T) - REFERENCES[name](*other[rows].T))
    differences = METRICS[name].shares(right) - METRICS[name].shares(other)
    low, high = np.quantile(gains, [0.025, 0.975])
    half = 1.96 * differences.std() / np.sqrt(300)
    assert differences.mean() == pytest.approx(REFERENCES[name](*right.T) - REFERENCES[name](*other.T), abs=1e-12)
    assert half == pytest.approx((high - low) / 2, rel=0.25)


@pytest.mark.parametrize("name", METRICS)
def test_a_constant_answer_has_the_figure_0_or_that_of_the_reference(name: str) -> None:
    rows = outcomes(name, 50, 0)
    rows[:, 1] = 1
    expected = REFERENCES[name](*rows.T) if name in ("f1", "macro_f1") else 0.0
    assert METRICS[name].shares(rows).mean() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlations_depend_on_neither_scale_nor_offset(name: str) -> None:
    rows = outcomes(name, 90, 1)
    moved = rows * [1e-3, 1e3] + [1e4, -1e6]
    np.testing.assert_allclose(METRICS[name].shares(moved), METRICS[name].shares(rows), atol=1e-7)


def test_an_unknown_metric_is_told_the_nearest() -> None:
    assert find_metric("accuracy") is None
    with pytest.raises(MergeflowError, match="unknown metric 'mathews': did you mean 'matthews'"):
        find_metric("mathews")
