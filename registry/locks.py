"""Locks of the registry: one holder per name; the operating system releases the lock when its holder dies."""

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy
from filelock import FileLock, Timeout

from mergeflow.errors import MergeflowError

_POLL_SECONDS = 0.05


@contextmanager
def file_lock(folder: Path, name: str, timeout: float) -> Iterator[None]:
    """Hold the lock `name` among the processes of this machine.

    Args:
        folder: where the lock files are; made when missing.
        name: what is locked, any text.
        timeout: seconds to wait for another holder.

    Raises:
        MergeflowError: another process held it all that time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{_number(name):016x}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout, poll_interval=_POLL_SECONDS)
    except Timeout:
        raise _busy(name, timeout, str(path)) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def postgres_lock(uri: str, name: str, timeout: float) -> Iterator[None]:
    """Hold the advisory lock `name` of the PostgreSQL database `uri`, among all machines that use it.

    The lock belongs to one connection: a killed holder's connection closes and the lock is free.

    Args:
        uri: SQLAlchemy address of the database, postgresql://...
        name: what is locked, any text.
        timeout: seconds to wait for another holder.

    Raises:
        MergeflowError: another process held it all that time.
    """
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.pool.NullPool, isolation_level="AUTOCOMMIT")
    key = _number(name) - 2**63
    with engine.connect() as connection:
        end = time.monotonic() + timeout
        while not connection.execute(sqlalchemy.text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar():
            if time.monotonic() > end:
                raise _busy(name, timeout, "a PostgreSQL advisory lock")
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            connection.execute(sqlalchemy.text("SELECT pg_advisory_unlock(:key)"), {"key": key})


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"mergeflow {name}".encode()).digest()[:8], "big")


def _busy(name: str, timeout: float, where: str) -> MergeflowError:
    return MergeflowError(
        f"the registry's lock '{name}' was held by another process for {timeout:g} s ({where}): "
        "wait for that run to end, or end it, and try again."
    )
