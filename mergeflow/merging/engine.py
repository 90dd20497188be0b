"""The one engine behind every merge: runs a method's passes over all pieces of work, on worker threads.

In memory or streaming differ only in where tensors come from and go to, so they give the same bits. Every worker
computes with one thread, so the number of workers does not change a bit either.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from threading import local
from typing import Any

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.late import torch
from mergeflow.merging.catalog import Call
from mergeflow.merging.device import check_device, start_linear_algebra
from mergeflow.merging.linalg.lapack import one_thread
from mergeflow.merging.passes import Pass
from mergeflow.merging.stack import Model, Stack
from mergeflow.merging.stacks import Stacks, Unit
from mergeflow.merging.values import resolved

BUFFER = 256 * 2**20
_AHEAD = 64 * 2**20  # bytes that the disk is asked for before they are read
RUN = 512  # elements of one run of a sample
_SAMPLE = 64 * 2**20  # bytes of a sample at most
_SMALL = 2**21  # elements of a model that is read whole: 1024 runs of a sample take longer, 0.26 s
_GOLDEN = 0.6180339887498949

Sink = Callable[[Unit, Stack | None, Any], None]
"""Takes a unit, its stack and the method's result for it; or no stack and a piece of the base that is not merged."""


@dataclass
class Engine:
    """The scheduler of one merge.

    Attributes:
        call: The configured method or compressor.
        stacks: What it works on.
        workers: Threads; by default one per core.
        buffer: Bytes that may be in flight beyond the largest piece of work.
    """

    call: Call[Any]
    stacks: Stacks
    workers: int | None = None
    buffer: int = BUFFER

    def __post_init__(self) -> None:
        check_device(self.stacks.device)

    @property
    def model(self) -> Model:
        """What is known about the whole model."""
        return self.stacks.model

    def first_passes(self) -> None:
        """Find the facts about the whole model that the method needs."""
        for one in self.call.method.passes(self.call.arguments, self.model.dtype):
            if one.unless not in self.model.known:
                self.first_pass(one)

    def run(self, sink: Sink, names: Iterable[str] | None = None) -> None:
        """Hand the method's result for every unit of the named tensors (or all) to the sink, from worker threads."""
        infos = self.stacks.infos
        units = units_of(self.call, self.model, infos, infos if names is None else names)
        self._map(lambda unit: sink(unit, *self.result(unit)), units)

    def result(self, unit: Unit) -> tuple[Stack | None, Any]:
        """Return a unit's stack and the method's result for it; no stack and a piece of the base if it is not merged.

        The stack, and a result that is part of it, are valid until the thread's next unit.
        """
        if unit.name not in self.model.shapes:
            return None, self.stacks.copied(unit)
        stack, args = self.stacks.stack(unit, self.stacks.on_piece), self._arguments(unit.name)
        result = self.call.method(stack, args)
        if "scale" in getattr(args, "varied", ()):
            result = (result[0], result[1] * args.scale)
        return stack, result

    def first_pass(self, one: Pass) -> None:
        """Run one pass; each worker folds into an accumulator of its own."""
        args = self.call.arguments
        mine = local()
        totals: list[list[Any]] = []

        def work(unit: Unit) -> None:
            if not hasattr(mine, "box"):
                mine.box = [one.start(self.model, args)]
                totals.append(mine.box)
            mine.box[0] = one.observe(mine.box[0], self.stacks.stack(unit), self._arguments(unit.name))

        infos, model = self.stacks.infos, self.model
        names = [name for name in model.shapes if one.only is None or one.only(args, name, model)]
        self._map(work, sampled_units(model) if one.sampled else units_of(self.call, model, infos, names))
        total = one.start(self.model, args)
        for (part,) in totals:
            total = one.merge(total, part)
        self.model.known[one.name] = one.finish(total, self.model, args)

    def _arguments(self, name: str) -> Any:
        """Return the arguments for one tensor: those that vary over the model have its value."""
        args, model = self.call.arguments, self.model
        if not getattr(args, "varied", None):
            return args
        return resolved(args, model.tied.get(name, name), self.stacks.depth(name), model.experts)

    def coefficients(self, name: str) -> list[float]:
        """Return c_t of a linear method for one tensor, whose direction is Σ c_t τ_t: what it makes of unit vectors."""
        count, args = len(self.model.experts), self._arguments(name)
        units = torch.eye(count, dtype=torch.float64)
        own = self.model.tied.get(name, name)
        direction = self.call.method(Stack(own, units.new_zeros(count), units, 0, self.stacks.model_at(name)), args)[1]
        varied = args.scale if "scale" in getattr(args, "varied", ()) else 1.0
        return [float(one) * varied for one in direction]

    def _map(self, work: Callable[[Unit], None], pieces: Iterable[Unit]) -> None:
        """Run the work on all pieces with worker threads, never more in flight than memory allows."""
        workers = self.workers or default_workers()
        units = list(pieces)
        budget = max((unit_bytes(self.call, self.model, unit) for unit in units), default=0) + self.buffer
        # Element by element nothing calls SciPy's BLAS, so that it need not be loaded.
        whole = not all(treats_elements_alone(self.call, self.model, name) for name in self.model.shapes)
        flying: dict[Future[None], int] = {}
        start_linear_algebra(self.stacks.device)
        with one_thread() if whole else nullcontext(), single_threaded(workers) as pool:
            try:
                for unit in self._announced(units):
                    cost = unit_bytes(self.call, self.model, unit)
                    while flying and (len(flying) >= 4 * workers or sum(flying.values()) + cost > budget):
                        _collect(flying)
                    flying[pool.submit(work, unit)] = cost
                while flying:
                    _collect(flying)
            except BaseException:
                for future in flying:
                    future.cancel()
                raise

    def _announced(self, units: list[Unit]) -> Iterator[Unit]:
        """Yield the units; the disk is asked for those ahead, in this thread, which has nothing else to do.

        Workers that read block by block from nine files reach half of a disk's speed; the system reads ahead by 128 KB.
        """
        width = (len(self.stacks.experts) + 1) * self.model.dtype.itemsize
        later, distance = iter(units), 0
        for unit in units:
            while distance < _AHEAD and (coming := next(later, None)) is not None:
                self.stacks.read_ahead(coming)
                distance += (coming.stop - coming.start) * width
            yield unit
            distance -= (unit.stop - unit.start) * width


def units_of(call: Call[Any], model: Model, infos: Mapping[str, TensorInfo], names: Iterable[str]) -> Iterator[Unit]:
    """Yield the pieces of work for the named tensors, in order of name: whole tensors where the method needs them.

    Args:
        call: The configured method (or compressor).
        model: What is known of the model; tensors without a shape there are copied.
        infos: Shape and type of every tensor.
        names: The tensors to treat.
    """
    for name in sorted(names):
        info = infos[name]
        if name in model.shapes and not treats_elements_alone(call, model, name):
            yield Unit(name, 0, info.numel, info.shape)
            continue
        for start in range(0, max(info.numel, 1), BLOCK):
            stop = min(start + BLOCK, info.numel)
            yield Unit(name, start, stop, (stop - start,))


def sampled_units(model: Model) -> Iterator[Unit]:
    """Yield short runs of elements, spread evenly over the tensors that are merged; all of a small model, in blocks."""
    ends = list(accumulate(prod(shape) for shape in model.shapes.values()))
    names, total = list(model.shapes), ends[-1] if ends else 0
    most = _SAMPLE // (4 * RUN * max(len(model.experts), 1))
    count = max(min(max(total >> 16, 1024), most), 1)
    if total <= max(count * RUN, min(_SMALL, most * RUN)):
        for name in names:
            numel = prod(model.shapes[name])
            for start in range(0, numel, BLOCK):
                stop = min(start + BLOCK, numel)
                yield Unit(name, start, stop, (stop - start,))
        return
    for index in range(count):
        # Each run lies somewhere in its share of the model, so that no period of the rows can meet that of the runs.
        at = int((index + index * _GOLDEN % 1) * total / count)
        which = bisect_right(ends, at)
        numel = prod(model.shapes[names[which]])
        start = min(at - (ends[which] - numel), max(numel - RUN, 0))
        yield Unit(names[which], start, min(start + RUN, numel), (min(RUN, numel - start),))


def treats_elements_alone(call: Call[Any], model: Model, name: str) -> bool:
    """Whether a method treats the elements of a tensor alone, so that its blocks may be treated apart.

    Args:
        call: The configured method (or compressor).
        model: What is known of the model.
        name: The tensor; of tied ones the first of the group decides.
    """
    found: bool = call.method.elementwise(call.arguments, model.tied.get(name, name), model)
    return found


def unit_bytes(call: Call[Any], model: Model, unit: Unit) -> int:
    """Return the bytes that work on a unit holds at most.

    Args:
        call: The configured method (or compressor).
        model: What is known of the model.
        unit: A whole tensor: base, task vectors and the method's workspace; or a block of one, four times as much.
    """
    size, experts = (unit.stop - unit.start) * model.dtype.itemsize, len(model.experts)
    if unit.name not in model.shapes or treats_elements_alone(call, model, unit.name):
        return (4 * (experts + 1) + model.beside) * size
    own = model.tied.get(unit.name, unit.name)
    workspace: int = call.method.workspace(call.arguments, own, model)
    return (experts + 1 + model.beside) * size + workspace


def _collect(flying: dict[Future[None], int]) -> None:
    done, _ = wait(flying, return_when=FIRST_COMPLETED)
    for future in done:
        del flying[future]
        future.result()


def default_workers() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def single_threaded(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads compute with one thread each; the caller's own setting is as before afterwards."""
    before = torch.get_num_threads()

    def prepare() -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)

    with ThreadPoolExecutor(workers, thread_name_prefix="merge", initializer=prepare) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=True)
            # set_num_threads is per thread, but threads born later inherit the last value set anywhere.
            torch.set_num_threads(before)
