"""What a result depends on besides its inputs: code, interpreter, packages, processor. Where they differ, bits may."""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mergeflow

# Whatever touches a number on its way from pixels or text to merged weights.
_PACKAGES = (
    *("mergeflow", "torch", "torchvision", "open_clip_torch", "transformers", "tokenizers"),
    *("safetensors", "numpy", "scipy", "pillow"),
)


def environment() -> dict[str, Any]:
    """Return the library's code, interpreter, operating system, processor, accelerator and packages, as JSON values.

    Example:
        >>> sorted(environment())
        ['accelerator', 'code', 'instructions', 'packages', 'processor', 'python', 'system']
    """
    return {
        "code": _code(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def environment_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two environments, in words.

    Example:
        >>> environment_changes({"python": "3.11", "packages": {"torch": "2.9"}}, {"python": "3.11", "packages": {}})
        ['torch: 2.9 then, missing now']
    """
    old, new = _flat(then), _flat(now)
    return [
        f"{key}: {old.get(key) or 'missing'} then, {new.get(key) or 'missing'} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in environment.items() if key != "packages"}, **environment["packages"]}


def _code() -> str:
    """Return a digest of the library's source: its version number does not change with every change of a formula."""
    folder, whole = Path(mergeflow.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's model, which decides the kernels that are chosen; platform.processor() is often empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
