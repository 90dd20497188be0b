"""The thresholds and the majority that TIES finds in one reading are those of the full passes: bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergeflow.merging import prepare
from mergeflow.merging import thresholds as module
from mergeflow.merging.catalog import MethodCall, configure
from mergeflow.merging.execution import engine as engine_module
from mergeflow.merging.execution.engine import Engine
from mergeflow.merging.execution.reader import Stacks, model_of

State = dict[str, Tensor]


@contextmanager
def sampling(run: int = 4, most: int = 200, **limits: float) -> Iterator[None]:
    """Sample few short runs, so that small models have wide windows and misses."""
    with (
        patch.multiple(engine_module, RUN=run, _SAMPLE=most),
        patch.multiple(module, **{"_WINDOW": 4.0, **limits}),
    ):
        yield


def full(call: MethodCall) -> MethodCall:
    """The same method with the full passes alone."""
    passes = call.method.passes
    some = replace(call.method, passes=lambda args, dtype: tuple(step for step in passes(args, dtype) if step.unless))
    return replace(call, method=some)


def facts(call: MethodCall, base: State, experts: dict[str, State], **more: Any) -> tuple[list[float], float, set[str]]:
    engine = Engine(call, Stacks(base, experts, model_of(base, experts, **more)), workers=2)
    ran: list[str] = []
    real = engine.first_pass
    with patch.object(engine, "first_pass", lambda step: (ran.append(step.name), real(step))[1]):
        engine.first_passes()
    learned = engine.model.results
    return learned["threshold"].tolist(), learned["majority"], set(ran)


def drawn(seed: int, count: int, shapes: dict[str, tuple[int, ...]], kind: str) -> tuple[State, dict[str, State]]:
    generator = torch.Generator().manual_seed(seed)

    def values(shape: tuple[int, ...]) -> Tensor:
        draws = torch.randn(shape, generator=generator)
        if kind == "bfloat16":
            return draws.bfloat16()
        if kind == "equal":  # few values, of both signs, and many zeros
            return (draws * 1.5).round() / 4
        if kind == "rows":  # rows of very different size, and blocks without a change
            return (
                draws
                * torch.exp(3 * torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator))
                * (torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) > 0.4)
            )
        return draws.double() if kind == "float64" else draws

    base = {name: values(shape) for name, shape in shapes.items()}
    tuned = ({name: base[name] + values(shape) for name, shape in shapes.items()} for _ in range(count))
    return base, {f"e{index}": state for index, state in enumerate(tuned)}


SHAPES = {"a": (61, 40), "b": (7,), "c": (300,), "d": (13, 3, 5), "empty": (0, 3), "one": (1,)}


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    count=st.integers(1, 5),
    kind=st.sampled_from(["float32", "float64", "bfloat16", "equal", "rows"]),
    keep=st.one_of(st.sampled_from([0.0, 1.0, 0.2]), st.floats(0, 1)),
    most=st.sampled_from([0, 200, 4000, 10**9]),
    weighted=st.booleans(),
    deviations=st.sampled_from([0.5, 4.0]),
)
def test_like_the_full_passes(seed, count, kind, keep, most, weighted, deviations):
    base, experts = drawn(seed, count, SHAPES, kind)
    call = configure("ties", {"keep": keep})
    more = {"weights": {name: (-1.0) ** index * index / 3 for index, name in enumerate(experts)}} if weighted else {}
    thresholds, majority, _ = facts(full(call), base, experts, **more)
    with sampling(most=most, _WINDOW=deviations):
        assert facts(call, base, experts, **more)[:2] == (thresholds, majority)


@pytest.mark.parametrize("kind", ["float32", "float64", "rows", "bfloat16", "equal"])
def test_one_reading_is_enough(kind):
    base, experts = drawn(1, 4, {"a": (300, 400), "b": (50,)}, kind)
    with sampling(run=16, most=4 * 4 * 16 * 800):
        assert facts(configure("ties"), base, experts)[2] == {"threshold.sample", "threshold.window"}


def test_a_sample_that_misses_is_found_out():
    base, experts = drawn(2, 2, SHAPES, "rows")
    expected = facts(full(configure("ties")), base, experts)[:2]
    with sampling(run=64, most=4 * 2 * 64 * 5, _WINDOW=0.0):
        *learned, ran = facts(configure("ties"), base, experts)
    assert tuple(learned) == expected
    assert {"threshold.0", "threshold", "majority"} <= ran


def test_what_would_take_too_much_memory_is_read_again():
    base, experts = drawn(3, 4, {"a": (300, 400)}, "float32")
    expected = facts(full(configure("ties")), base, experts)[:2]
    with sampling(run=16, most=4 * 4 * 16 * 200, _KEPT=0):
        *learned, ran = facts(configure("ties"), base, experts)
    assert tuple(learned) == expected
    assert ran == {"threshold.sample", "threshold.window", "majority"}
    with sampling(run=16, most=4 * 4 * 16 * 200), patch.multiple(module, _DISTINCT=10, _PENDING=10):
        *learned, ran = facts(configure("ties"), base, experts)
    assert tuple(learned) == expected
    assert ran >= {"threshold.0", "threshold", "majority"}


def test_the_merge_is_the_same_bits():
    """The base has zeros of both signs: where all is trimmed, the sign of a zero is the majority's."""
    for seed in range(4):
        base, experts = drawn(seed, 3, SHAPES, "equal")
        base["a"][::3] = -0.0
        expected = prepare(full(configure("ties")), base, experts)
        with sampling(most=2000):
            prepared = prepare(configure("ties"), base, experts)
        for name, value in expected.at(0.7).items():
            assert torch.equal(prepared.at(0.7)[name].view(torch.int32), value.view(torch.int32))


PIECES = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3e-40]), max_size=6), max_size=6)


@given(pieces=PIECES, split=st.integers(0, 6))
def test_tallies(pieces, split):
    with patch.object(module, "_PENDING", 4):
        first, other = module.Tally(), module.Tally()
        for index, piece in enumerate(pieces):
            (first if index < split else other).add(torch.tensor(piece).numpy())
        merged = first.merge(other)
    everything = torch.tensor([value for piece in pieces for value in piece]).sort(descending=True).values
    assert merged.total == len(everything)
    assert [merged.kth_largest(k + 1) for k in range(len(everything))] == everything.tolist()
