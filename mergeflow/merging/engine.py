"""The one engine behind every merge: reads stacks, runs a method's passes on worker threads, hands results to a sink.

In memory or streaming differ only in where tensors come from and go to, so they give the same bits. Every worker
computes with one thread, so the number of workers does not change a bit either.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import local
from typing import Any, Protocol

import torch
from torch import Tensor

from mergeflow.checkpoints.checks import all_finite, infos_of, not_finite
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict, tied_names
from mergeflow.merging.architectures.architecture import architecture_of
from mergeflow.merging.device import check_device, start_linear_algebra
from mergeflow.merging.linalg.cache import FactorCache
from mergeflow.merging.linalg.lapack import one_thread
from mergeflow.merging.method import Model, Stack, Statistic

BUFFER = 256 * 2**20
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Unit:
    """A piece of work: a whole tensor, or one block of a tensor whose elements are treated alone."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


Sink = Callable[[Unit, Stack | None, Any], None]
"""Takes a unit, its stack and the method's result for it; or no stack and a piece of an integer tensor of the base."""

Watch = Callable[[str, str, int, Tensor], None]


class Call(Protocol):
    """A configured method or compressor."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def arguments(self) -> Any:
        """Its arguments."""
        ...

    @property
    def method(self) -> Any:
        """What is called with (stack, arguments); has `elementwise` and `statistics`."""
        ...


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
        watch: Sees every piece that `run` reads: owner, tensor, first element, flat values as stored.
        seen: Told the number of bytes after each read, in every pass.
        config: The base's config.json, for a base in memory.
    """

    call: Call
    base: State
    experts: Mapping[str, State]
    weights: Mapping[str, float] | None = None
    cache: FactorCache | None = None
    data: Mapping[str, Any] | None = None
    workers: int | None = None
    buffer: int = BUFFER
    device: str = "cpu"
    watch: Watch | None = None
    seen: Callable[[int], None] | None = None
    config: Mapping[str, Any] | None = None

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
            architecture=architecture_of(self.base, self.config),
        )
        self._scratch = local()
        check_device(self.device)

    def _arithmetic(self) -> torch.dtype:
        found = [info.dtype for state in (self.base, *self.experts.values()) for info in infos_of(state).values()]
        return torch.float64 if torch.float64 in found else torch.float32

    def first_passes(self) -> None:
        """Find the statistics of the whole model that the method needs."""
        for statistic in self.call.method.statistics(self.call.arguments, self.dtype):
            self.first_pass(statistic)

    def run(self, sink: Sink, names: Iterable[str] | None = None) -> None:
        """Hand the method's result for every unit of the named tensors (or all) to the sink, from worker threads."""
        method, args = self.call.method, self.call.arguments

        def work(unit: Unit) -> None:
            if not self.infos[unit.name].dtype.is_floating_point:
                return sink(unit, None, self._copied(unit))
            stack = self.stack(unit, self.watch)
            return sink(unit, stack, method(stack, args))

        self._map(work, self.units(self.infos if names is None else names))

    def units(self, names: Iterable[str]) -> Iterator[Unit]:
        """Yield the pieces of work for the named tensors, in order of name."""
        alone = self.call.method.elementwise(self.call.arguments)
        for name in sorted(names):
            info = self.infos[name]
            if not alone and info.dtype.is_floating_point:
                yield Unit(name, 0, info.numel, info.shape)
                continue
            for start in range(0, max(info.numel, 1), BLOCK):
                stop = min(start + BLOCK, info.numel)
                yield Unit(name, start, stop, (stop - start,))

    def first_pass(self, statistic: Statistic) -> None:
        """Run one pass; each worker folds into an accumulator of its own."""
        args = self.call.arguments
        mine = local()
        totals: list[list[Any]] = []

        def work(unit: Unit) -> None:
            if not hasattr(mine, "box"):
                mine.box = [statistic.start(self.model, args)]
                totals.append(mine.box)
            mine.box[0] = statistic.observe(mine.box[0], self.stack(unit), args)

        self._map(work, self.units(self.model.shapes))
        total = statistic.start(self.model, args)
        for (part,) in totals:
            total = statistic.merge(total, part)
        self.model.known[statistic.name] = statistic.finish(total, self.model, args)

    def stack(self, unit: Unit, watch: Watch | None = None) -> Stack:
        """Read one unit of base and experts and form the task vectors; buffers are reused by each worker."""
        base, taus = self._buffers(unit.stop - unit.start)
        self._load("base", self.base, unit, base, watch)
        for row, name in zip(taus, self.names, strict=True):
            self._task_vector(name, unit, base, row, watch)
        return Stack(
            self.model.tied.get(unit.name, unit.name),
            base.reshape(unit.shape).to(self.device),
            taus.reshape(len(self.names), *unit.shape).to(self.device),
            unit.start,
            self.model,
        )

    def one_by_one(self, name: str, experts: Sequence[str] | None = None) -> tuple[Tensor, Iterator[Tensor]]:
        """Return a tensor of the base, and its task vectors one expert after the other (or some), all in one buffer."""
        info = self.infos[name]
        unit = Unit(name, 0, info.numel, info.shape)
        base, row = self._empty(info.numel), self._empty(info.numel)
        self._load("base", self.base, unit, base, None)

        def taus() -> Iterator[Tensor]:
            for expert in self.names if experts is None else experts:
                self._task_vector(expert, unit, base, row, None)
                yield row.reshape(info.shape).to(self.device)

        return base.reshape(info.shape).to(self.device), taus()

    def _task_vector(self, name: str, unit: Unit, base: Tensor, out: Tensor, watch: Watch | None) -> None:
        """Fill `out` with a unit of one expert's task vector."""
        state = self.experts[name]
        difference = getattr(state, "is_task_vector", False) and unit.name not in getattr(state, "absolute", ())
        if difference and unit.name not in state:
            out.zero_()
            return
        self._load(name, state, unit, out, watch)
        if not difference:
            out.sub_(base)

    def _load(self, owner: str, state: State, unit: Unit, out: Tensor, watch: Watch | None) -> None:
        """Fill `out` with a unit of a state, checked; the watcher sees it in its storage type."""
        if isinstance(state, LazyStateDict) and state.infos[unit.name].dtype == out.dtype:
            state.read_into(unit.name, out, unit.start)
            stored = out
        else:
            stored = read(state, unit.name, unit.start, unit.stop)
            out.copy_(stored)
        # The sum is finite for finite values of any sane size, and far cheaper than looking at each.
        if not bool(out.sum().isfinite()) and not all_finite(out):
            raise not_finite(owner, unit.name)
        if watch is not None:
            watch(owner, unit.name, unit.start, stored)
        if self.seen is not None:
            self.seen(stored.nbytes)

    def _copied(self, unit: Unit) -> Tensor:
        """Read a unit of an integer tensor: the base's counts, the experts' are only watched."""
        piece = read(self.base, unit.name, unit.start, unit.stop)
        if self.watch is not None:
            self.watch("base", unit.name, unit.start, piece)
            for name, state in self.experts.items():
                if unit.name in state:
                    self.watch(name, unit.name, unit.start, read(state, unit.name, unit.start, unit.stop))
        return piece

    def _buffers(self, count: int) -> tuple[Tensor, Tensor]:
        if count > BLOCK:
            return self._empty(count), self._empty(len(self.names), count)
        if not hasattr(self._scratch, "space"):
            self._scratch.space = self._empty((len(self.names) + 1) * BLOCK)
        space: Tensor = self._scratch.space[: (len(self.names) + 1) * count]
        return space[:count], space[count:].reshape(len(self.names), count)

    def _empty(self, *shape: int) -> Tensor:
        # A device reads pinned memory without a copy in between.
        return torch.empty(shape, dtype=self.dtype, pin_memory=self.device != "cpu")

    def _cost(self, unit: Unit) -> int:
        return (len(self.names) + 3) * (unit.stop - unit.start) * self.dtype.itemsize

    def _map(self, work: Callable[[Unit], None], units: Iterator[Unit]) -> None:
        """Run the work on all units with worker threads, never more in flight than memory allows."""
        workers = self.workers or default_workers()
        largest = max((info.numel for info in self.infos.values()), default=0)
        budget = (len(self.names) + 3) * largest * self.dtype.itemsize + self.buffer
        flying: dict[Future[None], int] = {}
        start_linear_algebra(self.device)
        whole = not self.call.method.elementwise(self.call.arguments)
        with one_thread() if whole else nullcontext(), single_threaded(workers) as pool:
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


def common_ties(base: State, experts: Mapping[str, State]) -> dict[str, str]:
    """Return the names that share storage in the base and stay equal in every expert, with the first of their group."""
    return {
        name: first
        for name, first in tied_names(base).items()
        if all(_tied_in(state, name, first) for state in experts.values())
    }


def _tied_in(state: State, name: str, first: str) -> bool:
    """Whether two names tied in the base are so in an expert; of task vectors only their values can tell."""
    if tied_names(state).get(name) == first:
        return True
    if not getattr(state, "is_task_vector", False) or (name in state) != (first in state):
        return False
    return name not in state or torch.equal(state[name], state[first])


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
