"""Iterative merge-and-tune: MIMA and ATM as the papers write them, and every piece of work whole or absent."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, IterativeRun, Span, fine_tune
from tests.training.test_fine_tune import Killed, kill_at
from tests.training.toy import Fixed, Tiny, data

TASKS = [data(18, 0, "a"), data(10, 1, "b"), data(14, 2, "c")]


def make(folder: Path, steps: int = 12, settings: dict | None = None, seed: int = 0, **iterative) -> IterativeRun:
    base = folder / "base.safetensors"
    if not base.exists():
        folder.mkdir(exist_ok=True)
        write_checkpoint(base, Network(Tiny()).state())
    common = {"batch_size": 4, "learning_rate": 1e-2, "save_every": 2, **(settings or {})}
    chosen = FineTuneSettings(regime="iterative", steps=steps, iterative=iterative, **common)
    return IterativeRun(folder / "rounds", base, tuple(examples.task for examples in TASKS), chosen, seed)


def tune(run: IterativeRun, number: int, examples, **extra) -> None:
    run.tune(number, Network(Tiny()), examples, lambda: 0.5, **extra)


def complete(run: IterativeRun, order: int = 1) -> IterativeRun:
    """Do all rounds; keep every expert beside its round."""
    for number in range(1, run.rounds + 1):
        for examples in TASKS[::order]:
            tune(run, number, examples)
            path = run.expert(number, examples.task)
            (path.parent / "kept.safetensors").write_bytes(path.read_bytes())
        run.merge(number)
    return run


def flat(path: Path) -> torch.Tensor:
    return torch.cat([value.flatten().double() for _, value in sorted(load_file(path).items())])


def vectors(run: IterativeRun, number: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return θ̄(i−1), θ̄(i) and the experts θ_t(i)."""
    experts = [flat(run.expert(number, examples.task).parent / "kept.safetensors") for examples in TASKS]
    return flat(run.start(number)), flat(run.merged(number)), experts


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_average_is_mima(tmp_path: Path, rounds: int) -> None:
    """MIMA, equations 7 and 8: θ̄(i) = θ̄(i−1) + mean δ_t(i), so that θ̄(N) − θ0 is the sum of the mean increments."""
    run = complete(make(tmp_path, rounds=rounds))
    moved = torch.zeros_like(flat(run.base))
    for number in range(1, rounds + 1):
        start, merged, experts = vectors(run, number)
        torch.testing.assert_close(merged, torch.stack(experts).mean(0), rtol=1e-6, atol=1e-7)
        distance = run.record(number, "a")["epochs"][-1]["distance"]
        assert distance == pytest.approx(float((experts[0] - start).norm()), rel=1e-5)  # from the round's own start
        moved += torch.stack([expert - start for expert in experts]).mean(0)
    torch.testing.assert_close(flat(run.merged(rounds)) - flat(run.base), moved, rtol=1e-5, atol=1e-6)


def test_task_arithmetic_is_atm(tmp_path: Path) -> None:
    run = complete(make(tmp_path, rounds=3, merge="task_arithmetic", args={"scale": 0.25}, schedule="per_round"))
    for number in (1, 2, 3):
        start, merged, experts = vectors(run, number)
        expected = start + 0.25 * sum(expert - start for expert in experts)
        torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-7)


def test_one_round_is_ordinary_fine_tuning_to_the_bit(tmp_path: Path) -> None:
    run = complete(make(tmp_path, rounds=1))
    for examples in TASKS:
        plain, settings = Network(Tiny()), run.settings.model_copy(update={"regime": "steps"})
        tuned = fine_tune(plain, [examples], settings, 0, tmp_path / f"{examples.task}.pt", lambda: 0.5)
        torch.testing.assert_close(load_file(run.expert(1, examples.task)), plain.state(), rtol=0, atol=0)
        assert run.record(1, examples.task)["epochs"] == tuned.trajectory.as_json()


def test_one_task_with_a_kept_optimiser_is_ordinary_fine_tuning(tmp_path: Path) -> None:
    """With nothing to merge with, rounds of a schedule over the whole budget leave no trace."""
    whole = make(tmp_path, rounds=3, optimiser="kept")
    run = IterativeRun(tmp_path / "one", whole.base, ("a",), whole.settings, 0)
    for number in (1, 2, 3):
        tune(run, number, TASKS[0])
        run.merge(number)
    plain = Network(Tiny())
    fine_tune(plain, TASKS[:1], run.settings.model_copy(update={"regime": "steps"}), 0, tmp_path / "s.pt", lambda: 0)
    torch.testing.assert_close(load_file(run.merged(3)), plain.state(), rtol=1e-5, atol=1e-6)


def test_optimiser_kept_or_reset_and_the_schedules_differ(tmp_path: Path) -> None:
    choices = ({}, {"optimiser": "kept"}, {"schedule": "per_round"})
    results = [flat(complete(make(tmp_path / str(changes), rounds=3, **changes)).merged(3)) for changes in choices]
    for number, result in enumerate(results):
        assert all(not torch.equal(result, other) for other in results[number + 1 :])


def test_schedules(tmp_path: Path) -> None:
    whole, anew = make(tmp_path, rounds=3), make(tmp_path, rounds=3, schedule="per_round")
    assert [whole.span(i, 18) for i in (1, 2, 3)] == [Span(0, 4, 0, 12), Span(4, 8, 0, 12), Span(8, 12, 0, 12)]
    assert [anew.span(i, 18) for i in (1, 2, 3)] == [Span(0, 4, 0, 4), Span(4, 8, 4, 4), Span(8, 12, 8, 4)]
    spans = [anew.span(i, 18) for i in (1, 2)]
    shares = [[(step - s.origin) / s.length for step in range(s.first, s.last)] for s in spans]
    assert shares[0] == shares[1] == [0, 0.25, 0.5, 0.75]


def test_one_epoch_per_round_is_each_tasks_own(tmp_path: Path) -> None:
    run = complete(make(tmp_path, steps=1, rounds=2, per_round="one_epoch"))
    for examples in TASKS:
        steps = [row["steps"] for number in (1, 2) for row in run.record(number, examples.task)["epochs"]]
        per_epoch = -(-len(examples) // 4)
        assert steps == [per_epoch, 2 * per_epoch]
        assert run.record(2, examples.task)["cost"]["examples"] == len(examples)


def test_neither_order_nor_a_kill_changes_a_bit(tmp_path: Path) -> None:
    whole = complete(make(tmp_path / "whole", rounds=3, optimiser="kept"))
    other = make(tmp_path / "other", rounds=3, optimiser="kept")
    for number in (1, 2, 3):
        for examples in TASKS[::-1]:
            with pytest.raises(Killed):
                tune(other, number, examples, report=kill_at(3))
            assert examples.task in other.waiting(number)
            tune(other, number, examples)
        other.merge(number)
        other.merge(number)
    assert flat(whole.merged(3)).equal(flat(other.merged(3)))
    assert all(whole.record(n, t.task)["epochs"] == other.record(n, t.task)["epochs"] for n in (1, 2, 3) for t in TASKS)


def test_purpose_the_merge_learns_every_task(tmp_path: Path) -> None:
    run = complete(make(tmp_path, steps=60, rounds=6))
    encoder = Tiny()
    Network(encoder).load(load_file(run.merged(6)))
    for examples in TASKS:
        assert (examples.head(encoder(examples.inputs)).argmax(1) == examples.labels).float().mean() > 0.9


def test_deterministic_by_seed(tmp_path: Path) -> None:
    runs = [complete(make(tmp_path / name, rounds=2, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    merges = [flat(run.merged(2)) for run in runs]
    assert merges[0].equal(merges[1])
    assert not merges[0].equal(merges[2])


def test_only_the_last_rounds_experts_stay(tmp_path: Path) -> None:
    run = complete(make(tmp_path, rounds=3, optimiser="kept"))
    assert [run.expert(i, "a").exists() for i in (1, 2, 3)] == [False, False, True]
    assert [run.waiting(i) for i in (1, 2, 3)] == [[], [], []]
    assert not list(run.folder.rglob("state.pt"))


def test_a_diverging_task_names_its_round_and_the_others_stay(tmp_path: Path) -> None:
    run = make(tmp_path, rounds=2)
    bad = replace(TASKS[1], head=Fixed(lambda features: features * float("inf")))
    tune(run, 1, TASKS[0])
    with pytest.raises(MergeflowError, match=r"round 1 of 2: task 'b': the loss became nan at step 1"):
        tune(run, 1, bad)
    tune(run, 1, TASKS[2])
    assert run.waiting(1) == ["b"]


def test_another_runs_rounds_are_refused(tmp_path: Path) -> None:
    tune(make(tmp_path, rounds=2), 1, TASKS[0])
    for other in (make(tmp_path, rounds=3), make(tmp_path, rounds=2, seed=1), make(tmp_path, steps=14, rounds=2)):
        with pytest.raises(MergeflowError, match="are those of another run"):
            tune(other, 1, TASKS[0])


def test_a_merge_that_cannot_take_the_tasks_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=r"method 'slerp' merges 2 experts, found 3\."):
        make(tmp_path, rounds=2, merge="slerp")
