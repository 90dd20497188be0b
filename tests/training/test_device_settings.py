"""What a device adds to training: batches ahead, numbers read later, switches, torch.compile that may fail."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from mergeflow.evaluation.accuracy import Judge, example_scores, losses
from mergeflow.modalities.causal.modality import Questions
from mergeflow.modalities.classification import Ahead, Classification, Regression, Subset, carry
from mergeflow.modalities.metrics import find_metric
from mergeflow.modality import Examples, Network
from mergeflow.training import FineTuneSettings, fine_tune
from mergeflow.training.arithmetic import arithmetic
from mergeflow.training.compiling import Forward
from tests import card as cards
from tests.card import OnCard, card
from tests.training.test_heads import data, network
from tests.training.toy import Tiny, train, weights

SETTINGS = FineTuneSettings(steps=6, batch_size=4, learning_rate=1e-2, save_every=2)


def test_what_is_asked_for_ahead_is_gathered_once_and_what_is_not_is_gathered_too() -> None:
    gathered: list[int] = []

    def gather(rows: Tensor) -> tuple[Tensor, ...]:
        gathered.append(int(rows[0]))
        return (rows * 10,)

    ahead, batches = Ahead(gather), [torch.tensor([number]) for number in range(4)]
    for rows, coming in pairwise(batches):
        ahead.expect(coming)
        assert ahead.take(rows)[0].tolist() == [int(rows[0]) * 10]
    assert ahead.take(batches[3])[0].tolist() == [30]
    assert sorted(gathered) == [0, 1, 2, 3]
    assert ahead.take(batches[0])[0].tolist() == [0]  # long forgotten, or another task's: never somebody else's rows


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Which rows are asked for and taken, in order."""
    noted: list[tuple[str, list[int]]] = []
    expect, take = Ahead.expect, Ahead.take
    monkeypatch.setattr(Ahead, "expect", lambda self, rows: noted.append(("ask", rows.tolist())) or expect(self, rows))
    monkeypatch.setattr(Ahead, "take", lambda self, rows: noted.append(("take", rows.tolist())) or take(self, rows))
    return noted


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each tensor that goes to the card is pinned."""
    noted: list[bool] = []
    monkeypatch.setattr(
        "mergeflow.modalities.classification.carry",
        lambda batch, device: noted.append(batch.is_pinned()) or carry(batch, device),
    )
    return noted


def on_device() -> tuple[Network, Classification]:
    """A model and examples whose inputs are on the processor."""
    model, examples = network(), data()
    model.module.to("cuda")
    assert examples.head is not None
    return model, replace(examples, labels=examples.labels.to("cuda"), head=examples.head.to("cuda"))


def test_batches_come_through_pinned_memory_one_ahead(events: list[tuple[str, list[int]]], pinned: list[bool]) -> None:
    """The order of events: a batch is asked for before the one before it is taken; bits as on the processor."""
    expected = example_scores(network(), data(), 4)
    with card():
        assert example_scores(*on_device(), 4).tolist() == expected.tolist()
    assert pinned == [True] * 6  # inputs and row numbers of three batches
    first, second, last = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    assert events == [("ask", second), ("take", first), ("ask", last), ("take", second), ("take", last)]


def as_subset(examples: Classification) -> Subset:
    return Subset(examples, torch.arange(10))


def as_numbers(examples: Classification) -> Regression:
    labels, metric = examples.labels.float(), find_metric("pearson")
    return Regression(examples.task, examples.inputs, labels, examples.head, metric=metric)


@pytest.mark.parametrize("made", [lambda examples: examples, as_subset, as_numbers])
@pytest.mark.parametrize(("memory", "carried"), [(80 * 2**30, [6, 9, 12]), (10, [6, 12, 18])])
def test_inputs_that_are_judged_again_stay_on_a_card_with_room(
    made: Callable[[Classification], Examples], memory: int, carried: list[int], pinned: list[bool]
) -> None:
    """From the second pass on three batches take the numbers of their rows alone."""
    expected = example_scores(network(), made(data()), 4)
    with card(memory=memory):
        model, examples = on_device()
        judge, there = Judge(model, 4), made(examples)
        for count in carried:
            assert judge.scores(there).tolist() == expected.tolist()
            assert pinned == [True] * count
        assert judge.losses({"a": there}) == losses(network(), {"a": made(data())}, 4)


def as_questions(examples: Classification) -> Questions:
    """Ten questions of one token, each with two choices of one."""
    ids = np.array([[number % 5, 1, 2] for number in range(10)], np.int32)
    ends = np.tile(np.array([1, 2, 3], np.int32), (10, 1))
    return Questions("exam", ids, ends, torch.arange(10) % 2, 0, examples.labels.device)


@pytest.mark.parametrize("made", [lambda examples: examples, as_numbers, as_questions])
def test_a_card_waits_for_one_batch(
    made: Callable[[Classification], Examples], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number comes from the card, and no row number goes there, before the last batch is handed over."""
    waits, run = list[str](), cards._run

    def noting(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = run(func, args, kwargs)
        parts = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        indexed = func in cards.INDEXED and any(not isinstance(part, OnCard) for part in parts)
        read = not isinstance(result, OnCard | list | tuple)
        if any(isinstance(part, OnCard) for part in parts) and (indexed or read):
            waits.append(str(func))
        return result

    with card():
        model, examples = on_device()
        if made is as_questions:
            model = Network(nn.Embedding(5, 5).to("cuda"))
        monkeypatch.setattr(cards, "_run", noting)
        counts = []
        for size in (10, 2):
            waits.clear()
            example_scores(model, made(examples), size)
            if made is not as_questions:
                losses(model, {"a": made(examples)}, size)
            counts.append(sorted(waits))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("memory", [80 * 2**30, 10])
def test_a_judge_holds_no_examples_that_nothing_else_uses(memory: int) -> None:
    """Neither those that were given nor a copy of their inputs on the card."""
    with card(memory=memory), cards.counted() as tally:
        model, examples = on_device()
        judge, held, given = Judge(model, 4), list[int](), list[weakref.ref[Subset]]()
        for _ in range(3):
            subset = as_subset(examples)
            given.append(weakref.ref(subset))
            for _ in range(2):
                judge.scores(subset)
            held.append(tally.held)
        assert held[0] == held[1] == held[2]
        assert [there() is None for there in given] == [True, True, False]


def test_training_asks_for_a_batch_before_it_takes_one(tmp_path: Path, events: list[tuple[str, list[int]]]) -> None:
    with card():
        model, examples = on_device()
        settings = SETTINGS.model_copy(update={"steps": 3, "save_every": 3})
        fine_tune(model, [examples], settings, 0, tmp_path / "state", lambda: 0.5)
    assert [event for event, _ in events] == ["ask", "take", "ask", "take", "take"]


def test_on_the_processor_the_switches_change_no_bit_and_fused_the_last_ones_alone(tmp_path: Path) -> None:
    expected, tf32, exact, plain = (
        weights(train(tmp_path / str(changes), SETTINGS.model_copy(update=changes))[0])
        for changes in ({}, {"precision": "tf32"}, {"deterministic": True}, {"fused": False})
    )
    assert torch.equal(tf32, expected)
    assert torch.equal(exact, expected)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)


def switches() -> tuple[str, bool]:
    return torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled()


def test_the_switches_are_as_they_were_after_the_last_holder() -> None:
    before = switches()
    with arithmetic(tf32=True):
        assert switches() == ("tf32", False)
        with arithmetic(deterministic=True):
            assert switches() == ("ieee", True)
        assert switches() == ("tf32", False)
    assert switches() == before


@pytest.fixture
def others() -> Iterator[list[Thread]]:
    threads: list[Thread] = []
    yield threads
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_threads_share_switches_of_one_kind_and_wait_for_others(others: list[Thread]) -> None:
    together, done, seen = Barrier(2, timeout=10), Event(), list[tuple[str, bool]]()

    def same() -> None:
        with arithmetic(tf32=True):
            together.wait()  # both hold it at once

    def other() -> None:
        with arithmetic():
            seen.append(switches())
            done.set()

    others += [Thread(target=same), Thread(target=other)]
    with arithmetic(tf32=True):
        others[0].start()
        together.wait()
        others[1].start()
        assert not done.wait(0.1)
    assert done.wait(10)
    assert seen == [("ieee", False)]


def test_a_module_that_cannot_be_compiled_is_trained_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: object) -> object:
        def call(*args: object) -> object:
            from torch._dynamo.exc import TorchDynamoException

            raise TorchDynamoException("no compiler\nand a long trace")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    expected, rows = train(tmp_path / "plain", SETTINGS)
    failed = r"finetune.compile: torch.compile failed \(.*no compiler.*goes on without"
    with pytest.warns(UserWarning, match=failed) as warnings_given:
        encoder, others = train(tmp_path / "compiled", SETTINGS.model_copy(update={"compile": True}))
    assert len(warnings_given) == 1
    assert torch.equal(weights(encoder), weights(expected))
    assert rows.rows == others.rows


@pytest.mark.slow
def test_other_errors_of_a_compiled_module_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        Forward(Network(Tiny()), True).run(lambda model: 1 // 0)
