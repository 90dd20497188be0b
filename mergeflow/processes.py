"""Processes that work for this one and end with it."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor


def worker_pool(workers: int) -> Executor:
    """Return a pool of fresh processes; use it in a `with` block.

    A daemonic process, such as a worker of Dask, may have none: there it is one thread of its own.

    Args:
        workers: how many, at least 1.
    """
    if multiprocessing.current_process().daemon:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)


def end_with_parent() -> None:
    """Let this worker process end as soon as its parent has; a killed one would leave its workers waiting for ever.

    Ctrl-C in a terminal reaches every process; the parent alone acts on it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker of a pool has a parent"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="end-with-parent").start()
