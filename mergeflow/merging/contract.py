"""The contract that every merge method keeps; run it on a method of your own before you trust it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints import fingerprint, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.errors import MergeflowError
from mergeflow.merging.catalog import MethodCall, arguments_of, get
from mergeflow.merging.execution.direction import prepare
from mergeflow.merging.execution.engine import Engine, treats_elements_alone
from mergeflow.merging.execution.reader import Stacks, Unit, model_of
from mergeflow.merging.method import Args, Method, Parts, Stack
from mergeflow.plugins import last_place

State = dict[str, Tensor]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check(method: Method | str, args: Mapping[str, Any] | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Check that a method keeps the contract, on small models of awkward tensors.

    Every result has the base's names, shapes and types and is finite; integer tensors are the base's, tied tensors stay
    equal; scale 0 gives the anchor bit for bit; the order of the experts, the number of threads and whether tensors lie
    in memory or in files change no bit; inputs stay as they were; tensors declared element-wise come out the same in
    blocks.

    Example:
        >>> check("ties", {"keep": 0.5}, [torch.float32])
    """
    checked = get(method) if isinstance(method, str) else method
    if not (isinstance(checked.args, type) and issubclass(checked.args, Args)):
        raise MergeflowError(
            f"method '{checked.name}': {checked.args!r} is not a class of arguments: derive one from `Args`."
        )
    call = MethodCall(_explained(checked), arguments_of("method", checked.name, checked.args, args))
    try:
        faults = [f"{str(dtype).removeprefix('torch.')}: {fault}" for dtype in dtypes for fault in _faults(call, dtype)]
        faults += _block_faults(call)
    except _Misfit as misfit:  # nothing of the rest can be asked
        faults = [str(misfit)]
    if faults:
        raise MergeflowError("\n  - ".join([f"method '{call.name}' breaks the contract:", *dict.fromkeys(faults)]))


class _Misfit(Exception):
    """The method's function fails on a tensor, or its result cannot be used."""


def _explained(method: Method) -> Method:
    """Return the method with its own errors, and results that cannot be used, told with the tensor and the line."""

    @wraps(method.function)
    def function(stack: Stack, args: Args) -> Parts:
        where = f"tensor '{stack.name}' {list(stack.base.shape)} of {len(stack.taus)} experts"
        try:
            result = method.function(stack, args)
        except MergeflowError:
            raise
        except Exception as error:
            code = getattr(method.function, "__code__", None)  # a partial has none
            place = last_place(error, lambda frame: code is not None and frame.f_code.co_filename == code.co_filename)
            at = f", {place}" if place else ""
            raise _Misfit(f"it fails on {where}{at}: {type(error).__name__}: {error}") from error
        pair = result if isinstance(result, tuple) else (result,)
        if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            kinds = ", ".join(type(part).__name__ for part in pair)
            raise _Misfit(f"for {where} it returns {kinds}; expected two tensors, the anchor and the direction")
        for what, part in zip(("anchor", "direction"), pair, strict=True):
            if part.shape != stack.base.shape:
                raise _Misfit(f"for {where} it returns a {what} of the shape {list(part.shape)}")
        return result

    return replace(method, function=function)


def _faults(call: MethodCall, dtype: torch.dtype) -> Iterator[str]:
    base, experts = awkward(dtype)
    experts = dict(list(experts.items())[: call.method.experts[1]])
    data = _data(call.method, base, experts)
    before = [fingerprint(state) for state in (base, *experts.values())]
    prepared = prepare(call, base, experts, data=data)
    result, start = prepared.at(call.scale, checked=False), prepared.at(0)
    for name, tensor in base.items():
        made = result[name]
        if (made.shape, made.dtype) != (tensor.shape, tensor.dtype):
            yield f"tensor '{name}' is {made.dtype} {list(made.shape)}, not {tensor.dtype} {list(tensor.shape)}"
        elif not tensor.is_floating_point() and not torch.equal(made, tensor):
            yield f"the integer tensor '{name}' is not the base's"
        elif not bool(made.isfinite().all()):
            yield f"tensor '{name}' is not finite"
        if not torch.equal(start[name], prepared.anchor[name].to(tensor.dtype)):
            yield f"scale 0 does not give the anchor of tensor '{name}'"
    if not torch.equal(result["head"], result["embedding"]):
        yield "tied tensors differ"
    if call.method.anchor in ("θ0", "–") and fingerprint(start) != before[0]:
        yield f"the anchor is declared as {call.method.anchor}, but scale 0 does not give the base"
    whole = fingerprint(result)
    turned = prepare(call, base, dict(reversed(experts.items())), data=data, workers=3)
    if fingerprint(turned.at(call.scale, checked=False)) != whole:
        yield "the order of the experts, or the number of threads, changes the result"
    if _from_files(call, base, experts, data) != whole:
        yield "tensors read from files give another result than those in memory"
    for tensor in result.values():
        if tensor.is_floating_point():
            tensor.fill_(7)
    if before != [fingerprint(state) for state in (base, *experts.values())]:
        yield "the inputs were changed, or the result is their memory"


def _from_files(call: MethodCall, base: State, experts: Mapping[str, State], data: Mapping[str, Any]) -> str:
    with TemporaryDirectory(prefix="contract-") as folder:

        def stored(name: str, state: State) -> Any:
            write_checkpoint(Path(folder) / f"{name}.safetensors", state)
            return open_checkpoint(Path(folder) / f"{name}.safetensors")

        start, named = stored("base", base), {name: stored(name, state) for name, state in experts.items()}
        result = prepare(call, start, named, data=data, workers=2).at(call.scale, checked=False)
        for state in (start, *named.values()):
            state.close()
        return fingerprint(result)


def _block_faults(call: MethodCall) -> Iterator[str]:
    """What is declared element-wise may not depend on where a block ends; a tensor of more than a block shows it."""
    base, experts = awkward(torch.float32, long=BLOCK + 5)
    experts = dict(list(experts.items())[: call.method.experts[1]])
    model = model_of(base, experts, data=_data(call.method, base, experts))
    stacks, size = Stacks(base, experts, model), BLOCK + 5
    if not treats_elements_alone(call, model, "long"):
        return
    Engine(call, stacks).first_passes()

    def parts(start: int, stop: int) -> tuple[Tensor, ...]:
        stack = stacks.stack(Unit("long", start, stop, (stop - start,)))
        return tuple(part.clone().expand(stack.base.shape) for part in call.method(stack, call.arguments))

    whole, first, rest = parts(0, size), parts(0, BLOCK), parts(BLOCK, size)
    for what, joined, head, tail in zip(("anchor", "direction"), whole, first, rest, strict=True):
        if not torch.equal(joined, torch.cat([head, tail])):
            yield f"it is declared element-wise, but blocks of a tensor give another {what} than the whole"


def _data(method: Method, base: State, experts: Mapping[str, State]) -> dict[str, Any]:
    """Random statistics of data; those of unknown kinds are uniform on [0, 1) for every tensor."""
    given = statistics(base, experts)
    generator = torch.Generator().manual_seed(7)

    def drawn(shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> dict[str, State]:
        return {
            expert: {key: torch.rand(shape(tuple(value.shape)), generator=generator) for key, value in base.items()}
            for expert in experts
        }

    return {
        datum.name: given[datum.name] if datum.name in given else drawn(datum.shape)
        for datum in method.given
        if datum.needed
    }


def awkward(dtype: torch.dtype, experts: int = 3, seed: int = 0, long: int = 0) -> tuple[State, dict[str, State]]:
    """Return a base and experts with 0-d, empty, 5-element, integer, constant and tied tensors, matrices, `long`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "empty": (0, 4),
        "bias": (5,),
        "blocks.0.attn.in_proj_weight": (24, 8),
        "blocks.0.mlp.weight": (6, 10),
        "blocks.1.mlp.weight": (10, 6),
        "column.mlp": (7, 1),
        "conv": (4, 3, 2, 2),
        "still.attn": (5, 5),
        "embedding": (9, 4),
    }
    if long:
        shapes["long"] = (long,)
    base = {name: draw(*shape).to(dtype) for name, shape in shapes.items()}
    base["steps"] = torch.tensor(4)
    base["flag"] = torch.tensor(True)
    base["head"] = base["embedding"]

    def tuned() -> State:
        state = {name: (base[name].double() + 0.1 * draw(*shape)).to(dtype) for name, shape in shapes.items()}
        state["still.attn"] = base["still.attn"].clone()
        return {**state, "steps": base["steps"] + 1, "flag": ~base["flag"], "head": state["embedding"]}

    return base, {f"expert{index}": tuned() for index in range(experts)}


def statistics(base: State, experts: Mapping[str, State], seed: int = 5) -> dict[str, Any]:
    """Return random Fishers and Grams of the contract's base: kind → expert → tensor's name → statistic."""
    generator = torch.Generator().manual_seed(seed)
    fishers, grams = {}, {}
    for name in experts:
        drawn = {key: torch.rand(value.shape, generator=generator) for key, value in base.items()}
        fishers[name] = {**drawn, "head": drawn["embedding"]}
        inputs = torch.randn(30, 10, generator=generator)
        grams[name] = {"blocks.0.mlp.weight": inputs.T @ inputs}
    return {"fisher": fishers, "gram": grams}
