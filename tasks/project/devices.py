"""GPU slots: one piece of work on a CUDA device at a time, over all processes and projects of a machine."""

import getpass
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from mergeflow.errors import MergeflowError

POLL_SECONDS = 0.2


def device_names(wanted: str) -> list[str]:
    """Return the devices that `run.device` allows; for `auto` every CUDA device, or the CPU where there is none.

    Raises:
        MergeflowError: CUDA is asked for and there is none, or the device's number is too high.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = [f"cuda:{number}" for number in range(count)]
    if wanted == "cpu" or (wanted == "auto" and not every):
        return ["cpu"]
    allowed = every if wanted in ("auto", "cuda") else [name for name in every if name == wanted]
    if not allowed:
        found = ", ".join(every) or "no CUDA device"
        raise MergeflowError(f"run.device is '{wanted}', but torch finds {found}: use 'auto' or 'cpu'.")
    return allowed


@contextmanager
def device_slot(names: Sequence[str], locks: Path | None = None) -> Iterator[str]:
    """Wait until one of the devices is free, hold its file lock, give its name. The CPU needs no lock.

    The lock is the operating system's: it falls when its holder dies.

    Args:
        names: devices that will do, in order of preference.
        locks: folder of the lock files; one for all projects of a user by default.
    """
    if "cpu" in names:
        yield "cpu"
        return
    folder = locks or Path(tempfile.gettempdir()) / f"mergeflow-devices-{getpass.getuser()}"
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        for name in names:
            lock = FileLock(folder / f"{name.replace(':', '-')}.lock")
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            try:
                yield name
            finally:
                lock.release()
            return
        time.sleep(POLL_SECONDS)
