"""Every method, compressor and learner on the card of `tests.card` gives the processor's bits, and brings them back.

`test_cuda.py` asks the same of a real card, within float tolerance. What a method leaves on the processor is an error
here as there; a new method is in the list as soon as it is in the catalog.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mergeflow.checkpoints import fingerprint, open_checkpoint
from mergeflow.merging import FactorCache, configure, merge, methods, prepare
from mergeflow.merging.compression.compressor import compressors, configure_compressor
from mergeflow.merging.compression.suite_file import compress
from mergeflow.merging.learned.adamerging import learn
from tests.card import OnCard, card
from tests.merging.helpers import EDGE, awkward, fitting, recipe, statistics

CASES = [(name, args) for name in methods() for args in [{}, *EDGE[name]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else value
)
def test_every_method(name: str, args: dict[str, Any]) -> None:
    base, experts = awkward(torch.float32)
    experts = fitting(name, experts)
    data, call = statistics(base, experts), configure(name, args)
    expected = prepare(call, base, experts, data=data, workers=1)
    with card():
        on_card = prepare(call, base, experts, data=data, device="cuda", workers=1)
    for mine, theirs in ((on_card.anchor, expected.anchor), (on_card.direction, expected.direction)):
        assert not any(isinstance(value, OnCard) for value in mine.values())
        assert fingerprint(mine) == fingerprint(theirs)


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "cart"])
def test_streaming_into_files(name: str, files: Path) -> None:
    expected = merge(recipe(files, method=name), out=files / "cpu.safetensors").path
    with card():
        path = merge(recipe(files, method=name, device="cuda:0"), out=files / "cuda.safetensors").path
    with open_checkpoint(expected) as left, open_checkpoint(path) as right:
        assert fingerprint(dict(left)) == fingerprint(dict(right))


@pytest.mark.parametrize("name", compressors())
def test_compressors(name: str) -> None:
    base, experts = awkward(torch.float32)
    call = configure_compressor(name)
    expected = compress(call, base, experts).tensors
    with card():
        tensors = compress(call, base, experts, device="cuda").tensors
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        if "left" not in key and "right" not in key:  # a card has the full eigendecomposition, signs are free
            torch.testing.assert_close(tensors[key], value)


def test_a_cache_that_both_share() -> None:
    base, experts = awkward(torch.float32)
    cache, call = FactorCache(), configure("cart", {"rank_ratio": 0.5})
    expected = prepare(call, base, experts, cache=cache).at(1.0)
    with card():
        merged = prepare(call, base, experts, cache=cache, device="cuda").at(1.0)
    assert fingerprint(merged) == fingerprint(expected)


@pytest.mark.parametrize("on", ["task_vectors", "cart"])
def test_learned_coefficients(on: str) -> None:
    base, experts = awkward(torch.float32)

    def learned(device: str) -> Any:
        def loss(state: Any, step: int) -> Any:
            floats = {name: value for name, value in state.items() if value.is_floating_point()}
            assert {value.device.type for value in floats.values()} == {device}
            return sum(float(value.square().sum()) / 2 for value in floats.values()), floats

        call = configure("adamerging", {"steps": 3, "lr": 0.01, "granularity": "layer", "on": on})
        return learn(call, base, experts, loss, device=device).coefficients

    expected = learned("cpu")
    with card():
        assert learned("cuda") == expected
