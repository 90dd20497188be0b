"""The one engine behind every merge: runs a method's passes over all pieces of work, on worker threads.

In memory or streaming differ only in where tensors come from and go to, so they give the same bits. Every worker
computes with one thread, so the number of workers does not change a bit either.
"""

from __future__ import annotations

import gc
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import lcm, prod
from threading import Condition, Event, Lock, local
from typing import Any

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.catalog import Call
from mergeflow.merging.execution.device import (
    check_device,
    fits,
    free_bytes,
    in_bytes,
    start_linear_algebra,
    with_torch,
)
from mergeflow.merging.execution.reader import Stacks, Unit, piece_of
from mergeflow.merging.linalg.spectra import one_thread
from mergeflow.merging.method import Copies, Model, Pass, Stack
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


class Schedule:
    """Hands the numbers of units, in order, to the threads that iterate over it, as far as memory allows.

    Threads fetch their work themselves: to hand each unit over would wake one of them each time. `costs` are the bytes
    that each unit holds, `budget` those that may be held at a time; a unit that is alone may hold more.
    """

    def __init__(self, costs: Sequence[int], budget: int) -> None:
        self._costs, self._budget = costs, budget
        self._next = self._held = self._flying = self._mark = 0
        lock = Lock()
        self._room, self._passed = Condition(lock), Condition(lock)

    def __iter__(self) -> Iterator[int]:
        """Yield numbers of units to one thread; each is done when the next is asked for."""
        at = self._take(None)
        while at is not None:
            yield at
            at = self._take(at)

    def _take(self, done: int | None) -> int | None:
        with self._room:
            if done is not None:
                self._flying, self._held = self._flying - 1, self._held - self._costs[done]
                self._room.notify_all()
            self._room.wait_for(lambda: self.stopped or not self._flying or self._fits())
            if self.stopped:
                return None
            at, self._next = self._next, self._next + 1
            self._flying, self._held = self._flying + 1, self._held + self._costs[at]
            if self._next > self._mark:
                self._passed.notify_all()
            return at

    def _fits(self) -> bool:
        return self._held + self._costs[self._next] <= self._budget

    @property
    def stopped(self) -> bool:
        return self._next >= len(self._costs)

    def stop(self) -> None:
        with self._room:
            self._next = len(self._costs)
            self._room.notify_all()
            self._passed.notify_all()

    def wait_for(self, at: int) -> int:
        """Wait until a unit has been handed out; returns how many have been."""
        with self._passed:
            self._mark = at
            self._passed.wait_for(lambda: self._next > at or self.stopped)
            return self._next


def work_through(schedule: Schedule, work: Callable[[int], None], workers: int, meanwhile: Callable[[], None]) -> None:
    """Do all the work of a schedule on threads, and something else in this one; the first error of either is raised."""

    def run() -> None:
        try:
            for at in schedule:
                work(at)
        except BaseException:
            schedule.stop()
            raise

    with _collector_frozen(), single_threaded(workers) as pool:
        try:
            flying = [pool.submit(run) for _ in range(workers)]
            meanwhile()
            for future in as_completed(flying):
                future.result()
        finally:
            schedule.stop()


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


@contextmanager
def _collector_frozen() -> Iterator[None]:
    """Let the garbage collector pass over all that is there already: torch's modules are 10^5 objects and stay."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


@dataclass
class Engine:
    """One merge, of a configured method or compressor, on threads; `buffer` bytes are held beyond the largest piece."""

    call: Call[Any]
    stacks: Stacks
    workers: int | None = None
    buffer: int = BUFFER

    def __post_init__(self) -> None:
        check_device(self.stacks.device)

    @property
    def model(self) -> Model:
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
        stack = Stack(stored, units.new_zeros(count), units, 0, self.stacks.model_at(name))
        direction = self.call.method(stack, args)[1]
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
    """What a pass finds of one tensor by itself, from its pieces, on any threads; it may need what one before finds."""

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
    """Whether a method treats the elements of a tensor alone; of tied ones the first of the group decides."""
    alone: bool = call.method.elementwise(call.arguments, model.tied.get(name, name), model)
    return alone


def unit_bytes(call: Call[Any], model: Model, unit: Unit) -> int:
    """Return the bytes that work on a unit holds at most.

    Of a whole tensor, or some rows of one, these are base, task vectors and the method's workspace; of a block four
    times base and task vectors.
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


def held_elements(copies: Copies, experts: int, unit: Unit) -> int:
    """Count the elements, of the arithmetic's type, that a method holds on a device while it merges a unit.

    Example:
        >>> held_elements(Copies(0, 11), 2, Unit("w", 0, 100, (100,)))
        1100
        >>> held_elements(Copies(1, 3, square=2, least=6), 8, Unit("w", 0, 200, (10, 20)))
        3000
    """
    tensors = max(copies.each * experts + copies.fixed, copies.least)
    held = tensors * (unit.stop - unit.start)
    if len(unit.shape) > 1:
        rows, columns = unit.shape[-2:]
        joint = copies.joint * (2.2 if rows > columns * experts else 1)
        held += copies.square * columns**2 + joint * min(rows, columns * experts) ** 2
    return round(held)


def device_bytes(call: Call[Any], model: Model, units: Iterable[Unit], workers: int, buffer: int) -> int:
    """Return the bytes of a device that work on units takes at its peak; `buffer` is in the processor's memory."""
    widest = sorted(units, key=lambda unit: unit.start - unit.stop)[:workers]
    held, taken, most = 0, 0, unit_bytes(call, model, widest[0]) if widest else 0
    for unit in widest:  # the largest ones at once, as far as the engine lets them
        taken += unit_bytes(call, model, unit)
        if held and taken > most + buffer:
            break
        held += held_elements(call.method.on_device(call.arguments), len(model.experts), unit)
    return held * model.dtype.itemsize


def check_room(call: Call[Any], model: Model, infos: Mapping[str, TensorInfo], device: str) -> int:
    """Return the bytes of a device that a merge takes at its peak, after a check that they are free."""
    units = list(units_of(call, model, infos, infos))
    needed, free = device_bytes(call, model, units, default_workers(), BUFFER), free_bytes(device)
    if fits(needed, free):
        return needed
    widest = max(units, key=lambda unit: unit.stop - unit.start)
    raise MergeflowError(
        f"{call.name} of {len(model.experts)} experts needs about {in_bytes(with_torch(needed))} of {device}, where "
        f"{in_bytes(free)} are free: '{widest.name}' {list(widest.shape)} takes the most. Use device: cpu."
    )
