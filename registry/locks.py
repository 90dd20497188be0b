"""Locks of the registry: one holder per name; a lock is released when its holder dies."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy
from filelock import FileLock, Timeout

from mergeflow.errors import MergeflowError, first_line

_POLL_SECONDS = 0.05
Check = Callable[[], None]
"""Asks whether a lock is still held; raises LockLost where it is not."""


class LockLost(MergeflowError):
    """The lock is gone, and others may have written since: what was read under it may no longer be true."""


@contextmanager
def file_lock(folder: Path, name: str, timeout: float) -> Iterator[Check]:
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
        yield lambda: None  # the operating system keeps it as long as the process lives
    finally:
        lock.release()


@contextmanager
def postgres_lock(uri: str, name: str, timeout: float) -> Iterator[Check]:
    """Hold the advisory lock `name` of the PostgreSQL database `uri`, among all machines that use it.

    The lock belongs to one connection: a killed holder's connection closes and the lock is free. So it is too when the
    server is started again under a living holder, who has to ask before a write that others may not undo.

    Args:
        uri: SQLAlchemy address of the database, postgresql://...
        name: what is locked, any text.
        timeout: seconds to wait for another holder.

    Yields:
        What asks the same connection whether the lock is still held.

    Raises:
        MergeflowError: another process held it all that time, or the database does not answer.
    """
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.pool.NullPool, isolation_level="AUTOCOMMIT")
    key = _number(name) - 2**63
    connection = _acquired(engine, key, name, timeout)

    def ask(question: str) -> object:
        return connection.execute(sqlalchemy.text(question), {"key": key}).scalar()

    def check() -> None:
        try:
            held = ask(_HELD)
        except sqlalchemy.exc.SQLAlchemyError:
            held = None
        if not held:
            raise LockLost(
                f"the registry's lock '{name}' was lost: the PostgreSQL server that keeps it was started again, or the "
                "connection broke. Nothing was changed; try again."
            )

    try:
        yield check
    finally:
        with suppress(sqlalchemy.exc.SQLAlchemyError):  # a lost connection has released it
            ask("SELECT pg_advisory_unlock(:key)")
        with suppress(sqlalchemy.exc.SQLAlchemyError):
            connection.close()


# An advisory lock's key is kept in two halves.
_HELD = """
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid() AND objsubid = 1
AND (classid::bigint << 32 | objid::bigint) = CAST(:key AS bigint)
"""


def _acquired(engine: sqlalchemy.Engine, key: int, name: str, timeout: float) -> sqlalchemy.Connection:
    """Return the connection that holds the lock."""
    end = time.monotonic() + timeout
    try:
        connection = engine.connect()
        while not connection.execute(sqlalchemy.text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar():
            if time.monotonic() > end:
                connection.close()
                raise _busy(name, timeout, "a PostgreSQL advisory lock")
            time.sleep(_POLL_SECONDS)
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise MergeflowError(
            f"the PostgreSQL database that keeps the registry's lock '{name}' does not answer: {first_line(error)}. "
            "Nothing was changed; start that server, or correct MERGEFLOW_LOCK_URI, and try again."
        ) from error
    return connection


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"mergeflow {name}".encode()).digest()[:8], "big")


def _busy(name: str, timeout: float, where: str) -> MergeflowError:
    return MergeflowError(
        f"the registry's lock '{name}' was held by another process for {timeout:g} s ({where}): "
        "wait for that run to end, or end it, and try again."
    )
