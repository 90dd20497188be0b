"""What methods hold beside their inputs is what they say, which the plan's peak of memory is made of."""

import tracemalloc
from math import prod

import pytest
import torch

from mergeflow.merging import configure, methods, prepare
from mergeflow.merging.execution import engine, reader
from mergeflow.merging.execution.engine import BUFFER, Engine, sampled_units, treats_elements_alone, unit_bytes
from mergeflow.merging.execution.reader import Stacks, Unit, model_of
from mergeflow.merging.linalg import spectra
from mergeflow.merging.methods import dropout, optimised, sparse, sphere, subspace, ties
from studies.theory.peak_memory import peak_tensor_bytes
from tests.merging.helpers import EDGE, fitting

TALL, WIDE, EMBEDDING = "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "token_embedding.weight"


@pytest.fixture(scope="module")
def models():
    """A base and three experts: a tall and a wide matrix, and a larger embedding."""
    generator = torch.Generator().manual_seed(0)
    shapes = {TALL: (384, 96), WIDE: (96, 384), EMBEDDING: (1500, 96)}
    base, *experts = (
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(4)
    )
    return base, dict(zip("abc", experts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 2.0)])
@pytest.mark.parametrize("name", methods())
def test_a_method_holds_no_more_than_it_says(name, weights, models, monkeypatch):
    """Bytes of tensors alive at once while a whole tensor is read and merged, without LAPACK's own."""
    for module in (sphere, ties, dropout, engine, reader):
        monkeypatch.setattr(module, "BLOCK", 512)  # buffers of their own, as tensors of a real size have
    monkeypatch.setattr(reader, "PIECE", 1)
    base, experts = models[0], fitting(name, models[1])
    for args in [{}, *EDGE[name]] if weights is None else [{}]:
        call = configure(name, {key: value for key, value in args.items() if key not in ("matrices", "split_qkv")})
        positive = {tensor: value.square() for tensor, value in base.items()}
        grams = {tensor: torch.eye(base[tensor].shape[1]) for tensor in (TALL, WIDE)}
        estimates = {"gram": dict.fromkeys(experts, grams), "fisher": dict.fromkeys(experts, positive)}
        data = {kind: estimates[kind] for kind in call.method.data}
        named = dict(zip(experts, weights or (), strict=False)) if call.method.weights != "none" else {}
        model = model_of(base, experts, named, data)
        whole = Engine(call, Stacks(base, experts, model), workers=1)
        whole.first_passes()
        for tensor, value in base.items():
            if treats_elements_alone(call, model, tensor):
                continue
            unit = Unit(tensor, 0, value.numel(), tuple(value.shape))
            held = peak_tensor_bytes(lambda whole=whole, unit=unit: whole.result(unit))
            assert held <= unit_bytes(call, model, unit) + 65536, (args, tensor)


@pytest.mark.parametrize(("workers", "dtype"), [(1, torch.float64), (3, torch.float32)], ids=str)
@pytest.mark.parametrize("name", ["slerp", "nuslerp", "multislerp", "karcher", "model_stock", "breadcrumbs"])
def test_a_large_tensor_is_read_again_in_blocks_with_the_same_bits(name, workers, dtype, models, monkeypatch):
    base, experts = models[0], fitting(name, models[1])
    base = {tensor: value.to(dtype) for tensor, value in base.items()}
    monkeypatch.setattr(sphere, "BLOCK", 4096)
    whole = prepare(name, base, experts)
    for module in (sphere, sparse):
        monkeypatch.setattr(module, "LARGE", prod(base[TALL].shape))
    monkeypatch.setattr(engine, "BLOCK", 4096)
    monkeypatch.setattr(reader, "BLOCK", 4096)
    monkeypatch.setattr(reader, "PIECE", 2 * 4096 * 4 * 4)
    blocks = prepare(name, base, experts, workers=workers)
    assert treats_elements_alone(configure(name), model_of(base, experts), EMBEDDING)
    assert not treats_elements_alone(configure(name), model_of(base, experts), TALL)
    for tensor, direction in whole.direction.items():
        assert torch.equal(blocks.direction[tensor], direction)


# Copies of a matrix four times as long as wide (tall, wide), base and task vectors among them, beside (experts + 3) of
# them. Half a copy with `tsv` are the directions of the shorter side, in float64; with `wudi` of a wide matrix they are
# the shorter sides' Gram matrices of two experts, beside half of the curvature. `knots` needs as many directions as a
# tall matrix has rows, and they and the Gram matrix of those rows are eight copies each.
SPECTRAL = {
    "cart": (0.0, 0.0),
    "low_rank": (0.0, 0.0),
    "iso_c": (0.0, 0.0),
    "iso_cts": (0.0, 0.0),
    "tsv": (0.5, 0.5),
    "wudi": (-1.0, 0.9),
    "knots": (14.6, 0.1),
}


@pytest.mark.parametrize("wide", [False, True], ids=["tall", "wide"])
@pytest.mark.parametrize("weights", [(), (0.5, 1.0, 2.0, 1.0)], ids=["alike", "weighted"])
@pytest.mark.parametrize("name", SPECTRAL)
def test_a_spectral_method_holds_three_tensors_beside_those_of_its_experts(name, weights, wide, monkeypatch):
    """Bytes of tensors, LAPACK's work among them, from reading a matrix to its merged form; rows pass 32 at a time."""
    for module in (spectra, subspace, optimised):
        monkeypatch.setattr(module, "_ROWS", 32)
    monkeypatch.setattr(subspace, "_FEW", 8)
    monkeypatch.setattr(optimised, "_WIDTH", 32)
    monkeypatch.setattr(ties, "BLOCK", 4096)
    shape = (256, 1024) if wide else (1024, 256)
    generator = torch.Generator().manual_seed(0)
    base, *experts = ({WIDE: torch.randn(shape, generator=generator)} for _ in range(5))
    named = dict(zip("abcd", experts, strict=True))
    call = configure(name, {"steps": 1} if name == "wudi" else {})
    model = model_of(base, named, dict(zip("abcd", weights, strict=False)))
    whole = Engine(call, Stacks(base, named, model), workers=1)
    held = peak_tensor_bytes(lambda: whole.result(Unit(WIDE, 0, prod(shape), shape)))
    assert held <= (4 + 3 + SPECTRAL[name][wide] + 0.1) * 4 * prod(shape)


@pytest.mark.parametrize("shape", [(14336, 4096), (4096, 14336), (4096, 4096)], ids=str)
@pytest.mark.parametrize("name", [name for name in SPECTRAL if name != "knots"])
def test_at_the_widths_of_llama_3_spectral_methods_stay_within_three_tensors_and_the_buffer(name, shape):
    """What is foretold of three experts' largest matrices, which the test above and the first one count."""
    base, *experts = ({WIDE: torch.empty(1, dtype=torch.bfloat16).expand(shape)} for _ in range(4))
    call, model = configure(name), model_of(base, dict(zip("abc", experts, strict=True)))
    most = (3 + 3) * 4 * 14336 * 4096 + BUFFER
    assert unit_bytes(call, model, Unit(WIDE, 0, prod(shape), shape)) <= most


@pytest.mark.parametrize(("side", "units"), [(1000, 8), (2000, 1024)])
def test_a_small_model_is_sampled_whole_in_blocks(side, units):
    """A run of 512 elements costs 0.25 ms however small the model: 1024 of them were 2.6 times the rest of TIES."""
    model = model_of({"w": torch.zeros(1).expand(side, side)}, {"a": {"w": torch.zeros(1).expand(side, side)}})
    spans = list(sampled_units(model))
    assert len(spans) == units
    assert units == 1024 or sum(unit.stop - unit.start for unit in spans) == side * side


@pytest.mark.slow
def test_what_the_sample_of_ties_takes_is_foretold():
    """NumPy's arrays alone are counted: the runs of all experts side by side, and one expert's in order."""
    base, *experts = ({"w": torch.randn(3000, 1000, generator=torch.Generator().manual_seed(n))} for n in range(5))
    named = dict(zip("abcd", experts, strict=True))
    call, model = configure("ties"), model_of(base, named)
    sample = call.method.passes(call.arguments, model.dtype)[0]
    read = sum(unit.stop - unit.start for unit in sampled_units(model))
    tracemalloc.start()
    Engine(call, Stacks(base, named, model), workers=1).first_passes()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.4 <= peak / sample.held(model, read, 1) <= 1
