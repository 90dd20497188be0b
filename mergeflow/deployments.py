"""The flows that prefect.yaml deploys, under a name that can be imported wherever mergeflow is installed.

A Prefect worker knows neither the repository nor where a wheel keeps the application; it imports
`mergeflow.deployments.nightly`, `.add_task` or `.gate` from here.
"""

from importlib import import_module
from typing import Any

from mergeflow.application import make_importable

make_importable()


def __getattr__(name: str) -> Any:
    if name not in ("nightly", "add_task", "gate"):
        raise AttributeError(f"module 'mergeflow.deployments' has no attribute '{name}'")
    return getattr(import_module("flows.deployments"), name)
