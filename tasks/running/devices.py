"""GPU slots: one piece of work on a CUDA device at a time, over all processes and projects of a machine."""

import getpass
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from filelock import Timeout

from mergeflow.errors import MergeflowError
from tasks.project import files

POLL_SECONDS = 0.2


def device_names(wanted: str) -> list[str]:
    """Return the devices that `run.device` allows; for `auto` every CUDA device, or the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = [f"cuda:{number}" for number in range(count)]
    if wanted == "cpu" or (wanted == "auto" and not every):
        return ["cpu"]
    allowed = every if wanted in ("auto", "cuda") else [name for name in every if name == wanted]
    if not allowed:
        listed = ", ".join(every) or "no CUDA device"
        raise MergeflowError(f"run.device is '{wanted}', but torch finds {listed}: use 'auto' or 'cpu'.")
    return allowed


@contextmanager
def device_slot(names: Sequence[str], locks: Path | None = None) -> Iterator[str]:
    """Wait until one of the devices is free, hold its file lock, give its name. The CPU needs no lock.

    The lock is the operating system's: it falls when its holder dies.

    Args:
        locks: folder of the lock files; one for all projects of a user by default.
    """
    if "cpu" in names:
        yield "cpu"
        return
    folder = locks or Path(tempfile.gettempdir()) / f"mergeflow-devices-{getpass.getuser()}"
    wait = files.Wait(" or ".join(names))
    while True:
        for name in names:
            with ExitStack() as held:
                try:
                    held.enter_context(files.file_lock(folder / f"{_on_machine(name)}.lock", name, timeout=0))
                except Timeout:
                    continue
                yield name
                return
        wait.pause(POLL_SECONDS)


def _on_machine(device: str) -> str:
    """Return the name of a device on its machine: a worker of a cluster may see one of several, as cuda:0."""
    number, shown = int(device.removeprefix("cuda:")), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"cuda-{shown[number].strip().replace('/', '-') if number < len(shown) and shown[0] else number}"
