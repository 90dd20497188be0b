"""The training loop: against plain torch, deterministic, useful, resumable to the bit, with dropout in threads."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.modules import own_generator
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, fine_tune, learning_rate_factor
from mergeflow.training.arithmetic import forward_in
from mergeflow.training.loop import Span
from tests.training.toy import Fixed, Tiny, data, logits, order, plain, plain_loss, train, weights

SETTINGS = FineTuneSettings(steps=12, batch_size=4, learning_rate=1e-2, warmup=0.25, save_every=5)


class Killed(Exception):
    pass


def kill_at(stop: int):
    def kill(done: int, total: int) -> None:
        if done == stop:
            raise Killed

    return kill


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_reference_plain_torch(tmp_path: Path, optimiser: str, schedule: str) -> None:
    settings = FineTuneSettings(
        steps=7, batch_size=8, learning_rate=1e-2, warmup=2 / 7, gradient_clip=0.0, optimiser=optimiser,
        momentum=0.9, schedule=schedule,
    )  # fmt: skip
    encoder, trajectory = train(tmp_path, settings)

    def rate(step: int) -> float:
        share = step / 7
        if share < 2 / 7:
            return 1e-2 * share / (2 / 7)
        return 1e-2 if schedule == "constant" else 1e-2 * 0.5 * (1 + math.cos(math.pi * (share - 2 / 7) / (5 / 7)))

    def make(parameters):
        if optimiser == "sgd":
            return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    toy = data()
    steps = [[(toy, order(18, step // 3)[step % 3 * 8 : step % 3 * 8 + 8], 1.0)] for step in range(7)]
    torch.testing.assert_close(weights(encoder), weights(plain(steps, make, rate)), rtol=1e-5, atol=1e-6)
    assert [row.steps for row in trajectory.rows] == [3, 6, 7]


def test_gradients_are_clipped_as_one(tmp_path: Path) -> None:
    settings = FineTuneSettings(
        steps=1, batch_size=18, optimiser="sgd", learning_rate=1.0, warmup=0.0, weight_decay=0.0, gradient_clip=1e-3
    )
    encoder, trajectory = train(tmp_path, settings)
    assert trajectory.rows[0].gradient_norm > 0.1
    assert torch.linalg.vector_norm(weights(encoder) - weights(Tiny())) == pytest.approx(1e-3, rel=1e-3)


def test_purpose_it_learns(tmp_path: Path) -> None:
    encoder, trajectory = train(tmp_path, FineTuneSettings(steps=100, batch_size=6, learning_rate=1e-2))
    whole = data()
    assert (logits(encoder(whole.inputs)).argmax(1) == whole.labels).float().mean() == 1.0
    assert trajectory.rows[-1].loss < trajectory.rows[0].loss / 2
    assert trajectory.rows[-1].distance > 0


def test_accumulation_is_the_whole_batch_but_for_rounding(tmp_path: Path) -> None:
    common = {"steps": 6, "batch_size": 7, "learning_rate": 1e-2, "gradient_clip": 0.0}
    whole, rows = train(tmp_path / "1", FineTuneSettings(**common), dtype=torch.float64)
    for pieces in (2, 3, 7, 20):
        settings = FineTuneSettings(**common, accumulate=pieces)
        split, others = train(tmp_path / str(pieces), settings, dtype=torch.float64)
        torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-14)
        assert others.rows[-1].loss == pytest.approx(rows.rows[-1].loss, rel=1e-12)


def test_bfloat16_is_near_and_leaves_weights_in_float32(tmp_path: Path) -> None:
    common = {"steps": 30, "batch_size": 6, "learning_rate": 1e-2}
    exact, rows = train(tmp_path / "32", FineTuneSettings(**common))
    rough, others = train(tmp_path / "16", FineTuneSettings(**common, precision="bfloat16"))
    assert {p.dtype for p in rough.parameters()} == {torch.float32}
    assert not torch.equal(weights(rough), weights(exact))
    assert others.rows[-1].loss == pytest.approx(rows.rows[-1].loss, abs=0.02)


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_on_a_processor_without_it_is_warned_of(
    tmp_path: Path, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(tmp_path, FineTuneSettings(steps=1, precision="bfloat16"))
        forward_in("bfloat16", torch.device("cpu"))
    expected = [] if supported else [True, True]
    assert ["no instructions for bfloat16" in str(warning.message) for warning in caught] == expected


def test_the_head_stays_in_float32_under_bfloat16(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def head(features: Tensor) -> Tensor:
        answer = features @ torch.ones(5, 3)
        seen.append(answer.dtype)
        return answer

    task = replace(data(), head=Fixed(head))
    train(tmp_path, FineTuneSettings(steps=1, precision="bfloat16"), [task])
    assert seen == [torch.float32]


@pytest.mark.parametrize("choice", ["frozen", "updated"])
def test_batch_norm_keeps_the_bases_statistics_unless_they_are_updated(tmp_path: Path, choice: str) -> None:
    """Frozen ones normalise too: the first step's loss is that of the base as it is judged."""
    base = nn.Sequential(Tiny(), nn.BatchNorm1d(5))
    base[1].running_mean.fill_(0.5)
    net, settings = deepcopy(base), SETTINGS.model_copy(update={"batch_norm": choice})
    outcome = fine_tune(Network(net), [data()], settings, 0, tmp_path / "state", lambda: 0.5, span=Span(0, 1, 0, 12))
    assert all(
        torch.equal(net[1].get_buffer(name), base[1].get_buffer(name)) == (choice == "frozen")
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    expected = float(plain_loss(base.train(choice == "updated"), data(), order(18, 0)[:4]).detach())
    assert outcome.trajectory.rows[0].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 10, 11])
@pytest.mark.parametrize("dropout", [False, True])
def test_interrupted_and_resumed_gives_the_same_bits(tmp_path: Path, stop: int, dropout: bool) -> None:
    def run(folder: Path, **extra):
        folder.mkdir(exist_ok=True)
        encoder = nn.Sequential(Tiny(), nn.Dropout(0.3)) if dropout else Tiny()
        return encoder, fine_tune(Network(encoder), [data()], SETTINGS, 0, folder / "saved.pt", lambda: 0.5, **extra)

    whole, second = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", report=kill_at(stop))
    torch.rand(7)  # whatever else the process draws
    resumed, again = run(tmp_path / "killed")
    assert torch.equal(weights(whole), weights(resumed))
    assert second.trajectory.rows == again.trajectory.rows
    assert (second.cost.steps, second.cost.examples) == (again.cost.steps, again.cost.examples)


def test_torchs_own_random_numbers_are_left_alone(tmp_path: Path) -> None:
    encoder = Tiny()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fine_tune(Network(encoder), [data()], SETTINGS, 0, tmp_path / "saved.pt", lambda: 0.5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_state_is_an_error_with_its_name(tmp_path: Path, damage: str) -> None:
    with pytest.raises(Killed):
        train(tmp_path, SETTINGS, report=kill_at(6))
    path = tmp_path / "saved.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:-100], "flipped": content, "empty": b"", "foreign": b"x" * 999}[damage])
    with pytest.raises(MergeflowError, match=r"saved.pt cannot be read .* Delete it"):
        train(tmp_path, SETTINGS)


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, SETTINGS, report=kill_at(6))
    for change in ({"seed": 1}, {"tasks": [data(20)]}, {"settings": SETTINGS.model_copy(update={"steps": 13})}):
        arguments = {"settings": SETTINGS, **change}
        with pytest.raises(MergeflowError, match=r"is that of another run; (seed|examples|settings, steps) diff"):
            train(tmp_path, **arguments)


def test_a_diverging_run_names_task_and_step(tmp_path: Path) -> None:
    settings = FineTuneSettings(steps=50, batch_size=4, learning_rate=1e30, gradient_clip=0.0, warmup=0.0)
    with pytest.raises(MergeflowError, match=r"task 'toy': the .* became (inf|nan) at step \d+ of 50"):
        train(tmp_path, settings)


def test_weights_that_overflow_in_the_last_step_are_no_expert(tmp_path: Path) -> None:
    plainly = {"gradient_clip": 0.0, "warmup": 0.0, "weight_decay": 0.0}
    settings = FineTuneSettings(steps=1, optimiser="sgd", learning_rate=3e38, **plainly)
    steep = replace(data(), head=Fixed(lambda features: 1000 * logits(features)))
    with pytest.raises(MergeflowError, match="2-norm of the weights became inf at step 1 of 1"):
        train(tmp_path, settings, [steep])


def test_a_full_device_is_told_with_the_setting_that_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(nn.functional, "cross_entropy", full)
    monkeypatch.setattr("mergeflow.modalities.classification.cross_entropy", full)
    with pytest.raises(MergeflowError, match=r"has too little memory .* Set finetune\.accumulate above 2"):
        train(tmp_path, SETTINGS.model_copy(update={"accumulate": 2}))


def test_a_joint_run_names_the_task_that_diverged_or_is_empty(tmp_path: Path) -> None:
    bad, joint = replace(data(), task="bad", head=Fixed(lambda features: features * float("nan"))), "joint"
    with pytest.raises(MergeflowError, match="task 'bad': the loss became nan at step 1"):
        train(tmp_path, FineTuneSettings(regime=joint, steps=2), [data(), bad])
    with pytest.raises(MergeflowError, match="task 'toy' has no training examples"):
        train(tmp_path, FineTuneSettings(regime=joint, steps=2), [bad, data(0)])


@given(st.floats(0, 0.999), st.floats(0, 0.9), st.sampled_from(["cosine", "constant"]))
def test_learning_rate_stays_within_its_peak(progress: float, warmup: float, schedule: str) -> None:
    settings = FineTuneSettings(warmup=warmup, schedule=schedule)  # type: ignore[arg-type]
    assert 0.0 <= learning_rate_factor(settings, progress) <= 1.0


def trained(folder: Path, task: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    with own_generator(0):  # torch's layers draw their first weights from the generator that dropout draws from
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    net.load_state_dict(
        {name: torch.randn(value.shape, generator=generator) for name, value in net.state_dict().items()}
    )
    inputs = torch.randn(64, 6, generator=generator)
    data = Classification(task, inputs, (inputs[:, 0] > 0).long())
    settings = FineTuneSettings(steps=60, batch_size=8, learning_rate=0.01, save_every=20)
    fine_tune(Network(net), [data], settings, seed, folder / f"{task}.pt", lambda: 0.0)
    return torch.cat([value.flatten() for value in net.state_dict().values()])


def test_threads_do_not_draw_from_each_other(tmp_path: Path) -> None:
    alone = [trained(tmp_path, f"alone{seed}", seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: trained(tmp_path, f"beside{seed}", seed), range(4)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert not torch.equal(alone[0], alone[1])


def test_who_draws_nothing_leaves_the_generator_to_those_who_draw() -> None:
    inside, drawn = Event(), Event()

    def train_without_dropout() -> None:  # a stage in another thread
        with own_generator(5, torch.device("cpu"), alone=False):
            inside.set()
            drawn.wait(10)

    with own_generator(3):
        alone = torch.rand(4)
    with own_generator(3), ThreadPoolExecutor(1) as pool:
        first = torch.rand(2)
        other = pool.submit(train_without_dropout)
        assert inside.wait(10)
        then = torch.rand(2)
        drawn.set()
        other.result()
    assert torch.equal(torch.cat([first, then]), alone)
