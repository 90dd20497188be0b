"""What every method of the catalog keeps, whatever it does."""

import json
from pathlib import Path

import pytest
import torch

from mergeflow.checkpoints import fingerprint, write_checkpoint
from mergeflow.merging import configure, make_recipe, merge, methods, prepare
from tests.merging.helpers import EDGE, awkward, fitting, statistics

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
CASES = [(name, args) for name in methods() for args in [{}, *EDGE[name]]]
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def test_every_method_has_a_row_of_edge_arguments():
    assert set(EDGE) == set(methods())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "args"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else value
)
def test_contract(name, args, dtype):
    base, experts = awkward(dtype)
    experts = fitting(name, experts)
    data = statistics(base, experts)
    before = fingerprint(base), [fingerprint(state) for state in experts.values()]
    call = configure(name, args)
    found = prepare(call, base, experts, data=data)
    result = found.at(call.scale)

    # Names, shapes, types; integers from the base; nothing lost; tied tensors stay equal.
    assert {key: (value.shape, value.dtype) for key, value in result.items()} == {
        key: (value.shape, value.dtype) for key, value in base.items()
    }
    assert torch.equal(result["steps"], base["steps"])
    assert torch.equal(result["flag"], base["flag"])
    assert all(value.isfinite().all() for value in result.values())
    assert torch.equal(result["head"], result["embedding"])
    # Scale 0 gives the anchor bit for bit; where that is θ0, the base.
    start = found.at(0)
    assert all(torch.equal(start[key], found.anchor[key].to(base[key].dtype)) for key in base)
    if call.method.anchor in ("θ0", "–"):
        assert fingerprint(start) == fingerprint(base)
    # Permuting the experts changes nothing, nor does the number of threads.
    turned = prepare(call, base, dict(reversed(experts.items())), data=data, workers=3)
    assert fingerprint(turned.at(call.scale)) == fingerprint(result)
    # The inputs are as they were, and the result is not their memory.
    for value in result.values():
        if value.is_floating_point():
            value.fill_(7)
    assert before == (fingerprint(base), [fingerprint(state) for state in experts.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", methods())
def test_streaming_equals_in_memory(name, dtype, tmp_path):
    base, experts = awkward(dtype)
    experts = fitting(name, experts)
    data = {kind: found for kind, found in statistics(base, experts).items() if kind in configure(name).method.data}
    paths = {key: str(tmp_path / f"{key}.safetensors") for key in experts}
    write_checkpoint(tmp_path / "base.safetensors", base)
    for key, state in experts.items():
        write_checkpoint(paths[key], state)
    places = {kind: {} for kind in data}
    for kind, by_expert in data.items():
        for key, state in by_expert.items():
            places[kind][key] = str(tmp_path / f"{kind}-{key}.safetensors")
            write_checkpoint(places[kind][key], state)
    recipe = {"method": name, "base": str(tmp_path / "base.safetensors"), "experts": paths, "data": places}
    one = merge(make_recipe({**recipe, "out": str(tmp_path / "out.safetensors")}))
    many = merge(make_recipe({**recipe, "out": str(tmp_path / "out"), "shard_size": 300}), workers=3, buffer=0)
    call = configure(name)
    assert one.fingerprint == many.fingerprint
    assert one.fingerprint == fingerprint(prepare(call, base, experts, data=data).at(call.scale))


@pytest.mark.parametrize("name", methods())
def test_golden(name):
    """Digests of one result each, rounded to 4 digits: a change of any formula shows here."""
    base, experts = awkward(torch.float64)
    experts = fitting(name, experts)
    call = configure(name)
    found = prepare(call, base, experts, data=statistics(base, experts)).at(1.0)
    norms = {key: float(f"{value.double().norm():.4g}") for key, value in sorted(found.items()) if value.numel()}
    assert norms == GOLDEN[name]
