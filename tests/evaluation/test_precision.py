"""`evaluation.precision`: what each precision changes of scores, and what never depends on it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mergeflow.errors import MergeflowError
from mergeflow.evaluation import CandidateScorer, accuracy, example_scores, losses
from mergeflow.merging import configure
from mergeflow.search.sweep import run_sweep
from mergeflow.search.sweep_file import make_sweep
from mergeflow.training.arithmetic import arithmetic, forward_in
from mergeflow.training.settings import Precision
from tasks.project.graph import load_graph
from tasks.running.runner import run_stage
from tests.evaluation.small import TASKS, make_scorer, sweep_values
from tests.project_folder import change_params
from tests.toy_project import PIPELINE, make_toy_project


@pytest.fixture
def scorer(world: Path) -> CandidateScorer:
    return make_scorer(world)


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


def test_every_stage_that_judges_does_it_in_the_projects_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_compiled_model_gives_the_same_scores_for_every_candidate(
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
