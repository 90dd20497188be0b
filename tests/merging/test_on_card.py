"""Every method, compressor and learner on a card gives what the processor gives, and brings it back.

On the card of `tests.card` the bits are the processor's, and what a method leaves on the processor is an error; on a
real one, where there is one, results agree within float tolerance. A new method is in the list as soon as it is in the
catalog.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mergeflow.checkpoints import fingerprint, open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import FactorCache, configure, merge, methods, prepare, thresholds
from mergeflow.merging.compression.compressor import compressors, configure_compressor
from mergeflow.merging.compression.suite_file import compress
from mergeflow.merging.learned import learn
from mergeflow.merging.linalg import spectra
from tests.card import cuda, on, on_cards
from tests.merging.helpers import EDGE, State, awkward, fitting, recipe, statistics

CASES = [(name, args) for name in methods() for args in [{}, *EDGE[name]]]
TOLERANCE = {torch.float64: {"rtol": 1e-7, "atol": 1e-9}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}


def agree(actual: State, expected: State, real: bool) -> None:
    if not real:
        assert {type(value) for value in actual.values()} == {torch.Tensor}
        assert fingerprint(actual) == fingerprint(expected)
    for name, value in expected.items() if real else ():
        assert actual[name].device.type == "cpu"
        torch.testing.assert_close(actual[name], value, **TOLERANCE.get(value.dtype, {}))


@pytest.mark.slow
@on_cards
@pytest.mark.parametrize(
    ("name", "args"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else value
)
def test_every_method(name: str, args: dict[str, Any], real: bool) -> None:
    for dtype in TOLERANCE if real else [torch.float32]:
        base, experts = awkward(dtype)
        experts = fitting(name, experts)
        data, call = statistics(base, experts), configure(name, args)
        expected = prepare(call, base, experts, data=data, workers=1)
        with on(real):
            made = prepare(call, base, experts, data=data, device="cuda", workers=3 if real else 1)
        agree(made.at(call.scale), expected.at(call.scale), real)


@on_cards
@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "dare", "cart", "tsv"])
def test_streaming_into_files(name: str, files: Path, real: bool) -> None:
    expected = merge(recipe(files, method=name), out=files / "cpu.safetensors").path
    with on(real):
        path = merge(recipe(files, method=name, device="cuda:0"), out=files / "cuda.safetensors").path
    with open_checkpoint(expected) as left, open_checkpoint(path) as right:
        agree(dict(right), dict(left), real)


@on_cards
@pytest.mark.parametrize("name", compressors())
def test_compressors(name: str, real: bool) -> None:
    base, experts = awkward(torch.float64 if real else torch.float32)
    call = configure_compressor(name)
    expected = compress(call, base, experts).tensors
    with on(real):
        tensors = compress(call, base, experts, device="cuda").tensors
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        if "left" not in key and "right" not in key:  # a card has the full eigendecomposition, signs are free
            torch.testing.assert_close(tensors[key], value, **(TOLERANCE[torch.float64] if real else {}))


@on_cards
def test_a_cache_that_both_share(real: bool) -> None:
    base, experts = awkward(torch.float64 if real else torch.float32)
    cache, call = FactorCache(), configure("cart", {"rank_ratio": 0.5})
    expected = prepare(call, base, experts, cache=cache).at(1.0)
    with on(real):
        merged = prepare(call, base, experts, cache=cache, device="cuda").at(1.0)
    agree(merged, expected, real)


@on_cards
@pytest.mark.parametrize("coefficients_of", ["task_vectors", "cart"])
def test_learned_coefficients(coefficients_of: str, real: bool) -> None:
    base, experts = awkward(torch.float64 if real else torch.float32)

    def learned(device: str) -> Any:
        def loss(state: Any, step: int) -> Any:
            floats = {name: value.detach() for name, value in state.items() if value.is_floating_point()}
            assert {value.device.type for value in floats.values()} == {device}
            return sum(float(value.square().sum()) / 2 for value in floats.values()), floats

        call = configure("adamerging", {"steps": 5, "lr": 0.01, "granularity": "layer", "on": coefficients_of})
        return learn(call, base, experts, loss, device=device).coefficients

    expected = learned("cpu")
    with on(real):
        coefficients = learned("cuda")
    for name, values in expected.items():
        assert coefficients[name] == (pytest.approx(values, abs=1e-9) if real else values)


@cuda
def test_a_device_that_no_real_one_is(files: Path) -> None:
    with pytest.raises(MergeflowError, match="torch sees"):
        merge(recipe(files, device=f"cuda:{torch.cuda.device_count()}"))


def test_the_full_eigendecomposition_a_device_uses_agrees_with_the_partial_one(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(96, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    partial = [spectra.truncate(matrix, 4), (lambda u, s, v: (u * s) @ v.T)(*spectra.svd(matrix, 4))]
    monkeypatch.setattr(spectra, "WORTH", 0.0)
    whole = [spectra.truncate(matrix, 4), (lambda u, s, v: (u * s) @ v.T)(*spectra.svd(matrix, 4))]
    torch.testing.assert_close(whole, partial)


def test_the_filter_of_bits_a_device_uses_agrees_with_numpy_s() -> None:
    bits = thresholds.ordered_bits(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    prefix = int(bits[7]) >> 16
    expected = thresholds._within(bits, prefix, 16)
    assert len(expected)
    assert torch.equal(bits[(bits >> 16) == prefix], expected)
