"""Files that one process at a time holds."""

import errno
import fcntl
import os
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def lock_file(path: Path) -> int | None:
    """Open a file for appending, made when missing, and lock it; its folder must be there.

    Closing the descriptor, or the process's end by whatever cause, gives the lock back. On a file system without locks
    everybody gets one.

    Returns:
        The descriptor, or None where another process has the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return None
                raise
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # The holder before removed its file between our opening and our locking.
        os.close(descriptor)
