"""The one engine behind every merge: runs a method's passes over all pieces of work, on worker threads.

In memory or streaming differ only in where tensors come from and go to, so they give the same bits. Every worker
computes with one thread, so the number of workers does not change a bit either.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import lcm, prod
from threading import Event, Lock, local
from typing import Any

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.late import torch
from mergeflow.merging.catalog import Call
from mergeflow.merging.execution.device import check_device, start_linear_algebra
from mergeflow.merging.execution.reader import Stacks, Unit, piece_of
from mergeflow.merging.execution.schedule import Schedule, work_through
from mergeflow.merging.linalg.lapack import one_thread
from mergeflow.merging.stack import Model, Pass, Stack
from mergeflow.merging.values import resolved

BUFFER = 256 * 2**20
_AHEAD = 64 * 2**20  # bytes that the disk is asked for before they are read
RUN = 512  # elements of one run of a sample
_SAMPLE = 64 * 2**20  # bytes of a sample at most
_SMALL = 2**21  # elements of a model that is read whole: 1024 runs of a sample take longer, 0.26 s
_GOLDEN = 0.6180339887498949

Task = tuple[Unit, Callable[[Unit], None]]
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
        for step in self.call.method.passes(self.call.arguments, self.model.dtype):
            if not step.within and step.unless not in self.model.results:
                self.first_pass(step)

    def run(self, sink: Sink, names: Iterable[str] | None = None) -> None:
        """Hand the method's result for every unit of the named tensors (or all) to the sink, from worker threads."""
        self._map(self._tasks(sink, sorted(self.stacks.infos if names is None else names)))

    def _tasks(self, sink: Sink, names: Sequence[str]) -> Iterator[Task]:
        """Yield the tasks in order: each reading of a tensor comes after the one before of the next tensor.

        So nobody waits for the last piece of a reading, and the next one finds the data in memory.
        """

        def merge(facts: _Facts | None, unit: Unit) -> None:
            if facts is None or facts.complete():
                sink(unit, *self.result(unit))

        waiting: list[list[list[Task]]] = []
        for name in names:
            units = list(units_of(self.call, self.model, self.stacks.infos, [name]))
            readings, facts = list[list[Task]](), None
            for step in self._passes_within(name):
                facts = _Facts(self, name, step, len(units), facts)
                readings.append([(unit, facts.observe) for unit in units])
            waiting.append([*readings, [(unit, partial(merge, facts)) for unit in units]])
            for tensor in reversed(waiting):
                yield from tensor.pop(0)
            waiting = [tensor for tensor in waiting if tensor]
        for tensor in waiting:
            yield from (task for reading in tensor for task in reading)

    def _passes_within(self, name: str) -> list[Pass]:
        """Return the passes that find something of a tensor by itself, and have not yet."""
        args, model = self.call.arguments, self.model
        first = model.tied.get(name, name)
        return [
            step
            for step in self._within
            if name in model.shapes
            and first not in model.results.setdefault(step.name, {})
            and (step.only is None or step.only(args, first, model))
        ]

    @cached_property
    def _within(self) -> list[Pass]:
        # A compressor has none of them.
        return [step for step in self.call.method.passes(self.call.arguments, self.model.dtype) if step.within]

    def result(self, unit: Unit) -> tuple[Stack | None, Any]:
        """Return a unit's stack and the method's result for it; no stack and a piece of the base if it is not merged.

        The stack, and a result that is part of it, are valid until the thread's next unit.
        """
        if unit.name not in self.model.shapes:
            return None, self.stacks.copied(unit)
        for step in self._passes_within(unit.name) if self._within else ():
            units = list(units_of(self.call, self.model, self.stacks.infos, [unit.name]))
            facts = _Facts(self, unit.name, step, len(units))
            for piece in units:
                facts.observe(piece)
        stack, args = self.stacks.stack(unit, self.stacks.on_piece), self.arguments(unit.name)
        if stack.copied:
            return None, self.stacks.copied(unit)
        result = self.call.method(stack, args)
        if "scale" in getattr(args, "varied", ()):
            result = (result[0], result[1] * args.scale)
        return stack, result

    def first_pass(self, step: Pass) -> None:
        """Run one pass; each worker folds into an accumulator of its own."""
        args = self.call.arguments
        mine = local()
        totals: list[list[Any]] = []

        def work(unit: Unit) -> None:
            if not hasattr(mine, "box"):
                mine.box = [step.start(self.model, args)]
                totals.append(mine.box)
            mine.box[0] = step.observe(mine.box[0], self.stacks.stack(unit), self.arguments(unit.name))

        infos, model = self.stacks.infos, self.model
        names = [name for name in model.shapes if step.only is None or step.only(args, name, model)]
        units = sampled_units(model) if step.sampled else units_of(self.call, model, infos, names)
        self._map((unit, work) for unit in units)
        total = step.start(self.model, args)
        for (part,) in totals:
            total = step.merge(total, part)
        self.model.results[step.name] = step.finish(total, self.model, args)

    def arguments(self, name: str) -> Any:
        """Return the arguments for one tensor: those that vary over the model have its value."""
        args, model = self.call.arguments, self.model
        if not getattr(args, "varied", None):
            return args
        return resolved(args, model.tied.get(name, name), self.stacks.depth(name), model.experts)

    def coefficients(self, name: str) -> list[float]:
        """Return c_t of a linear method for one tensor, whose direction is Σ c_t τ_t: what it makes of unit vectors."""
        count, args = len(self.model.experts), self.arguments(name)
        units = torch.eye(count, dtype=torch.float64)
        stored = self.model.tied.get(name, name)
        direction = self.call.method(Stack(stored, units.new_zeros(count), units, 0, self.stacks.model_at(name)), args)[
            1
        ]
        varied = args.scale if "scale" in getattr(args, "varied", ()) else 1.0
        return [float(coefficient) * varied for coefficient in direction]

    def _map(self, tasks: Iterable[Task]) -> None:
        """Do all tasks with worker threads, never more in flight than memory allows."""
        tasks = list(tasks)
        units = [unit for unit, _ in tasks]
        costs = [unit_bytes(self.call, self.model, unit) for unit in units]
        schedule = Schedule(costs, max(costs, default=0) + self.buffer)

        def work(at: int) -> None:
            unit, task = tasks[at]
            task(unit)

        # Element by element nothing calls SciPy's BLAS, so that it need not be loaded.
        whole = not all(treats_elements_alone(self.call, self.model, name) for name in self.model.shapes)
        workers = min(self.workers or default_workers(), max(len(tasks), 1))
        start_linear_algebra(self.stacks.device)
        with one_thread() if whole else nullcontext():
            work_through(schedule, work, workers, partial(self._announce, units, schedule))

    def _announce(self, units: Sequence[Unit], schedule: Schedule) -> None:
        """Ask the disk for units ahead of the workers, in this thread, which has nothing else to do.

        Workers that read piece by piece from nine files reach half of a disk's speed; the system reads ahead by 128 KB.
        """
        width = (len(self.stacks.experts) + 1) * self.model.dtype.itemsize
        ends = list(accumulate((unit.stop - unit.start) * width for unit in units))
        asked = 0
        while asked < len(units):
            # Half of what was asked for has been handed out: few of these turns, each wakes this thread.
            done = schedule.wait_for(bisect_left(ends, ends[asked - 1] - _AHEAD // 2)) if asked else 0
            last = max(bisect_right(ends, ends[done - 1] + _AHEAD if done else _AHEAD), asked + 1)
            for unit in units[asked:last]:
                self.stacks.read_ahead(unit)
            asked = last


class _Facts:
    """What a pass finds of one tensor by itself, from its pieces, on any threads.

    Args:
        pieces: How many pieces the tensor has.
        before: What an earlier pass finds of the tensor, which this one needs.
    """

    def __init__(self, engine: Engine, name: str, step: Pass, pieces: int, before: _Facts | None = None) -> None:
        self._engine, self._name, self._pass, self._left, self._before = engine, name, step, pieces, before
        self._total = step.start(engine.model, engine.call.arguments)
        self._lock, self._ended, self._failed = Lock(), Event(), False

    def observe(self, unit: Unit) -> None:
        """Read a piece; the last one settles what is known of the tensor."""
        if self._before is not None and not self._before.complete():
            return self._end(failed=True)
        model, args, step = self._engine.model, self._engine.arguments(self._name), self._pass
        try:
            stack = self._engine.stacks.stack(unit)
            part = step.observe(step.start(model, args), stack, args)
            with self._lock:
                self._total, self._left = step.merge(self._total, part), self._left - 1
                if self._left:
                    return None
            model.results[step.name][stack.name] = step.finish(self._total, model, args)
        except BaseException:
            self._end(failed=True)
            raise
        return self._end()

    def complete(self) -> bool:
        """Wait for the last piece; returns whether all could be read. The error is raised where one could not."""
        self._ended.wait()
        return not self._failed

    def _end(self, failed: bool = False) -> None:
        self._failed |= failed
        self._ended.set()


def units_of(call: Call[Any], model: Model, infos: Mapping[str, TensorInfo], names: Iterable[str]) -> Iterator[Unit]:
    """Yield the pieces of work for the named tensors, in order of name: whole ones or rows where the method needs them.

    Args:
        model: What is known of the model; tensors without a shape there are copied.
        infos: Shape and type of every tensor.
    """
    step = piece_of(model)
    for name in sorted(names):
        info = infos[name]
        if name in model.shapes and not treats_elements_alone(call, model, name):
            yield from _rows(name, info.shape, step) if call.method.by_rows else [Unit(name, 0, info.numel, info.shape)]
            continue
        for start, stop in _pieces(info.numel, step):
            yield Unit(name, start, stop, (stop - start,))


def _pieces(numel: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of a tensor's pieces: whole leaves together, and what is left of them by itself.

    Sums over experts have another order in the last elements of a piece, so those stay where a leaf ends.
    """
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, step):
        yield start, min(start + step, whole)
    if whole < numel or not numel:
        yield whole, numel


def _rows(name: str, shape: tuple[int, ...], step: int) -> Iterator[Unit]:
    """Yield a tensor's rows, some at a time that fill whole leaves together; all of a tensor that has no such."""
    width, numel = prod(shape[1:]), prod(shape)
    leaves = lcm(width, BLOCK) if len(shape) > 1 and numel else max(numel, 1)
    size = max(step // leaves, 1) * leaves
    if numel <= size:
        yield Unit(name, 0, numel, shape)
        return
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        yield Unit(name, start, stop, ((stop - start) // width, *shape[1:]))


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
        name: The tensor; of tied ones the first of the group decides.
    """
    alone: bool = call.method.elementwise(call.arguments, model.tied.get(name, name), model)
    return alone


def unit_bytes(call: Call[Any], model: Model, unit: Unit) -> int:
    """Return the bytes that work on a unit holds at most.

    Args:
        call: The configured method (or compressor).
        unit: A whole tensor, or some rows of one: base, task vectors and the method's workspace; or a block of one,
            four times as much.
    """
    size, experts = (unit.stop - unit.start) * model.dtype.itemsize, len(model.experts)
    if unit.name not in model.shapes or treats_elements_alone(call, model, unit.name):
        return (4 * (experts + 1) + model.extra_tensors) * size
    stored = model.tied.get(unit.name, unit.name)
    held = replace(model, shapes={stored: unit.shape}) if call.method.by_rows else model
    workspace: int = call.method.workspace(call.arguments, stored, held)
    return (experts + 1 + model.extra_tensors) * size + workspace


def default_workers() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
