"""Scores: equal to plain merges, with nothing computed twice, in each precision, and in files."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mergeflow.errors import MergeflowError
from mergeflow.evaluation import (
    CandidateScorer,
    accuracies,
    accuracy,
    example_scores,
    losses,
    read_scores,
    write_scores,
)
from mergeflow.merging import configure, prepare
from mergeflow.merging.execution.direction import CandidateMerger
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.search.sweep import largest_rank_ratio, run_sweep
from mergeflow.search.sweep_file import make_sweep
from mergeflow.training.arithmetic import arithmetic, forward_in
from mergeflow.training.settings import Precision
from tasks.project.graph import load_graph
from tasks.running.runner import run_stage
from tests.card import card
from tests.evaluation.small import TASKS, make_scorer, sweep_values
from tests.project_folder import change_params
from tests.toy_project import PIPELINE, make_toy_project

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


def test_bfloat16_changes_features_and_tf32_no_bit_on_the_processor(scorer: CandidateScorer) -> None:
    scorer.model.load(scorer.merger.base)
    plain = losses(scorer.model, scorer.tasks)
    assert losses(scorer.model, scorer.tasks, precision="tf32") == plain
    half = losses(scorer.model, scorer.tasks, precision="bfloat16")
    assert half != plain
    assert half == pytest.approx(plain, rel=0.02)


def test_the_forward_pass_is_under_autocast_and_merge_and_head_are_not(world: Path) -> None:
    """Weights that are merged and logits with CLIP's temperature keep all their bits."""
    seen: dict[str, list[bool]] = {"encode": [], "head": []}
    scorer = make_scorer(world, precision="bfloat16")
    call = configure("task_arithmetic", {"scale": 0.3})
    expected = make_scorer(world).merge(call)
    on = torch.is_autocast_enabled
    scorer.model.module.register_forward_pre_hook(lambda *_: seen["encode"].append(on("cpu")))
    for task in scorer.tasks.values():
        assert task.head is not None
        task.head.register_forward_pre_hook(lambda *_: seen["head"].append(on("cpu")))
    scorer.candidate(call)
    assert seen == {"encode": [True] * len(TASKS), "head": [False] * len(TASKS)}
    assert all(torch.equal(value, expected[name]) for name, value in scorer.merge(call).items())


def test_tf32_switches_torch_for_the_forward_pass_alone_and_leaves_determinism(scorer: CandidateScorer) -> None:
    seen: list[tuple[str, bool]] = []

    def look(*_: Any) -> None:
        seen.append((torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled()))

    scorer.model.module.register_forward_pre_hook(look)
    task = next(iter(scorer.tasks.values()))
    with arithmetic(deterministic=True):
        example_scores(scorer.model, task, 256, "tf32")
        example_scores(scorer.model, task, 256)
    assert seen == [("tf32", True), ("ieee", True)]


def test_a_sweep_in_another_precision_does_not_go_on_in_the_same_folder(world: Path, tmp_path: Path) -> None:
    values = {"methods": {"average": {}}}
    run_sweep(make_sweep(sweep_values(world, **values)), tmp_path)
    assert run_sweep(make_sweep(sweep_values(world, **values, precision="float32")), tmp_path).scored == 0
    with pytest.raises(MergeflowError, match="precision"):
        run_sweep(make_sweep(sweep_values(world, **values, precision="bfloat16")), tmp_path)


def test_every_judging_stage_does_it_in_the_projects_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(asked: set[str], precision: Precision, device: torch.device) -> Any:
        asked.add(precision)
        return forward_in(precision, device)

    root = make_toy_project(tmp_path / "project", steps=4)
    change_params(root, {"evaluation.precision": "bfloat16"})
    seen = dict[str, set[str]]()
    for stage in load_graph(root).values():
        if stage.name in PIPELINE:
            asked = seen.setdefault(stage.name, set())
            monkeypatch.setattr(accuracy, "forward_in", partial(noted, asked))
            run_stage(root, stage)
    judging = ("finetune", "sweep", "select", "evaluate")
    assert {name: asked for name, asked in seen.items() if asked} == {name: {"bfloat16"} for name in judging}


@pytest.mark.slow
def test_a_compiled_model_gives_all_the_same_scores(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are loaded later count too, and one graph serves last batches and tasks of any size."""
    graphs: list[Any] = []

    def noted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    scorer, compiled = make_scorer(world, batch_size=8), make_scorer(world, batch_size=8, compile=True)
    for scale in (0.0, 0.5, 1.0):
        call = configure("task_arithmetic", {"scale": scale})
        assert compiled.candidate(call) == scorer.candidate(call)
    assert len(graphs) == 1
    sweep = make_sweep(sweep_values(world, methods={"average": {}}, compile=True))
    assert run_sweep(sweep, tmp_path).winner.method == "average"


SCORES = arrays(np.float32, st.integers(0, 9), elements=st.floats(0, 1, width=32))


@given(scores=st.dictionaries(st.text("abcé_-.", min_size=1, max_size=9), SCORES, max_size=4))
def test_scores_come_back(tmp_path_factory, scores):
    path = tmp_path_factory.getbasetemp() / "scores.npz"
    write_scores(path, scores)
    again = read_scores(path)
    assert list(again) == list(scores)
    assert all(
        np.array_equal(again[task], values) and again[task].dtype == np.float32 for task, values in scores.items()
    )


def test_the_same_scores_are_the_same_bytes_on_any_python(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    write_scores(path, {"digits": np.array([0, 0.5, 1], np.float32), "land": np.ones(2, np.float32)})
    digest = "1141e474dafe9749f483aeee930412b753966815b31530ef05f1ce372f509279"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_files_that_numpy_wrote_are_read(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, digits=np.array([0, 1], np.float32))
    assert read_scores(path)["digits"].tolist() == [0, 1]
