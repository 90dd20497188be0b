"""Merging: the catalog of methods, prepared directions, recipes and the streaming engine.

The catalog is imported with the package; what computes or reads files is imported when it is first used, with torch.
"""

from typing import TYPE_CHECKING

from mergeflow.late import late_names
from mergeflow.merging.catalog import MethodCall, configure, get, methods

if TYPE_CHECKING:
    from mergeflow.merging.check import check_recipe
    from mergeflow.merging.execution.direction import Direction, prepare
    from mergeflow.merging.files.plan import Plan
    from mergeflow.merging.files.recipe import Recipe, load_recipe, make_recipe
    from mergeflow.merging.linalg.spectra import FactorCache
    from mergeflow.merging.streaming import Merged, merge

_HOMES = {
    "Direction": "mergeflow.merging.execution.direction",
    "FactorCache": "mergeflow.merging.linalg.spectra",
    "Merged": "mergeflow.merging.streaming",
    "Plan": "mergeflow.merging.files.plan",
    "Recipe": "mergeflow.merging.files.recipe",
    "check_recipe": "mergeflow.merging.check",
    "load_recipe": "mergeflow.merging.files.recipe",
    "make_recipe": "mergeflow.merging.files.recipe",
    "merge": "mergeflow.merging.streaming",
    "prepare": "mergeflow.merging.execution.direction",
}

__all__ = [
    "Direction",
    "FactorCache",
    "Merged",
    "MethodCall",
    "Plan",
    "Recipe",
    "check_recipe",
    "configure",
    "get",
    "load_recipe",
    "make_recipe",
    "merge",
    "methods",
    "prepare",
]


__getattr__ = late_names(__name__, _HOMES)
