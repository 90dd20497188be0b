"""How this process takes memory from the system: what a merge frees, the next tensor of the merge uses again.

A merge takes and frees blocks of some megabytes for every tensor. By default glibc maps such a block anew each time,
so the kernel fills every page with zeros before it is written: for SLERP a third of the whole time.
"""

import ctypes
from contextlib import suppress

# The numbers of glibc's malloc.h, and the values: one arena, as each keeps what its own threads have freed; blocks up
# to 32 MiB (the largest value that glibc takes) come from it; and 256 MiB may stay in it unused.
M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1
SETTINGS = {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 256 * 2**20}


def reuse_freed_memory() -> bool:
    """Let the allocator of this process keep freed blocks for the next tensor; no result depends on it.

    Called by commands alone, before they start: a program that imports the library chooses its own allocator.

    Returns:
        Whether it did: not where the C library has no `mallopt` (musl, macOS, Windows).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    chosen = [mallopt(number, value) for number, value in SETTINGS.items()]
    return chosen == [1] * len(SETTINGS)


def return_freed_memory() -> None:
    """Give the system what this process has freed.

    Called between stages: of what a fine-tune frees, glibc keeps several hundred megabytes between small blocks that
    live on, and each stage of a worker added to it.
    """
    with suppress(AttributeError, OSError, TypeError):  # the C library has no `malloc_trim` (musl, macOS, Windows)
        ctypes.CDLL(None).malloc_trim(0)
