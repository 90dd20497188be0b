"""Processes that work for this one and end with it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor]:
    """Open a pool of fresh processes, which end at once, whatever they do, where the `with` block fails.

    A daemonic process, such as a worker of Dask, may have none: there it is one thread of its own.
    """
    if multiprocessing.current_process().daemon:
        with ThreadPoolExecutor(1) as thread:
            yield thread
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)
    try:
        yield pool
    except BaseException:  # Ctrl-C among them: what they do may take an hour
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


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
