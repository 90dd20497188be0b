"""What claims ask of tidy rows, on rows few enough to be worked out by hand."""

import pandas as pd
import pytest

from studies.lab.rows import at, each, ends, least, paired, per_seed, rank_correlation, samples, select, shares, steps

ROWS = pd.DataFrame(
    {
        "N": [1, 1, 8, 8, 8],
        "seed": [0, 1, 0, 1, 1],
        "accuracy": [50.0, 60.0, 80.0, 70.0, 90.0],
        "kind": ["a", "a", "a", "a", "b"],
    }
)
COURSE = pd.DataFrame({0: [1.0, 4.0, 9.0], 1: [2.0, 3.0, 5.0]}, index=[1, 2, 4])


def test_means_are_of_each_seed_and_of_the_seeds_that_every_row_has() -> None:
    assert per_seed(ROWS, "N").to_dict() == {0: {1: 50.0, 8: 80.0}, 1: {1: 60.0, 8: 80.0}}
    assert per_seed(ROWS, "N", kind="a").loc[8].tolist() == [80.0, 70.0]
    assert per_seed(ROWS, kind="a").loc[""].tolist() == [65.0, 65.0]
    assert list(per_seed(ROWS[(ROWS.seed == 0) | (ROWS.N == 1)], "N")) == [0]
    assert samples(ROWS, N=8).to_dict() == samples(ROWS, "accuracy", N=[8]).to_dict() == {0: 80.0, 1: 80.0}
    assert samples(ROWS, "N", kind="b").to_dict() == {1: 8.0}
    with pytest.raises(KeyError):
        select(ROWS, runs=1)


def test_differences_are_of_the_same_seed() -> None:
    def listed(measured: dict[str, pd.Series]) -> dict[str, list[float]]:
        return {name: values.tolist() for name, values in measured.items()}

    assert listed(steps(COURSE)) == {"N = 1 → 2": [3.0, 1.0], "N = 2 → 4": [5.0, 2.0]}
    assert listed(steps(COURSE.iloc[:2], "k", -1)) == {"k = 1 → 2": [-3.0, -1.0]}
    assert listed(ends(COURSE)) == {"N = 1 → 4": [8.0, 3.0]}
    assert listed(at(COURSE, 2)) == {"N = 2": [4.0, 3.0], "N = 4": [9.0, 5.0]}
    assert list(at(COURSE, label="k")) == ["k = 1", "k = 2", "k = 4"]
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_quantities_have_names_and_the_least_has_the_smallest_mean() -> None:
    assert each("ab", lambda name: {"N": [float(ord(name))]}) == {"a, N": [97.0], "b, N": [98.0]}
    assert least({"a": [1.0, 2.0], "b": [0.0, 1.0], "c": [-1.0, 9.0]}) == {"b": [0.0, 1.0]}


def test_ranks_are_means_over_groups_and_what_is_constant_ranks_nothing() -> None:
    rows = [{"run": run, "loss": loss, "x": sign * loss} for run, sign in (("up", 1), ("down", -1)) for loss in (1, 2)]
    assert rank_correlation(rows, lambda row: row["x"], "run") == pytest.approx(0)
    assert rank_correlation(rows[:2], lambda row: row["x"], "run") == pytest.approx(1)
    apart = [{"run": run, "loss": run + loss, "x": loss - 3 * run} for run in (0, 10) for loss in (1, 2)]
    assert rank_correlation(apart, lambda row: row["x"], "run") == pytest.approx(1)
    assert rank_correlation(apart, lambda row: row["x"]) < 0
    assert rank_correlation(rows, lambda row: 1.0) == 0
    assert rank_correlation([{**row, "loss": 1.0} for row in rows], lambda row: row["x"]) == 0


def test_an_expert_at_or_below_zero_has_no_share() -> None:
    accuracy, experts = (
        pd.Series([0.25, 10.0, -10.0]),
        pd.Series([0.5, -10.0, -5.0]),
    )  # a Matthews correlation has signs
    assert shares(accuracy, experts).tolist() == [50.0, 120.0, 95.0]
