"""What studies read: runs of fewer seeds, experts that others trained, and no test split where something is chosen."""

import multiprocessing
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from mergeflow.checkpoints import fingerprint, read_state, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import Judge, accuracy
from mergeflow.merging import MethodCall, configure
from mergeflow.merging.execution.direction import CandidateMerger
from mergeflow.processes import worker_pool
from studies.lab import runs
from studies.lab.inputs import Laboratory, choose_scale
from studies.lab.rows import accuracy_rows
from studies.lab.runs import take_experts
from tests.studies.small_lab import study_io, training_io
from tests.studies.toy_lab import SEEDS

pytestmark = pytest.mark.slow


@pytest.fixture
def inputs(toy_lab: Path, tmp_path: Path) -> Laboratory:
    return Laboratory(study_io(toy_lab, "mima", tmp_path))


def test_what_chooses_cannot_open_a_test_split(inputs: Laboratory) -> None:
    blind = inputs.blind()
    assert set(blind.accuracy(inputs.base, "validation")) == set(inputs.tasks)
    with pytest.raises(MergeflowError, match=r"reads outputs/data/test/\w+ where it must not"):
        blind.accuracy(inputs.base, "test")
    assert inputs.accuracy(inputs.base, "test")
    with pytest.raises(MergeflowError, match="look at test once with what was chosen"):
        inputs.blind().examples("test")  # though the images are in memory by now
    with pytest.raises(MergeflowError, match="where it must not"):
        inputs.blind().first(1).examples("test")


def test_the_same_weights_are_judged_once(inputs: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bits, not by the object; other weights, another split and another task are judged anew."""
    passes: list[str] = []
    judge = Judge.scores
    monkeypatch.setattr(Judge, "scores", lambda self, split: passes.append(split.task) or judge(self, split))
    first = inputs.accuracy(inputs.base, "validation")
    copied = {name: tensor.clone() for name, tensor in inputs.base.items()}
    assert inputs.blind().accuracy(copied, "validation") == inputs.first(3).accuracy(copied, "validation") == first
    assert passes == inputs.tasks
    expert = inputs.run("mima_1").expert(SEEDS[0], inputs.tasks[0])
    assert inputs.accuracy(expert, "validation")[inputs.tasks[0]] > first[inputs.tasks[0]]
    inputs.accuracy(copied, "test", inputs.tasks[:1])
    inputs.accuracy(copied, "test")
    assert passes[len(inputs.tasks) :] == [*inputs.tasks, *inputs.tasks[:1], *inputs.tasks[1:]]


def test_rows_of_the_test_split_keep_the_score_of_each_example(inputs: Laboratory) -> None:
    rows = accuracy_rows(inputs.accuracy(inputs.base, "test"), seed=0)
    assert [100 * fmean(row["scores"]) for row in rows] == pytest.approx([row["accuracy"] for row in rows])
    assert all(len(row["scores"]) == len(inputs.examples("test")[row["task"]]) for row in rows)
    assert not any("scores" in row for row in accuracy_rows(inputs.accuracy(inputs.base, "validation")))


def test_inputs_of_a_split_stay_on_a_card_for_the_next_model(
    inputs: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[str] = []
    monkeypatch.setattr(accuracy, "resident", lambda examples, fits: placed.append(examples.task) or examples)
    inputs.accuracy(inputs.base, "test")
    assert placed == []
    inputs.accuracy({name: value + 1 for name, value in inputs.base.items()}, "test")
    assert placed == inputs.tasks


def test_every_scale_is_tried_and_taken_with_the_other_arguments(
    inputs: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CART without its rank would be scored, or looked at on test, at the rank that it has by itself."""
    merged: list[MethodCall] = []
    merge = CandidateMerger.merge_for
    monkeypatch.setattr(CandidateMerger, "merge_for", lambda *args: merged.append(args[1]) or merge(*args))
    scorer = inputs.blind().scorer(inputs.run("mima_1").experts(SEEDS[0]))
    chosen = choose_scale(inputs, scorer, "cart", [0.5, 1.0], 0.5, {"rank_ratio": 0.3})
    tried = [configure("cart", {"rank_ratio": 0.3, "scale": scale}) for scale in (0.5, 1.0)]
    assert merged[:-1] == tried
    assert merged[-1] == configure("cart", chosen.args) in tried
    assert chosen.validation == scorer.candidate(merged[-1])
    assert chosen.test == inputs.accuracy(scorer.merge(merged[-1]), "test")


def test_published_checkpoints_are_experts_of_as_many_seeds_as_there_are(inputs: Laboratory) -> None:
    published, trained = inputs.run("published"), inputs.run("mima_1")
    assert (published.seeds, trained.seeds) == (SEEDS[:1], SEEDS)
    for task, state in published.experts(SEEDS[0]).items():
        assert all(torch.equal(tensor, trained.expert(SEEDS[0], task)[name]) for name, tensor in state.items())


def test_checkpoints_that_do_not_fit_are_told_all_at_once(tmp_path: Path) -> None:
    for name, state in {
        "base": {"a": torch.zeros(2), "b": torch.zeros(1)},
        "red": {"a": torch.zeros(3), "b": torch.zeros(1)},
        "blue": {"a": torch.zeros(2), "c": torch.zeros(1)},
    }.items():
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    with pytest.raises(MergeflowError) as raised:
        take_experts(
            tmp_path, "{task}.safetensors", ["red", "blue", "grey"], 0, tmp_path / "base.safetensors", tmp_path / "made"
        )
    for part in ("a has shape (3,), the base's has (2,)", "lacks 1 tensors", "has 1 tensors that the base", "grey: "):
        assert part in str(raised.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["mima_4", "converged"])
def test_a_killed_run_keeps_whole_seeds_and_nothing_of_what_led_there(toy_lab: Path, tmp_path: Path, name: str) -> None:
    trained: list[str] = []

    def killed(reported: str, done: int, total: int) -> None:
        trained.append(reported)
        if reported.startswith(f"seed {SEEDS[1]}"):
            raise KeyboardInterrupt

    io = training_io(toy_lab, name, tmp_path)
    with pytest.raises(KeyboardInterrupt), io.holds:
        runs.run(replace(io, report=killed))
    assert sorted(path.name for path in (tmp_path / f"seed_{SEEDS[0]}").iterdir()) == ["done.json", "result"]
    trained.clear()
    with (io := training_io(toy_lab, name, tmp_path)).holds:
        runs.run(replace(io, report=lambda reported, done, total: trained.append(reported)))
    assert trained
    assert not any(reported.startswith(f"seed {SEEDS[0]}") for reported in trained)
    made, there = io.building / f"outputs/studies/runs/{name}", toy_lab / f"outputs/studies/runs/{name}"
    assert _weights(made) == _weights(there)
    assert len(io.costs["training"]) == len(SEEDS)


@pytest.mark.slow
def test_seeds_that_train_side_by_side_give_what_they_give_in_turn(toy_lab: Path, tmp_path: Path) -> None:
    io = training_io(toy_lab, "mima_4", tmp_path, workers=2)
    runs.run(io)
    made, there = (root / "outputs/studies/runs/mima_4" for root in (io.building, toy_lab))
    assert _weights(made) == _weights(there)
    assert len(io.costs["training"]) == len(io.costs["rounds"]) == len(SEEDS)


def test_work_in_other_processes_ends_with_a_failure() -> None:
    """Ctrl-C would otherwise wait for seeds that train for an hour."""

    def interrupted() -> None:
        with worker_pool(2) as pool:
            sleeping = [pool.submit(time.sleep, 3600) for _ in range(2)]
            while not all(future.running() for future in sleeping):
                time.sleep(0.1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not multiprocessing.active_children()


def _weights(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): fingerprint(read_state(file)) for file in folder.rglob("*.safetensors")}


def test_a_run_that_the_disk_cannot_take_is_refused_before_it_trains(
    toy_lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three experts, four merges and the start of each of two seeds: 16 models, and 6 of the round before."""
    model = (toy_lab / "outputs/base/model.safetensors").stat().st_size
    free = 22 * model
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    runs._check_space(io := training_io(toy_lab, "mima_4", tmp_path), runs._requested(io))
    free -= 1
    with pytest.raises(MergeflowError, match=r"the run mima_4 needs about .* for 8 models .* seeds, tasks or rounds"):
        runs.run(training_io(toy_lab, "mima_4", tmp_path))
