"""The algebra of factors against the matrices that they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.merging.adapters.configuration import adapter_config, alpha_of
from mergeflow.merging.adapters.factors import Factors, approximated, compressed, summed
from mergeflow.merging.adapters.slots import Slot, contents

sizes = st.integers(1, 12)
ranks = st.lists(st.tuples(st.integers(1, 6), st.floats(-3, 3), st.floats(0.01, 9)), min_size=1, max_size=4)


def made(rows, columns, rank, factor, generator):
    draw = {"generator": generator, "dtype": torch.float64}
    return Factors(torch.randn(rank, columns, **draw), torch.randn(rows, rank, **draw), factor)


@settings(max_examples=25)
@given(sizes, sizes, ranks, st.integers(1, 8), st.integers(0, 99))
def test_sums_are_exact_and_compression_is_the_best_of_its_rank(rows, columns, terms, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = [(weight, made(rows, columns, own_rank, factor, generator)) for own_rank, weight, factor in terms]
    total = summed(pairs)
    wanted = sum(weight * factors.product() for weight, factors in pairs)
    size = sum(abs(weight) * factors.norm() for weight, factors in pairs) + 1e-9
    assert float((total.product() - wanted).norm()) < 1e-12 * size
    assert total.norm() == pytest.approx(float(wanted.norm()), abs=1e-10 * size)
    small = compressed(total, rank)
    values = torch.linalg.svdvals(wanted)
    assert small.rank == min(rank, total.rank, rows, columns)
    assert float((wanted - small.product()).norm()) <= float(values[rank:].norm()) + 1e-9 * size


@given(st.integers(1, 64), st.floats(1e-3, 64))
def test_alpha_gives_the_scaling_back(rank, scaling):
    alpha = alpha_of(rank, scaling)
    assert alpha / rank == pytest.approx(scaling, rel=2.3e-16)


@pytest.mark.parametrize("reduce", [compressed, approximated])
def test_the_smallest_rank_within_an_error(reduce):
    values = torch.tensor([4.0, 2, 1, 0.5, 0.25], dtype=torch.float64)
    whole = Factors(torch.eye(5, 8, dtype=torch.float64), torch.eye(6, 5, dtype=torch.float64) * values)
    given = whole if reduce is compressed else whole.product()
    for rank in range(1, 5):
        error = float(values[rank:].norm() / values.norm())
        assert reduce(given, 5, error * 1.001).rank == rank
        assert reduce(given, 5, error * 0.999).rank == rank + 1
        assert reduce(given, 2, error * 0.999).rank == min(2, rank + 1)


def test_padding_changes_nothing():
    factors = Factors(torch.ones(2, 3), torch.ones(4, 2), 0.5)
    assert factors.padded(5).rank == 5
    assert torch.equal(factors.padded(5).product(), factors.product())
    assert factors.padded(1) is factors


def test_the_configuration_names_ends_only_where_all_modules_of_an_end_are_adapted():
    names = [f"m.layers.{block}.{kind}.weight" for block in range(2) for kind in ("q", "mlp.up", "out.dense")]
    names += ["m.layers.0.in.dense.weight", "m.seq.0.weight", "m.up.norm.weight"]
    slots = {name: Slot(name.removesuffix(".weight"), "linear", False) for name in names[:6]}
    slots["m.seq.0.weight"] = Slot("m.seq.0", "linear", False)
    sizes = {name: 2 if "layers.1.q" in name else 4 for name in slots}
    factors = {name: Factors(torch.zeros(rank, 3), torch.zeros(3, rank)) for name, rank in sizes.items()}
    shapes = dict.fromkeys(names, (3, 3))
    config = adapter_config(contents(factors, slots, shapes), {}, False, names, {}, "base", None, False)
    # `up` is also a module that holds others, `dense` is not adapted everywhere, and `0` is a number.
    assert config["target_modules"] == [
        "m.layers.0.mlp.up", "m.layers.0.out.dense", "m.layers.1.mlp.up", "m.layers.1.out.dense", "m.seq.0", "q",
    ]  # fmt: skip
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert config["rank_pattern"] == config["alpha_pattern"] == {r"m\.layers\.1\.q": 2}
    assert config["task_type"] is None
