"""Files of a project: YAML read with messages for people, locks."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mergeflow.errors import MergeflowError
from mergeflow.yaml_text import parse_yaml

PATIENCE = 10.0  # seconds of waiting for a lock before its holder is spoken of


def read_yaml(path: Path) -> Any:
    try:
        content = path.read_bytes()
        return parse_yaml(content.decode(), path.name)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise MergeflowError(
            f"{path.name} is not UTF-8 text: byte 0x{content[error.start]:02x} in line {line}. Save the file as UTF-8."
        ) from None
    except FileNotFoundError:
        raise MergeflowError(f"{path.name} is missing in {path.parent}: run inside a project folder.") from None


@contextmanager
def file_lock(path: Path, what: str, timeout: float = -1) -> Iterator[None]:
    """Hold a lock among the processes of this machine; it is the operating system's and falls when its holder dies.

    Args:
        timeout: seconds to wait for another holder; -1: without end.

    Raises:
        filelock.Timeout: another process held it all that time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    soon = PATIENCE if timeout < 0 else min(PATIENCE, timeout)
    try:
        lock.acquire(timeout=soon)
    except Timeout:
        if soon == timeout:
            raise
        say_waiting(what)
        lock.acquire(timeout=-1 if timeout < 0 else timeout - soon)
    try:
        yield
    finally:
        lock.release()


def is_free(path: Path) -> bool:
    """Whether no process holds this lock file."""
    try:
        with file_lock(path, path.stem, timeout=0):
            return True
    except Timeout:
        return False


class Wait:
    """A wait, attempt by attempt, for what another process holds; whoever waits `PATIENCE` seconds is told for what."""

    def __init__(self, what: str) -> None:
        self._what, self._started, self._said = what, time.monotonic(), False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def pause(self, seconds: float) -> None:
        if self.seconds > PATIENCE and not self._said:
            self._said = True
            say_waiting(self._what)
        time.sleep(seconds)


def say_waiting(what: str) -> None:
    print(f"Waiting for {what}, which another process holds.", file=sys.stderr, flush=True)


@contextmanager
def awaited(what: str) -> Iterator[None]:
    """Say on stderr, once, that there is no answer, where the block takes longer than `PATIENCE`."""
    text = f"Waiting for {what}: no answer for {PATIENCE:g} s."
    timer = threading.Timer(PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
