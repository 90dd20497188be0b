"""The exact k-th value over a whole model, found by histograms, is the one a full sort finds: bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.checkpoints.header import dtype_of
from mergeflow.merging.catalog import configure
from mergeflow.merging.execution.engine import Engine
from mergeflow.merging.execution.reader import Stacks, model_of
from mergeflow.merging.method import Pass
from mergeflow.merging.thresholds import kth_largest_passes, kth_smallest, ordered_bits

# Ordinary, tiny (denormal), huge and repeated values, and both zeros.
VALUES = st.one_of(
    st.floats(-1e3, 1e3),
    st.floats(-1e-40, 1e-40),
    st.floats(-3e38, 3e38),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5]),
)


def selected(rows: list[list[float]], k: int, dtype: torch.dtype, magnitudes: bool) -> torch.Tensor:
    """The k-th largest of each expert over a model of two tensors, by the engine's passes."""
    half = len(rows[0]) // 2
    experts = {
        f"e{index}": {"a": torch.tensor(row[:half], dtype=dtype), "b": torch.tensor(row[half:], dtype=dtype)}
        for index, row in enumerate(rows)
    }
    base = {name: torch.zeros_like(value) for name, value in experts["e0"].items()}
    engine = Engine(configure("ties"), Stacks(base, experts, model_of(base, experts)), workers=1)
    passes: tuple[Pass, ...] = kth_largest_passes(
        lambda stack, args: stack.taus, lambda args, n: k, dtype_of(dtype), "kth", magnitudes
    )
    for step in passes:
        engine.first_pass(step)
    result: torch.Tensor = engine.model.results["kth"]
    return result


@settings(max_examples=60)
@given(
    rows=st.integers(2, 30).flatmap(
        lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=3)
    ),
    share=st.floats(0, 1),
    wide=st.booleans(),
    magnitudes=st.booleans(),
)
def test_like_a_full_sort(rows, share, wide, magnitudes):
    dtype = torch.float64 if wide else torch.float32
    k = max(1, round(share * len(rows[0])))
    values = torch.tensor(rows, dtype=dtype)
    values = values.abs() if magnitudes else values
    expected = values.sort(dim=1, descending=True).values[:, k - 1].double()
    assert torch.equal(selected(rows, k, dtype, magnitudes), expected)


def test_a_tiny_negative_whose_order_looks_like_a_signalling_nan():
    tiny = -1.1125369292536007e-308
    assert selected([[-1.0, tiny]], 1, torch.float64, False).tolist() == [tiny]


def test_rank_0_keeps_nothing():
    assert selected([[1.0, 2.0]], 0, torch.float32, True).tolist() == [float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ordered_bits_order_and_undo_themselves(dtype):
    values = torch.tensor([-float("inf"), -1e30, -1.0, -1e-42, 0.0, 1e-42, 1.0, 1e30, float("inf")], dtype=dtype)
    bits = ordered_bits(values)
    assert bool((bits.diff() > 0).all())
    assert torch.equal(ordered_bits(bits.view(dtype)).view(dtype), values)
    assert int(ordered_bits(torch.tensor([-0.0], dtype=dtype))) == int(ordered_bits(torch.tensor([0.0], dtype=dtype)))


@pytest.mark.parametrize("drawn", ["spread", "coarse", "mostly zero", "rising", "constant"])
def test_the_kth_smallest_of_many_values_is_that_of_all_of_them_in_order(drawn):
    values = torch.randn(40_001, generator=torch.Generator().manual_seed(0)).abs()
    values_of_row = {
        "spread": values,
        "coarse": values.bfloat16().float(),
        "mostly zero": values * (values > 1.5),
        "rising": values.sort().values,
        "constant": torch.ones(40_001),
    }[drawn]
    ordered = values_of_row.sort().values
    for k in (1, 2, 400, 20_000, 30_000, 34_000, 39_900, 40_001):
        assert kth_smallest(values_of_row, k) == ordered[k - 1]
