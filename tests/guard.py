"""A command that ends, with all that it has started, when the process that started it does, even by kill -9.

A server under test would else outlive a pytest that is killed, and take a processor for days.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # what a command leaves behind, as daemons do, is then the guard's to end


def guarded(command: Sequence[str], user: str = "") -> list[str]:
    """Return a command with a guard before it, to be started in a session of its own.

    The guard ends when the command does, with its status.

    Args:
        user: who runs the command; empty: who runs this.
    """
    return [sys.executable, "-S", __file__, str(os.getpid()), user, *command]


def end_below(pid: int) -> None:
    for below in descendants(pid):
        with suppress(ProcessLookupError):
            os.kill(below, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *(lower for child in children for lower in descendants(child))]


def wait_with(other: int, pid: int) -> None:
    """Wait until a child ends, or something else does, with which the child and all below it is then killed.

    Args:
        other: a descriptor that can be read when the other has ended.
    """
    child = os.pidfd_open(pid)
    if other in select.select([child, other], [], [])[0]:
        end_below(os.getpid())
    os.close(child)


def _guard(parent: str, user: str, *command: str) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # a session's, which the command gets too
        signal.signal(number, lambda *_: None)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with suppress(ProcessLookupError):  # it has ended already
        started_by = os.pidfd_open(int(parent))
        process = subprocess.Popen(command, user=user or None)
        wait_with(started_by, process.pid)
        return process.wait()
    return 1


if __name__ == "__main__":
    sys.exit(_guard(*sys.argv[1:]) % 256)
