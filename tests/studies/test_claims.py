"""Verdicts: the t-test behind an interval, Holm over the parts of a claim, preconditions, and several settings."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from studies.lab.claims import (
    LEVEL,
    UNTESTED,
    Claim,
    Finding,
    all_within,
    example_errors,
    holm,
    interval,
    needs,
    overall,
    p_outside,
    spread,
    with_interval,
    within,
)

VALUES = st.lists(st.floats(-5, 5).map(lambda value: round(value, 3)), min_size=2, max_size=6)
PARTS = st.dictionaries(st.sampled_from("abcdefgh"), VALUES, min_size=1)


def adjusted(ps: list[float]) -> list[float]:
    """Return Holm's adjusted p by the definition: max over j ≤ i of (n − j + 1) p_(j), in ascending order of p."""
    ascending = sorted(ps)
    return [max((len(ps) - j) * ascending[j] for j in range(i + 1)) for i in range(len(ps))]


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 0.2), min_size=1, max_size=12))
def test_holm_rejects_what_its_adjusted_p_says(ps: dict[str, float]) -> None:
    rejected = holm(ps)
    assert len(rejected) == sum(p < LEVEL for p in adjusted(list(ps.values())))
    assert all(ps[name] <= ps[other] for name in rejected for other in set(ps) - set(rejected))


@given(VALUES, st.floats(-5, 5))
def test_p_is_that_of_the_one_sided_test(values: list[float], low: float) -> None:
    if len(set(values)) > 1:
        expected = stats.ttest_1samp(values, low, alternative="less").pvalue
        assert p_outside(values, low=low) == pytest.approx(expected)
    assert p_outside(values[:1], low=low) == 1
    assert p_outside([*values, math.nan], low=low) == 1, "what is no number refutes nothing"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.7, 2.3, True),  # the interval of the values is 2 ± 0.248
        (1.8, 2.3, None),
        (1.7, 2.2, None),
        (1.8, 2.2, None),
        (2.3, 9, False),
        (0, 1.7, False),
        (-math.inf, 2.3, True),
        (2.3, math.inf, False),
    ],
)
def test_a_verdict_is_of_the_whole_interval(low: float, high: float, expected: bool | None) -> None:
    assert within([1.9, 2.0, 2.1], low, high) is expected
    assert within([2.0, 2.0], 2, 3) is within([2.0, 2.0], 1, 2) is True, "a limit is within"
    assert within([2.0], low, high) is None
    assert with_interval([1.9, 2.0, 2.1], 2) == "2.00 ± 0.25"
    assert with_interval([2.0]) == "2.0"


@given(VALUES, st.floats(-5, 5), st.floats(0, 5))
def test_a_claim_of_one_part_is_judged_by_its_interval(values: list[float], low: float, width: float) -> None:
    assert all_within({"a": (values, low, low + width)}) == within(values, low, low + width)


@given(PARTS, st.floats(-5, 5))
def test_more_parts_never_make_a_refutation_easier(parts: dict[str, list[float]], low: float) -> None:
    verdicts = {name: within(values, low) for name, values in parts.items()}
    whole = all_within({name: (values, low, math.inf) for name, values in parts.items()})
    assert (whole is True) == all(verdicts.values())
    assert whole is not False or False in verdicts.values()


@settings(max_examples=50)
@given(PARTS, VALUES, st.floats(-5, 5))
def test_a_claim_without_what_it_needs_is_not_refuted(
    parts: dict[str, list[float]], room: list[float], low: float
) -> None:
    need = needs(lambda rows: {"room": room}, "room", low=1)
    claim = Claim("M1", "It rises.", lambda rows: parts, low=low, needs=need)
    finding, bare = (
        claim.judge(pd.DataFrame()),
        Claim("M1", "It rises.", lambda rows: parts, low=low).judge(pd.DataFrame()),
    )
    assert finding.verdict == (bare.verdict if within(room, low=1) else UNTESTED)
    assert (finding.needs, finding.has[:6]) == ("room ≥ 1 points", "room: ")
    assert finding.testable or finding.holds is None


def test_a_claim_about_a_part_of_the_rows_sees_no_other() -> None:
    rows = pd.DataFrame({"suite": ["a", "a", "b", "b"], "room": [5.0, 5.1, 0.1, 0.0], "gain": [1.0, 1.1, -1.0, -1.1]})
    claim = Claim(
        "M1",
        lambda rows: f"{len(rows)} rows rise.",
        lambda rows: {"gain": rows.gain},
        low=0,
        also=lambda rows: f"; at most {rows.gain.max():g}",
        needs=needs(lambda rows: {"room": rows.room}, "room", low=1),
    )
    parts = [
        claim.of_part(lambda rows: rows[rows.suite == "a"], "suite a"),
        claim.of_part(lambda rows: rows[rows.suite == "b"], "suite b"),
    ]
    findings = [part.judge(rows) for part in parts]
    assert [(finding.setting, finding.verdict) for finding in findings] == [("suite a", "holds"), ("suite b", UNTESTED)]
    assert [finding.claim for finding in findings] == ["2 rows rise."] * 2
    assert [finding.measured.rpartition("at most ")[2] for finding in findings] == ["1.1", "-1"]
    decided = Claim("M1", "It rises.", decide=lambda rows: (bool((rows.gain > 0).all()), "so"), setting="whole")
    part = decided.of_part(lambda rows: rows[rows.suite == "a"])
    assert (part.judge(rows).verdict, part.setting, decided.judge(rows).verdict) == ("holds", "whole", "does not hold")


def test_the_family_is_printed_with_the_parts_that_decide() -> None:
    measured = {f"task {n}": [float(n), n + 0.05, n - 0.05] for n in range(12)}
    finding = Claim("M1", "It rises.", lambda rows: measured, low=0.5).judge(pd.DataFrame())
    assert finding.verdict == "does not hold"
    assert "task 0: 0.0 ± 0.1 points" in finding.measured
    assert "task 11" not in finding.measured
    assert finding.measured.endswith("(12 parts; outside by Holm: task 0 (p 0.002))")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([True, True], "holds"),
        ([True, None], "undecided"),
        ([True, False], "undecided"),
        ([False, None], "does not hold"),
        ([False, False], "does not hold"),
        ([], UNTESTED),
    ],
)
def test_settings_that_can_test_a_claim_decide_it(verdicts: list[bool | None], expected: str) -> None:
    findings = [Finding("P6", "It adds.", "", holds) for holds in verdicts]
    assert overall([*findings, Finding("P6", "It adds.", "", None, testable=False)]) == expected


def gains(rows: pd.DataFrame) -> dict[str, list[float]]:
    accuracy = rows.accuracy.to_numpy()  # in the order of `judged`
    return {"gain": list(accuracy[1::2] - accuracy[::2])}


def judged(random: np.random.Generator, true_gain: float, examples: int = 200) -> pd.DataFrame:
    """Draw a test split and three seeds of two models on it, which agree on most examples, with tidy rows of scores."""
    difficulty = random.random(examples)
    rows = []
    for seed in range(3):
        noise = random.random(examples) * 0.2
        for model, share in {"base": 0.6, "merged": 0.6 + true_gain}.items():
            scores = (0.8 * difficulty + noise < share).astype(float)
            rows.append({"seed": seed, "model": model, "task": "digits", "scores": scores})
    return pd.DataFrame(rows).assign(accuracy=lambda frame: 100 * frame.scores.map(np.mean))


def test_with_scores_an_interval_holds_for_other_test_examples() -> None:
    random, seeds_alone, both, runs = np.random.default_rng(1), 0, 0, 60
    truth = np.mean(gains(judged(random, 0.1, 200_000))["gain"])
    for _ in range(runs):
        rows = judged(random, 0.1)
        values = gains(rows)["gain"]
        [error] = example_errors(gains, rows).values()
        for_seeds, for_both = interval(values), interval(values, error)
        seeds_alone += abs(for_seeds[0] - truth) <= for_seeds[1]
        both += abs(for_both[0] - truth) <= for_both[1]
    assert both >= 0.88 * runs, "a 95 % interval, with four standard errors of 60 draws"
    assert seeds_alone < both


def test_a_claim_about_rows_with_scores_says_that_examples_count() -> None:
    rows = judged(np.random.default_rng(0), 0.1)
    claim = Claim("M2", "It gains.", gains, low=0)
    assert "± over seeds and test examples" in claim.judge(rows).measured
    assert "examples" not in claim.judge(rows.drop(columns="scores")).measured


@given(VALUES.filter(lambda values: len({*values}) > 1), st.floats(0, 3))
def test_an_error_over_examples_only_widens_a_standard_error(values: list[float], error: float) -> None:
    (centre, of_seeds, degrees), (same, whole, more) = spread(values), spread(values, error)
    assert (centre, of_seeds) == (same, pytest.approx(math.sqrt(max(whole**2 - error**2, 0)), abs=1e-6))
    assert more >= degrees == len(values) - 1
