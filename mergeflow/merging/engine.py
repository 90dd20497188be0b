"""The one engine behind every merge: reads stacks, runs a method's passes on worker threads, hands results to a sink.

In memory or streaming differ only in where tensors come from and go to, so they give the same bits. Every worker
computes with one thread, so the number of workers does not change a bit either.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints.checks import all_finite, infos_of, not_finite
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.merging.cache import FactorCache
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.method import Model, Stack

BUFFER = 256 * 2**20
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Unit:
    """A piece of work: a whole tensor, or one block of a tensor whose elements are treated alone."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


Sink = Callable[[Unit, Tensor, Tensor | None], None]
"""Takes the anchor and the direction of a unit; a tensor copied from the base has no direction."""


@dataclass
class Engine:
    """One merge: its method, inputs and machine.

    Attributes:
        call: The configured method.
        base: The base's state dict, in memory or lazy.
        experts: The experts' state dicts by name, in the order of the recipe.
        weights: Per-expert weights by name; missing ones are 1.
        cache: Kept factorisations.
        data: Statistics of data that some methods need, by kind and expert.
        workers: Threads; by default one per core.
        buffer: Bytes that may be in flight beyond the stack of the largest tensor.
        device: Where arithmetic happens.
    """

    call: MethodCall
    base: State
    experts: Mapping[str, State]
    weights: Mapping[str, float] | None = None
    cache: FactorCache | None = None
    data: Mapping[str, Any] | None = None
    workers: int | None = None
    buffer: int = BUFFER
    device: str = "cpu"
    watch: Callable[[str, str, int, Tensor], None] | None = None

    def __post_init__(self) -> None:
        self.infos: dict[str, TensorInfo] = infos_of(self.base)
        self.names = sorted(self.experts)
        self.dtype = self._arithmetic()
        weights = self.weights or {}
        self.model = Model(
            experts=tuple(self.names),
            listed=tuple(self.experts),
            weights=tuple(float(weights.get(name, 1.0)) for name in self.names),
            shapes={name: info.shape for name, info in sorted(self.infos.items()) if info.dtype.is_floating_point},
            dtype=self.dtype,
            data=self.data or {},
            tied=common_ties(self.base, self.experts),
            cache=self.cache,
        )
        self._scratch = local()
        self._checked = False

    def _arithmetic(self) -> torch.dtype:
        found = [info.dtype for state in (self.base, *self.experts.values()) for info in infos_of(state).values()]
        return torch.float64 if torch.float64 in found else torch.float32

    def run(self, sink: Sink) -> None:
        """Run the first passes, then hand anchor and direction of every unit to the sink (from worker threads)."""
        method, args = self.call.method, self.call.typed
        for statistic in method.statistics(args, self.dtype):
            self._first_pass(statistic)

        def work(unit: Unit) -> None:
            if not self.infos[unit.name].dtype.is_floating_point:
                piece = read(self.base, unit.name, unit.start, unit.stop)
                self._see("", unit, piece)
                return sink(unit, piece, None)
            stack = self._stack(unit)
            anchor, direction = method(stack, args)
            assert direction.shape == stack.base.shape, (self.call.name, unit.name, direction.shape, stack.base.shape)
            return sink(unit, anchor, direction)

        self._map(work, self.units())

    def units(self, floats_only: bool = False) -> Iterator[Unit]:
        """Yield the pieces of work in order of name."""
        alone = self.call.method.elementwise(self.call.typed)
        for name, info in sorted(self.infos.items()):
            if floats_only and not info.dtype.is_floating_point:
                continue
            if not alone and info.dtype.is_floating_point:
                yield Unit(name, 0, info.numel, info.shape)
                continue
            for start in range(0, max(info.numel, 1), BLOCK):
                stop = min(start + BLOCK, info.numel)
                yield Unit(name, start, stop, (stop - start,))

    def _first_pass(self, statistic: Any) -> None:
        args = self.call.typed
        mine = local()
        totals: list[list[Any]] = []

        def work(unit: Unit) -> None:
            if not hasattr(mine, "box"):
                mine.box = [statistic.start(self.model, args)]
                totals.append(mine.box)
            mine.box[0] = statistic.observe(mine.box[0], self._stack(unit), args)

        self._map(work, self.units(floats_only=True))
        total = statistic.start(self.model, args)
        for (part,) in totals:
            total = statistic.merge(total, part)
        self.model.known[statistic.name] = statistic.finish(total, self.model, args)

    def _stack(self, unit: Unit) -> Stack:
        """Read one unit of base and experts and form the task vectors; buffers are reused by each worker."""
        count = unit.stop - unit.start
        base, taus = self._buffers(count)
        read_into(self.base, unit.name, base, unit.start)
        self._check("base", unit, base)
        for row, name in zip(taus, self.names, strict=True):
            state = self.experts[name]
            difference = getattr(state, "is_task_vector", False)
            if difference and unit.name not in state:
                row.zero_()
                continue
            read_into(state, unit.name, row, unit.start)
            self._check(name, unit, row)
            if not difference:
                row.sub_(base)
        shape = unit.shape
        return Stack(
            unit.name,
            base.reshape(shape).to(self.device),
            taus.reshape(len(self.names), *shape).to(self.device),
            unit.start,
            self.model,
        )

    def _buffers(self, count: int) -> tuple[Tensor, Tensor]:
        if count > BLOCK:
            return torch.empty(count, dtype=self.dtype), torch.empty(len(self.names), count, dtype=self.dtype)
        if not hasattr(self._scratch, "space"):
            self._scratch.space = torch.empty((len(self.names) + 1) * BLOCK, dtype=self.dtype)
        space: Tensor = self._scratch.space[: (len(self.names) + 1) * count]
        return space[:count], space[count:].reshape(len(self.names), count)

    def _check(self, owner: str, unit: Unit, values: Tensor) -> None:
        # The sum is finite for finite values of any sane size, and far cheaper than looking at each.
        if not bool(values.sum().isfinite()) and not all_finite(values):
            raise not_finite(owner, unit.name)

    def _see(self, owner: str, unit: Unit, values: Tensor) -> None:
        if self.watch is not None:
            self.watch(owner, unit.name, unit.start, values)

    def _cost(self, unit: Unit) -> int:
        return (len(self.names) + 3) * (unit.stop - unit.start) * self.dtype.itemsize

    def _map(self, work: Callable[[Unit], None], units: Iterator[Unit]) -> None:
        """Run the work on all units with worker threads, never more in flight than memory allows."""
        workers = self.workers or default_workers()
        largest = max((info.numel for info in self.infos.values()), default=0)
        budget = (len(self.names) + 3) * largest * self.dtype.itemsize + self.buffer
        flying: dict[Future[None], int] = {}
        with single_threaded(workers) as pool:
            try:
                for unit in units:
                    cost = self._cost(unit)
                    while flying and (len(flying) >= 4 * workers or sum(flying.values()) + cost > budget):
                        self._collect(flying)
                    flying[pool.submit(work, unit)] = cost
                while flying:
                    self._collect(flying)
            except BaseException:
                for future in flying:
                    future.cancel()
                raise

    @staticmethod
    def _collect(flying: dict[Future[None], int]) -> None:
        done, _ = wait(flying, return_when=FIRST_COMPLETED)
        for future in done:
            del flying[future]
            future.result()


def read(state: State, name: str, start: int, stop: int) -> Tensor:
    """Return elements start..stop of a flattened tensor in its storage type."""
    if isinstance(state, LazyStateDict):
        return state.read(name, start, stop)
    return state[name].detach().reshape(-1)[start:stop]


def read_into(state: State, name: str, out: Tensor, start: int) -> None:
    """Fill the flat `out` from element `start` of a tensor, converting its type."""
    if isinstance(state, LazyStateDict):
        state.read_into(name, out, start)
    else:
        out.copy_(state[name].detach().reshape(-1)[start : start + out.numel()])


def common_ties(base: State, experts: Mapping[str, State]) -> dict[str, str]:
    """Return the names that share storage in the base and in every expert, each with the first name of its group."""
    ties = tied_names(base)
    for state in experts.values():
        if ties and not getattr(state, "is_task_vector", False):
            other = tied_names(state)
            ties = {name: first for name, first in ties.items() if other.get(name) == first}
    return ties


def tied_names(state: State) -> dict[str, str]:
    """Return the names whose tensor is another name's tensor too, each with the first name of its group."""
    if isinstance(state, LazyStateDict):
        return state.tied
    seen: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name in sorted(state):
        tensor = state[name]
        key = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and seen.setdefault(key, name) != name:
            ties[name] = seen[key]
    return ties


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
