"""What every method of the catalog keeps, whatever it does."""

import json

import pytest
import torch

from mergeflow.checkpoints import fingerprint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, make_recipe, merge, methods, prepare
from mergeflow.merging.contract import check
from mergeflow.merging.method import Args, method
from tests.merging.helpers import EDGE, awkward, fitting, statistics

CASES = [(name, args) for name in methods() for args in [{}, *EDGE[name]]]


def test_every_method_has_a_row_of_edge_arguments():
    assert set(EDGE) == set(methods())


@pytest.mark.parametrize(
    ("name", "args"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else value
)
def test_contract(name, args):
    check(name, args)


def broken(function, **declared):
    return method("broken", Args, **declared)(function)


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (broken(lambda stack, args: (stack.base, stack.taus[stack.model.experts.index(stack.model.listed[0])])),
         "the order of the experts"),
        (broken(lambda stack, args: (stack.base, stack.taus.sum(0) / 0)), "tensor 'bias' is not finite"),
        (broken(lambda stack, args: (stack.base + 1, stack.taus.sum(0))), "scale 0 does not give the base"),
        (broken(lambda stack, args: (stack.base, stack.taus.sum(0) / stack.taus.abs().sum().clamp(min=1e-9)),
                elementwise=True), "declared element-wise, but blocks of a tensor give another direction"),
        (broken(lambda stack, args: (stack.base, stack.tau.sum(0))),
         r"fails on tensor '[^']+' .* of 3 experts, line \d+ of test_contract.py: AttributeError: .*'tau'"),
        (broken(lambda stack, args: (stack.base, stack.take().sum(0) + stack.taus.sum(0))), "AttributeError: .*'taus'"),
        (broken(lambda stack, args: (stack.base, stack.taus.flatten(1).sum(1))), "a direction of the shape \\[3\\]"),
        (broken(lambda stack, args: (stack.base, stack.taus.sum(0).numpy())), "returns Tensor, ndarray; expected two"),
        (broken(lambda stack, args: stack.base), "returns Tensor; expected two tensors, the anchor and the direction"),
        (broken(lambda stack: (stack.base, stack.base)), "TypeError: .* takes 1 positional argument but 2 were given"),
    ],
    ids=["order", "finite", "anchor", "blocks", "error", "taken", "shape", "array", "one", "signature"],
)  # fmt: skip
def test_a_method_that_breaks_the_contract_is_told_how(faulty, message):
    with pytest.raises(MergeflowError, match=f"method 'broken' breaks the contract:(.|\n)*{message}"):
        check(faulty, dtypes=[torch.float32])


def test_arguments_that_are_not_a_class_are_told():
    with pytest.raises(MergeflowError, match="method 'broken': <class 'dict'> is not a class of arguments"):
        check(method("broken", dict)(lambda stack, args: (stack.base, stack.base)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", methods())
def test_streaming_equals_in_memory(name, dtype, tmp_path):
    base, experts = awkward(dtype)
    experts = fitting(name, experts)
    data = {
        kind: statistic for kind, statistic in statistics(base, experts).items() if kind in configure(name).method.data
    }
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
    single = merge(make_recipe({**recipe, "out": str(tmp_path / "out.safetensors")}))
    many = merge(make_recipe({**recipe, "out": str(tmp_path / "out"), "shard_size": 300}), workers=3, buffer=0)
    call = configure(name)
    assert single.fingerprint == many.fingerprint
    assert single.fingerprint == fingerprint(prepare(call, base, experts, data=data).at(call.scale))


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-22, 1e25])
@pytest.mark.parametrize("name", methods())
def test_squares_may_leave_the_range_of_the_type(name, size):
    zero, experts = awkward(torch.float32)
    experts = {key: {tensor: value * size if value.is_floating_point() else value for tensor, value in state.items()}
               for key, state in fitting(name, experts).items()}  # fmt: skip
    base = {tensor: value * 0 if value.is_floating_point() else value for tensor, value in zero.items()}
    for state in (base, *experts.values()):
        state["head"] = state["embedding"]
    call = configure(name)
    merged = prepare(call, base, experts, data=statistics(base, experts)).at(call.scale)
    most = {tensor: max(float(state[tensor].abs().amax()) for state in experts.values())
            for tensor, value in base.items() if value.is_floating_point() and value.numel()}  # fmt: skip
    for tensor, largest in most.items():
        assert merged[tensor].isfinite().all(), tensor
        assert float(merged[tensor].abs().amax()) <= 100 * largest + 1e-5, (
            tensor
        )  # a step of Adam has a length of its own
