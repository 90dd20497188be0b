"""The decision: a pure function, each gate alone and the interval against scipy's."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mergeflow.analysis.provable.criteria import unlearning_criteria
from registry.gates import Evidence, GateSettings, decide, paired_interval

from .conftest import make_evidence

NO_INTERVAL = GateSettings(confidence=None, tolerance=0.02, require_reproducible=False)


def failed(candidate, champion, options=NO_INTERVAL, **more):
    return [gate.name for gate in decide(candidate, champion, options, **more).gates if not gate.passed]


def test_extra_or_wild_settings_are_refused():
    with pytest.raises(ValidationError, match="marginn"):
        GateSettings(marginn=0.1)
    with pytest.raises(ValidationError):
        GateSettings(tolerance=2)


@pytest.mark.parametrize(
    "accuracy",
    [{}, {"digits": float("nan"), "signs": 0.5}, {"digits": 0.5}, {"digits": 80.0, "signs": 0.5}],
    ids=["none", "nan", "missing", "percent"],
)
def test_incomplete_metrics_never_pass(accuracy):
    whole = make_evidence(0.8)
    assert failed(Evidence(accuracy, whole.expert_accuracy), None) == ["metrics"]
    assert failed(Evidence(accuracy, whole.expert_accuracy), whole) == ["metrics"]


def test_an_expert_that_knows_nothing_is_named_with_its_figure():
    candidate = Evidence({"digits": 0.8, "signs": 0.5, "land": 0.5}, {"digits": 0.9, "signs": 0.0})
    (gate,) = [rule for rule in decide(candidate, None, NO_INTERVAL).gates if rule.name == "metrics"]
    assert not gate.passed
    assert "'signs' (0.5, its expert's 0.0); 'land' (0.5, its expert's missing)" in gate.reason


def test_the_first_becomes_champion_and_an_equal_one_does_not_replace_it():
    assert decide(make_evidence(0.1), None, GateSettings()).promote
    assert failed(make_evidence(0.8), make_evidence(0.8)) == ["margin"]
    (reason,) = decide(make_evidence(0.8), make_evidence(0.8), NO_INTERVAL).reasons
    assert reason == "mean normalised validation accuracy changes by +0.00 points, needed: a gain of more than 0"


def test_new_experts_are_named_where_they_normalise_both():
    champion = Evidence({"digits": 0.8}, {"digits": 0.9})
    (reason,) = decide(Evidence({"digits": 0.8}, {"digits": 0.8}), champion, NO_INTERVAL).reasons
    assert "changes by +0.00 points (both normalised by the candidate's experts), needed" in reason


def test_margin():
    old, new = make_evidence(0.80), make_evidence(0.81)
    assert not failed(new, old, GateSettings(confidence=None, margin=0.01))  # 0.01 / 0.95 is more than 0.01
    (reason,) = decide(new, old, GateSettings(confidence=None, margin=0.02)).reasons
    assert reason.endswith("changes by +1.05 points, needed: a gain of at least 2.00")


def test_tolerance_guards_each_task():
    experts = {"digits": 1.0, "signs": 1.0}
    old = Evidence({"digits": 0.80, "signs": 0.80}, experts)
    new = Evidence({"digits": 0.95, "signs": 0.77}, experts)
    assert failed(new, old) == ["tolerance"]
    assert not failed(new, old, NO_INTERVAL.model_copy(update={"tolerance": 0.03}))
    reasons = decide(new, old, NO_INTERVAL).reasons
    assert reasons == ["signs: 77.00 % against 80.00 %, more than 2.00 points worse"]


def test_interval_asks_for_more_than_luck():
    assert failed(make_evidence(0.81, count=100), make_evidence(0.80, count=100), GateSettings()) == ["interval"]
    assert not failed(make_evidence(0.9), make_evidence(0.8), GateSettings())


def test_interval_needs_the_same_examples():
    old, new = make_evidence(0.8), make_evidence(0.9)
    assert failed(new, Evidence(old.accuracy, old.expert_accuracy, reproducible=True), GateSettings()) == ["interval"]
    other = Evidence(old.accuracy, old.expert_accuracy, old.scores, {"digits": "other", "signs": "digest"}, True)
    answer = decide(new, other, GateSettings())
    assert not answer.promote
    assert "digits are missing or of other examples" in answer.reasons[0]


@pytest.mark.parametrize(("count", "paired"), [(1, True), (0, False)])
def test_one_example_of_a_task_is_paired_and_none_is_not(count, paired):
    old, new = make_evidence(0.0), make_evidence(1.0)
    old, new = (
        replace(side, scores={task: [score] * count for task in side.accuracy}) for side, score in ((old, 0), (new, 1))
    )
    assert ("interval" in decide(new, old, GateSettings()).numbers) is paired


def test_reproducible_and_withdrawn():
    strict = GateSettings(confidence=None, require_reproducible=True)
    shares = make_evidence(0.9)
    assert failed(Evidence(shares.accuracy, shares.expert_accuracy), None, strict) == ["reproducible"]
    assert failed(shares, None, withdrawn=True) == ["in service"]
    assert not failed(Evidence(shares.accuracy, shares.expert_accuracy, reproducible=True), None, strict)


def test_other_tasks():
    two, one_task = make_evidence(0.8), make_evidence(0.8, ("digits",))
    assert not failed(two, one_task)  # a task more, none worse
    assert failed(one_task, two) == ["tasks"]
    assert not failed(one_task, two, removed_tasks=["signs"])
    assert failed(make_evidence(0.7, ("digits",)), two, removed_tasks=["signs"]) == ["margin", "tolerance"]
    assert failed(make_evidence(0.9, ("cars",)), two) == ["tasks"]


def interval_of_booleans(candidate, champion, expert_accuracy, options):
    """The interval as it was when evidence said right or wrong: a multinomial over -1, 0 and 1."""
    random, total = np.random.default_rng(options.seed), np.zeros(options.resamples)
    for task in sorted(candidate):
        difference = candidate[task].astype(np.int8) - champion[task].astype(np.int8)
        chances = [np.mean(difference == -1), np.mean(difference == 0), np.mean(difference == 1)]
        draws = random.multinomial(len(difference), np.asarray(chances) / np.sum(chances), size=options.resamples)
        total += (draws[:, 2] - draws[:, 0]) / len(difference) / expert_accuracy[task]
    tail = (1.0 - options.confidence) / 2.0
    return tuple(float(end) for end in np.quantile(total / len(candidate), [tail, 1.0 - tail]))


@settings(max_examples=60)
@given(st.data())
def test_scores_of_zero_and_one_give_the_interval_of_booleans_bit_for_bit(data):
    counts = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    shares = [data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])) for _ in range(2)]
    sides = [{f"t{k}": random.random(count) < share for k, count in enumerate(counts)} for share in shares]
    experts = {f"t{k}": 0.9 - 0.1 * k for k in range(len(counts))}
    options = GateSettings(resamples=200, seed=5)
    scores = [{task: right.astype(np.float32) for task, right in side.items()} for side in sides]
    assert paired_interval(*scores, experts, options) == interval_of_booleans(*sides, experts, options)


def test_interval_of_scores_between_zero_and_one_agrees_with_scipy(monkeypatch):
    random = np.random.default_rng(1)
    old = random.random(300).astype(np.float32)
    new = np.clip(old + random.normal(0.03, 0.2, 300), 0, 1).astype(np.float32)
    options = GateSettings(resamples=10000)
    interval = paired_interval({"t": new}, {"t": old}, {"t": 0.9}, options)
    theirs = scipy.stats.bootstrap(
        ((new.astype(float) - old) / 0.9,), np.mean, method="percentile", n_resamples=10000, rng=random
    ).confidence_interval
    assert interval == pytest.approx((theirs.low, theirs.high), abs=0.002)
    monkeypatch.setattr("registry.gates._COUNTS_AT_ONCE", 1000)  # fewer at once: the same draws
    assert paired_interval({"t": new}, {"t": old}, {"t": 0.9}, options) == interval


def test_interval_covers_the_truth_as_often_as_it_says():
    random, hits = np.random.default_rng(3), 0
    for _ in range(200):
        sides = [{task: random.random(150) < share for task in "ab"} for share in (0.8, 0.7)]
        low, high = paired_interval(*sides, {"a": 1.0, "b": 1.0}, GateSettings(resamples=500, confidence=0.9))
        hits += low <= 0.1 <= high
    assert 0.83 <= hits / 200 <= 0.97


@settings(max_examples=50)
@given(st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
def test_never_worse_beyond_the_tolerance(shares):
    old = Evidence({"a": shares[0], "b": shares[1]}, {"a": 1.0, "b": 1.0})
    new = Evidence({"a": shares[2], "b": shares[3]}, {"a": 1.0, "b": 1.0})
    answer = decide(new, old, NO_INTERVAL)
    if answer.promote:
        assert sum(shares[2:]) > sum(shares[:2])
        assert all(shares[k + 2] >= shares[k] - 0.02 - 1e-9 for k in range(2))
        assert not decide(old, new, NO_INTERVAL).promote


def test_what_was_to_be_forgotten_must_be_forgotten_and_the_rest_kept() -> None:
    facts = {"accuracy": {"a": 0.8}, "expert_accuracy": {"a": 0.9}, "reproducible": True}
    for accuracy, loss, recall in ((0.1, 2.0, 0.2), (0.2, 2.0, 0.2), (0.1, 2.0, 0.3), (0.1, 1.0, 0.2)):
        promoted = (accuracy, loss, recall) == (0.1, 2.0, 0.2)
        criteria = [
            *unlearning_criteria({"a": 0.8, "b": accuracy}, {"a": 0.7}, {"b": 0.1}, "accuracy"),
            *unlearning_criteria({"a": 0.5, "b": loss}, {"a": 0.6}, {"b": 1.5}, "loss"),
            *unlearning_criteria({"a": 0.5, "b": recall}, {"a": 0.4}, {"b": 0.2}, "recall"),
        ]
        decision = decide(Evidence(**facts, criteria=criteria), None, GateSettings())  # type: ignore[arg-type]
        assert decision.promote is promoted
        assert [gate.name for gate in decision.gates].count("forgotten") == 3
        assert [gate.name for gate in decision.gates if not gate.passed] == ([] if promoted else ["forgotten"])
    assert decision.reasons == ["b must be forgotten: its loss is 1.000, at least 1.500 was asked for"]
    worse = unlearning_criteria({"a": 0.6, "b": 0.0}, {"a": 0.7}, {"b": 0.1}, "accuracy")
    assert not decide(Evidence(**facts, criteria=worse), None, GateSettings()).promote  # type: ignore[arg-type]
