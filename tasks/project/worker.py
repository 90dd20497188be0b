"""The code that runs here: a worker of a cluster whose code or packages are not the driver's makes other results."""

import hashlib
import platform
import socket
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mergeflow
import tasks
from mergeflow.errors import MergeflowError

HOST = "host"


@cache
def running_code() -> dict[str, str]:
    """Return a digest of the library's and the stages' source as imported here, the versions that matter, the host."""
    whole = hashlib.sha256()
    for folder in (Path(str(package.__file__)).parent for package in (mergeflow, tasks)):
        for path in sorted(folder.rglob("*.py")):
            whole.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    packages = {name: version(name) for name in ("torch", "numpy", "safetensors")}
    code = {"code of mergeflow": whole.hexdigest()[:12], "python": platform.python_version()}
    return {HOST: socket.gethostname(), **code, **packages}


def check_worker(driver: Mapping[str, str], stage: str) -> None:
    """Refuse to run a stage where the code or its packages are not those of the driver, which records its own.

    Args:
        driver: what `running_code` says where the run was started.
        stage: the stage's address.

    Raises:
        MergeflowError: something differs; the message has both sides.
    """
    here = running_code()
    differences = [
        f"{name} {here.get(name, 'missing')} here and {value} there"
        for name, value in driver.items()
        if name != HOST and here.get(name) != value
    ]
    if differences:
        raise MergeflowError(
            f"{stage} was sent to {here[HOST]}, which would make other results than {driver[HOST]}, where the run was "
            f"started: {', '.join(differences)}. Install the same mergeflow and packages on both."
        )
