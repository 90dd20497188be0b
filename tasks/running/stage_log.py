"""The log of a stage: what it printed, and the traceback it ended with, in a file of its own."""

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from mergeflow.errors import without_passwords

LIMIT = 2**20  # characters that a stage may print into its log
TRACEBACK = 2**16  # of a traceback, from its end


class _Log:
    """A bounded text file; a disk that is full does not fail the stage."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._left = path.open("w", encoding="utf-8", errors="replace"), LIMIT

    def write(self, text: str) -> None:
        if self._left <= 0:
            return
        self._put(text[: self._left])
        self._left -= len(text)
        if self._left <= 0:
            self._put(f"\n… the stage printed more than {LIMIT} characters; the rest is left out.\n")

    def end(self, text: str) -> None:
        self._put(text)
        with suppress(OSError):
            self._file.close()

    def _put(self, text: str) -> None:
        with suppress(OSError):
            self._file.write(without_passwords(text))
            self._file.flush()


class _Copied:
    """A stream whose text also goes to the log of the stage that writes it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        log = _LOG.get()
        if log is not None:
            log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_LOG: ContextVar[_Log | None] = ContextVar("log", default=None)  # each thread has its own
_TURN = threading.Lock()
_at_work = 0
_streams: tuple[TextIO, TextIO]


def log_path(state: Path, name: str) -> Path:
    return state / "logs" / f"{name}.log"


@contextmanager
def stage_log(path: Path) -> Iterator[None]:
    """Copy into a new file what the block prints in this thread, and the traceback of what it raises."""
    try:
        log = _Log(path)
    except OSError:  # the disk is full: the stage will say so itself
        yield
        return
    log.write(f"{_now()} begins\n")
    token, last = _LOG.set(log), "ends"
    try:
        with _copied_streams():
            yield
    except BaseException:
        last = f"fails\n{traceback.format_exc()[-TRACEBACK:]}"
        raise
    finally:
        _LOG.reset(token)
        log.end(f"{_now()} {last}\n")


def add_to_log(text: str) -> None:
    """Write into the log of the stage that this thread is at work on, and not to the terminal."""
    log = _LOG.get()
    if log is not None:
        log.write(text)


@contextmanager
def _copied_streams() -> Iterator[None]:
    """Put the copying streams in place while any stage of this process is at work."""
    global _at_work, _streams
    with _TURN:
        if not _at_work:
            _streams = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = _Copied(sys.stdout), _Copied(sys.stderr)
        _at_work += 1
    try:
        yield
    finally:
        with _TURN:
            _at_work -= 1
            if not _at_work:
                sys.stdout, sys.stderr = _streams


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
