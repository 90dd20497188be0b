"""mergeflow: from one base and many tasks to experts, task vectors and merged models.

`import mergeflow` is fast: torch is imported when a name below is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergeflow.checkpoints import open_checkpoint, write_checkpoint
    from mergeflow.errors import MergeflowError
    from mergeflow.merging import check_recipe, configure, load_recipe, make_recipe, merge, methods, prepare

_HOMES = {
    "MergeflowError": "mergeflow.errors",
    "open_checkpoint": "mergeflow.checkpoints",
    "write_checkpoint": "mergeflow.checkpoints",
    "check_recipe": "mergeflow.merging",
    "configure": "mergeflow.merging",
    "load_recipe": "mergeflow.merging",
    "make_recipe": "mergeflow.merging",
    "merge": "mergeflow.merging",
    "methods": "mergeflow.merging",
    "prepare": "mergeflow.merging",
}

__all__ = [
    "MergeflowError",
    "check_recipe",
    "configure",
    "load_recipe",
    "make_recipe",
    "merge",
    "methods",
    "open_checkpoint",
    "prepare",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("mergeflow.version").version()
    if name not in _HOMES:
        raise AttributeError(f"module 'mergeflow' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
