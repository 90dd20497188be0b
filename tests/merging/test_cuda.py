"""Every method on a CUDA device gives what it gives on the processor, within float tolerance.

Where there is no device these tests are skipped; the routes that only a device takes are run on the processor below.
"""

import json

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint
from mergeflow.merging import FactorCache, configure, merge, methods, prepare, thresholds
from mergeflow.merging.compression.compressor import compressors, configure_compressor
from mergeflow.merging.compression.suite_file import compress
from mergeflow.merging.learned.adamerging import learn
from mergeflow.merging.linalg import spectra
from tests.merging.helpers import EDGE, awkward, fitting, recipe, statistics

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CASES = [(name, args) for name in methods() for args in [{}, *EDGE[name]]]
TOLERANCE = {torch.float64: {"rtol": 1e-7, "atol": 1e-9}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}


def close(state, expected, dtype):
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(state[name], value, **TOLERANCE[dtype])
        else:
            assert torch.equal(state[name], value)


@cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "args"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else value
)
def test_every_method(name, args, dtype):
    base, experts = awkward(dtype)
    experts = fitting(name, experts)
    data = statistics(base, experts)
    call = configure(name, args)
    expected = prepare(call, base, experts, data=data).at(call.scale)
    prepared = prepare(call, base, experts, data=data, device="cuda", workers=3)
    assert all(value.device.type == "cpu" for value in prepared.direction.values())
    close(prepared.at(call.scale), expected, dtype)


@cuda
@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "dare", "cart", "tsv", "pcb"])
def test_streaming_into_files(name, files):
    expected = merge(recipe(files, method=name), out=files / "cpu.safetensors").path
    path = merge(recipe(files, method=name, device="cuda:0"), out=files / "cuda.safetensors").path
    with open_checkpoint(expected) as left, open_checkpoint(path) as right:
        close(dict(right), dict(left), torch.float32)


@cuda
@pytest.mark.parametrize("name", compressors())
def test_compressors(name):
    base, experts = awkward(torch.float64)
    call = configure_compressor(name)
    expected, on_cuda = (compress(call, base, experts, device=device).tensors for device in ("cpu", "cuda"))
    assert on_cuda.keys() == expected.keys()
    for key, value in expected.items():
        if "left" not in key and "right" not in key:  # factors are known up to their signs
            torch.testing.assert_close(on_cuda[key], value, rtol=1e-7, atol=1e-9)


@cuda
def test_a_cache_that_both_share():
    base, experts = awkward(torch.float64)
    cache, call = FactorCache(), configure("cart", {"rank_ratio": 0.5})
    first = prepare(call, base, experts, cache=cache).at(1.0)
    close(prepare(call, base, experts, cache=cache, device="cuda").at(1.0), first, torch.float64)


@cuda
def test_learned_coefficients():
    base, experts = awkward(torch.float64)

    def loss(state, step):
        gradients = {name: value.detach() for name, value in state.items() if value.is_floating_point()}
        return sum(float(value.square().sum()) / 2 for value in gradients.values()), gradients

    call = configure("adamerging", {"steps": 5, "lr": 0.01, "granularity": "layer"})
    expected, coefficients = (
        learn(call, base, experts, loss, device=device).coefficients for device in ("cpu", "cuda")
    )
    for name, values in expected.items():
        assert coefficients[name] == pytest.approx(values, abs=1e-9)


@cuda
def test_a_device_that_is_not_there(files):
    from mergeflow.errors import MergeflowError

    with pytest.raises(MergeflowError, match="torch sees"):
        merge(recipe(files, device=f"cuda:{torch.cuda.device_count()}"))


def test_the_full_eigendecomposition_a_device_uses_agrees_with_the_partial_one(monkeypatch):
    matrix = torch.randn(96, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    partial = [spectra.truncate(matrix, 4), (lambda u, s, v: (u * s) @ v.T)(*spectra.svd(matrix, 4))]
    monkeypatch.setattr(spectra, "WORTH", 0.0)
    whole = [spectra.truncate(matrix, 4), (lambda u, s, v: (u * s) @ v.T)(*spectra.svd(matrix, 4))]
    torch.testing.assert_close(whole, partial)


def test_the_filter_of_bits_a_device_uses_agrees_with_numpy_s():
    bits = thresholds.ordered_bits(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    prefix = int(bits[7]) >> 16
    expected = thresholds._within(bits, prefix, 16)
    assert len(expected)
    assert torch.equal(bits[(bits >> 16) == prefix], expected)
