"""End a run at once and cleanly at Ctrl-C or SIGTERM; the same command then continues."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn

import typer
from prefect.exceptions import TerminationSignal
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner

GRACE = 60.0  # seconds for a clean end; a KeyboardInterrupt may get lost in code of others


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


@contextmanager
def stoppable() -> Iterator[None]:
    """End the process when Ctrl-C or SIGTERM stops the run in the block, although threads of it are still at work.

    The exit status is 130 or 143, as shells have it. What is cleaned up on the way, the terminal and Prefect's state of
    the run, is clean then; if that takes longer than a minute, the process ends all the same. Prefect catches SIGTERM
    itself while a flow runs and hands it on to the handler set here.
    """

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        last = threading.Timer(GRACE, os._exit, [128 + number])
        last.daemon = True
        last.start()
        os.write(2, b"\nStopping: recording what has finished takes a few seconds.\n")  # `print` may be at work
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt as stopped_by:
        typer.echo("Stopped: what has finished is recorded; the same command goes on with the rest.", err=True)
        status = 128 + (signal.SIGTERM if isinstance(stopped_by, Terminated) else signal.SIGINT)
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            os._exit(status)  # Python would wait for the stages
        raise typer.Exit(status) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def started(runner: TaskRunner[Any]) -> Iterator[TaskRunner[Any]]:
    """Start a task runner and stop it at the end, but do not wait for its stages when the run is told to stop.

    A stage may take hours. It goes on from its last checkpoint in the next run, as after kill -9.
    """
    with ExitStack() as stack:
        try:
            yield stack.enter_context(runner)
        except (KeyboardInterrupt, TerminationSignal):
            if isinstance(runner, ProcessPoolTaskRunner):
                for process in multiprocessing.active_children():
                    process.kill()
            else:
                stack.pop_all()
            raise
