"""The schedule of a merge: units of work go to threads in order, as far as memory allows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from threading import Condition, Lock

from mergeflow.late import torch


class Schedule:
    """Hands the numbers of units, in order, to the threads that iterate over it, as far as memory allows.

    Threads fetch their work themselves: to hand each unit over would wake one of them each time.

    Args:
        costs: Bytes that each unit holds.
        budget: Bytes that may be held at a time; a unit that is alone may hold more.
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
        """Whether the schedule hands out no more units."""
        return self._next >= len(self._costs)

    def stop(self) -> None:
        """Stop handing out units."""
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
