"""One scoring function for stages and sweeps: equal to plain merges, with nothing computed twice."""

from pathlib import Path

import pytest
import torch

from mergeflow.evaluation import CandidateScorer, accuracies
from mergeflow.merging import configure, prepare
from mergeflow.merging.execution.direction import CandidateMerger
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.search.sweep import largest_rank_ratio
from tests.card import card
from tests.evaluation.small import TASKS, make_scorer

GRID = [{"rank_ratio": ratio, "scale": scale} for ratio in (0.04, 0.12, 0.08) for scale in (0.5, 2.0)]


@pytest.fixture
def scorer(world: Path) -> CandidateScorer:
    return make_scorer(world)


@pytest.mark.slow
def test_every_candidate_is_the_plain_merge_bit_for_bit(scorer: CandidateScorer):
    model = image_model(load_clip("pocket-clip"))
    for args in GRID:
        call = configure("cart", args)
        plain = prepare(call, scorer.merger.base, scorer.merger.experts).at(call.scale)
        merged = scorer.merge(call)
        assert all(torch.equal(plain[name], merged[name]) for name in plain)
        model.load(plain)
        assert scorer.candidate(call) == accuracies(model, scorer.tasks)


def test_each_matrix_is_factored_once_for_all_ranks_and_scales(scorer: CandidateScorer):
    scorer.renew_cache(0.12)
    for args in GRID:
        scorer.merge("cart", **args)
    matrices = sum("attn" in name or "mlp" in name for name, value in scorer.merger.base.items() if value.ndim == 2)
    assert scorer.merger.cache.misses == matrices * len(TASKS)
    assert scorer.merger.cache.hits == 2 * scorer.merger.cache.misses
    assert scorer.merger.prepared == 3


def test_a_card_keeps_anchor_and_direction_and_gives_the_processor_s_bits(scorer: CandidateScorer):
    """From the second scale on; with too little memory free, merges stay on the processor."""
    calls = [configure("ties", {"keep": 0.2, "scale": scale}) for scale in (0.3, 1.0, 1.2)]
    expected = [scorer.merge(call) for call in calls]
    with card():
        merger = CandidateMerger(scorer.merger.base, scorer.merger.experts)
        results = [merger.merge_for(call, torch.device("cuda")) for call in calls]
        assert [{value.is_cuda for value in state.values()} for state in results] == [{False}, {True}, {True}]
        for state, plain in zip(results, expected, strict=True):
            assert all(torch.equal(state[name].cpu(), plain[name]) for name in plain)
        assert all(torch.equal(value, expected[1][name]) for name, value in merger.merge(calls[1]).items())
    with card(memory=10):
        merger = CandidateMerger(scorer.merger.base, scorer.merger.experts)
        states = [merger.merge_for(call, torch.device("cuda")) for call in calls]
        assert not any(value.is_cuda for state in states for value in state.values())


def test_the_cache_keeps_what_a_method_may_need():
    assert largest_rank_ratio("cart", {"rank_ratio": [0.04, 0.16], "scale": [1.0]}) == 0.16
    assert largest_rank_ratio("cart", {"rank_ratio": {"low": 0.01, "high": 0.3}}) == 0.3
    assert largest_rank_ratio("cart", {"rank_ratio": {"choices": [0.2, 0.1]}}) == 0.2
    assert largest_rank_ratio("cart", None) == 0.08
    assert largest_rank_ratio("tsv", {}) == 1.0
